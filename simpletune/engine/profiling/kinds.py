"""Split a step's time into attention, linear layers, quantisation, optimizer, element-wise work and idle time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from simpletune.engine.profiling.events import Recording, Span, gaps, union
from simpletune.system.phases import range_name

AUTOENCODER, OPTIMIZER, ATTENTION = "autoencoder", "optimizer", "attention"
LINEARS, QUANTISATION, ELEMENT_WISE, IDLE = "linears", "quantisation", "element-wise", "idle"
KINDS = (ATTENTION, LINEARS, ELEMENT_WISE, QUANTISATION, OPTIMIZER, AUTOENCODER, IDLE)
Chain = tuple[str, ...]
# Patterns for the names around an operation, outermost first, tested in this order; PRODUCT tests the last two names.
AROUND = {
    AUTOENCODER: re.compile(rf"^{AUTOENCODER}$"),
    OPTIMIZER: re.compile(rf"^Optimizer\.step#|^{range_name('optimizer')}$"),
    ATTENTION: re.compile(r"attention|softmax|::bmm|::baddbmm", re.IGNORECASE),
}
PRODUCT = re.compile(r"::(addmm_?|mm|_int_mm|linear|mkldnn_linear|matmul)$|conv|gemm|matmul|_mm(_|$)|int8_product")
QUANTISING = re.compile(r"int8|nf4|quanti|quanto|bitsandbytes|4bit|blockwise", re.IGNORECASE)


def shares(recording: Recording, count: int) -> dict[str, float]:
    """Compute shares of the recorded steps' time by kind; they add up to 1.

    With a device, count device time; a kernel has the kind of the operation that launched it. Without a device, count
    the operations' own time on the host; ``idle`` is then the time of Python and autograd between them.

    Args:
        recording: the events.
        count: number of complete steps.

    Raises:
        ValueError: no step was recorded.
    """
    steps = recording.whole_steps(count)
    start, stop = steps[0].start, steps[-1].stop
    taken: Counter[str] = Counter()
    timed = list(spans_with_chains([*recording.ranges, *recording.operators]))
    if recording.device:
        launched = {span.id: chain for span, chain, _ in timed if span.id}
        for span in recording.device:
            if start <= span.start < stop:
                taken[operation_kind((*launched.get(span.id, ()), span.name))] += span.stop - span.start
        idle = sum(b - a for a, b in gaps(union(recording.device), start, stop))
    else:
        for span, chain, own in timed:
            if start <= span.start < stop and is_work(span.name):
                taken[operation_kind(chain)] += own
        idle = max(0, stop - start - sum(taken.values()))
    busy = (stop - start - idle) / (sum(taken.values()) or 1)  # several streams or threads may work at once
    taken = Counter({kind: round(each * busy) for kind, each in taken.items()})
    return {kind: round((idle if kind == IDLE else taken[kind]) / (stop - start), 4) for kind in KINDS}


def operation_kind(chain: Chain) -> str:
    """Classify the operation at the end of a chain of nested names."""
    for kind, pattern in AROUND.items():
        if any(pattern.search(name) for name in chain):
            return kind
    if any(PRODUCT.search(name) for name in chain[-2:]):
        return LINEARS
    return QUANTISATION if any(QUANTISING.search(name) for name in chain) else ELEMENT_WISE


def is_work(name: str) -> bool:
    """Whether a name is an operation's, not a range's, an autograd node's or a Python function's."""
    return "::" in name and not name.startswith("autograd::")


def spans_with_chains(spans: Iterable[Span]) -> Iterator[tuple[Span, Chain, int]]:
    """Yield each span with its chain of enclosing names, and its time minus that of the spans directly inside it."""
    stack: list[tuple[Span, Chain, int]] = []
    for span in sorted(spans, key=lambda span: (span.track, span.start, -span.stop)):
        while stack and (stack[-1][0].track != span.track or stack[-1][0].stop <= span.start):
            yield stack.pop()
        around: Chain = ()
        if stack:
            outer, around, left = stack[-1]
            stack[-1] = outer, around, left - (min(span.stop, outer.stop) - span.start)
        stack.append((span, (*around, span.name), span.stop - span.start))
    yield from reversed(stack)
