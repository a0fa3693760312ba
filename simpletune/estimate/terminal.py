"""Format estimates: bars by stage and kind, the memory that a card must have, time and price, comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from simpletune.engine.memory.snapshot import KINDS, MemorySnapshot
from simpletune.estimate.job_estimate import CONTEXT, FRAGMENTED, LEAST_FRAGMENTED, MIB, Estimate, fragmentation
from simpletune.estimate.job_time import JobTime
from simpletune.runs.report.charts import KIND_COLOURS, stacked_bars, text_bar
from simpletune.system.gpus import Card
from simpletune.system.options import Json, plural

WIDTH = 40  # characters of the longest bar
SIGNS = "█▓▚▒░▞·"  # of KINDS
LIMIT_ADVICE = {
    "host": "Python queues the work more slowly than this card does it: a cheaper card may be as fast",
    "link": "copies from and to host memory take longer than the computation: plan finds what may stay on the card",
}
"""What to do where something other than the card limits a step."""


def estimate_lines(name: str, estimate: Estimate, card: Card | None, reserved: int = 0) -> Iterator[str]:
    """Describe a run's memory and disk; ``card``: that the run should fit on, if one was named."""
    width, height = estimate.size
    yield f"{name}: predicted peak memory on the card, MiB ({width}x{height} px), nothing loaded"
    yield ""
    yield from bars(estimate.stages)
    yield ""
    peak = estimate.peak
    lost, least = fragmentation(peak.bytes) / MIB, LEAST_FRAGMENTED / MIB
    yield f"  peak of the whole job  {peak.bytes / MIB:>8,.0f}  {estimate.peak_stage}: {place(peak)}"
    yield f"  fragmentation          {lost:>8,.0f}  an allowance of {FRAGMENTED:.0%}, at least {least:.0f}"
    yield f"  CUDA context           {CONTEXT / MIB:>8,.0f}  an allowance: kernels and libraries"
    if reserved:
        yield f"  other programs         {reserved / MIB:>8,.0f}  from --reserve"
    yield f"  the card must have     {(estimate.needed_bytes() + reserved) / MIB:>8,.0f}"
    if card is not None:
        yield f"  {card.name + ' has':<22} {card.bytes / MIB:>8,.0f}  as torch reports it"
        left = (card.bytes - reserved - estimate.needed_bytes()) / MIB
        yield (
            f"  it fits, {left:,.0f} MiB are left" if left >= 0 else f"  it does not fit: {-left:,.0f} MiB are missing"
        )
    yield ""
    host, disk, download = (sum(part.values()) for part in (estimate.host, estimate.disk, estimate.download))
    yield f"  host memory about {host / 2**30:.1f} GiB ({_list_sizes(estimate.host, 2**30)})"
    if estimate.shared >= 2**30 / 20:
        yield (
            f"  each further process on a machine about {(host - estimate.shared) / 2**30:.1f} GiB: they share "
            f"{estimate.shared / 2**30:.1f} GiB of frozen weights"
        )
    on_disk = _list_sizes({"download": download, **estimate.disk}, 2**30)
    yield f"  disk about {(disk + download) / 2**30:.1f} GiB ({on_disk})"
    if download:
        yield f"  to download {download / 2**30:.1f} GiB ({_list_sizes(estimate.download, 2**30)})"
    if estimate.counts is not None:
        images, prompts = estimate.counts.images, plural(estimate.counts.prompts, "prompt")
        what = f"{plural(images, 'picture')} to encode with {prompts}, limited by data.variants"
        yield f"  {what if images else f'{prompts} to encode'}"
    else:
        yield "  the data set was not read, so its cache on disk is not counted"


def bars(snapshots: Mapping[str, MemorySnapshot]) -> list[str]:
    """Format a bar for each snapshot, with one character per kind, and the legend."""
    longest = max(snapshot.bytes for snapshot in snapshots.values())
    title = max(len(name) for name in snapshots)
    lines = []
    for name, snapshot in snapshots.items():
        bar = text_bar([snapshot.by_kind.get(kind, 0) for kind in KINDS], longest, WIDTH, SIGNS)
        lines.append(f"  {name:<{title}} {snapshot.bytes / MIB:>8,.0f}  {bar:<{WIDTH}}  {place(snapshot)}".rstrip())
    present = [at for at, kind in enumerate(KINDS) if any(s.by_kind.get(kind) for s in snapshots.values())]
    lines.append("  " + " " * title + "           " + "  ".join(f"{SIGNS[at]} {KINDS[at]}" for at in present))
    return lines


def place(snapshot: MemorySnapshot) -> str:
    """Describe where a snapshot was taken: ``backward, block 23``."""
    where = snapshot.module.replace("transformer_blocks.", "block ")
    return ", ".join(part for part in (snapshot.phase, where) if part)


def _list_sizes(sizes: Mapping[str, int], unit: int) -> str:
    return ", ".join(f"{name} {size / unit:.1f}" for name, size in sizes.items() if size >= unit / 20) or "little"


def comparison(estimates: Mapping[str, Estimate]) -> str:
    """Tabulate several estimates: peak by kind and the memory that the card must have, in MiB."""
    present = [kind for kind in KINDS if any(e.peak.by_kind.get(kind) for e in estimates.values())]
    first = next(iter(estimates.values())).needed_bytes()
    title = max(len(name) for name in estimates)
    lines = [
        " " * title
        + "".join(f"{kind:>13}" for kind in present)
        + f"{'peak':>10}{'needed':>10}{'vs. first':>13}  peak at"
    ]
    for name, each in estimates.items():
        kinds = "".join(f"{each.peak.by_kind.get(kind, 0) / MIB:>13,.0f}" for kind in present)
        change = f"{each.needed_bytes() / first - 1:+.1%}"
        lines.append(
            f"{name:<{title}}{kinds}{each.peak.bytes / MIB:>10,.0f}{each.needed_bytes() / MIB:>10,.0f}{change:>13}"
            f"  {each.peak_stage}: {place(each.peak)}"
        )
    return "\n".join(lines)


def comparison_chart(estimates: Mapping[str, Estimate], card: Card | None) -> Json:
    """Chart several estimates: peak by kind in GiB, and the card's memory as a line."""
    rows: list[Json] = [
        {"name": name, "part": kind, "value": size / 2**30}
        for name, each in estimates.items()
        for kind in KINDS
        if (size := each.peak.by_kind.get(kind))
    ]
    limit = None if card is None else (f"{card.name}: {card.bytes / 2**30:.1f} GiB", card.bytes / 2**30)
    spec = stacked_bars(rows, "predicted peak memory, GiB", KIND_COLOURS, ".2f", totals=True, limit=limit)
    return {"title": {"text": "Peak memory of the whole job", "offset": 12}, "width": 480, **spec}


def time_lines(time: JobTime) -> Iterator[str]:
    """Describe the time and price of a job on one card."""
    (low, high), step = time.interval, time.step
    uses = sorted(step.by_use.items(), key=lambda item: -item[1])
    large = (f"{name} {format_duration(seconds)}" for name, seconds in uses if seconds > 0.01 * step.seconds)
    yield f"  predicted time on {time.card.name} ({time.source})"
    yield (
        f"    a step {format_duration(step.seconds)} "
        f"({format_duration(step.seconds * low)} to {format_duration(step.seconds * high)}), "
        f"limited by the {step.limit} ({step.bound}): {', '.join(large)}"
    )
    if (advice := LIMIT_ADVICE.get(step.limit)) is not None:
        yield f"    {advice}"
    if time.larger is not None:
        yield f"    {time.larger.words}"
    if time.per_epoch is not None:
        yield f"    an epoch of {plural(time.per_epoch, 'step')} {format_duration(time.per_epoch * step.seconds)}"
    stages = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in time.stages.items() if seconds)
    yield f"    the job of {time.steps} steps {format_duration(time.seconds)} ({stages})"
    if time.price is not None and (cost := time.cost) is not None:
        yield f"    costs {cost:.2f} ({cost * low:.2f} to {cost * high:.2f}) at {time.price.words}"
    if time.per_epoch is None:
        yield "    the data set was not read, so preparing it is not counted"


def card_table(name: str, rows: Sequence[tuple[JobTime, str]]) -> Iterator[str]:
    """Tabulate hours and price of a job on several cards, each with why it cannot run the job (empty if it can); mark
    the fastest and the cheapest."""
    able = [time for time, why in rows if not why]
    fastest = min(able, key=lambda time: time.seconds, default=None)
    priced = [time for time in able if time.price is not None]
    cheapest = min(priced, key=lambda time: time.cost or 0.0, default=None)
    yield f"{name}: predicted time and price"
    yield f"  {'card':<14}{'s/step':>9}  {'limited by':<10}{'hours':>8}{'from':>8}{'to':>8}{'price':>10}  note"
    for time, why in rows:
        (low, high), hours = time.interval, time.seconds / 3600
        marks = [word for word, best in (("fastest", fastest), ("cheapest", cheapest)) if time is best]
        notes = [why] if why else marks
        if time.price is None:
            notes.append("no price known: give one with --prices")
        money = "" if time.price is None else f"{time.cost:.2f} {time.price.currency or ''}".rstrip()
        yield (
            f"  {time.card.name:<14}{time.step.seconds:>9.3f}  {time.step.limit:<10}{hours:>8.2f}{hours * low:>8.2f}"
            f"{hours * high:>8.2f}{money:>10}  {', '.join(notes)}".rstrip()
        )
    yield ""
    for time, _ in rows:
        price = "" if time.price is None else f"; {time.price.words}"
        yield f"  {time.card.name}: speeds {time.source}{price}"


def format_duration(seconds: float) -> str:
    """Format a duration with a suitable unit."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
