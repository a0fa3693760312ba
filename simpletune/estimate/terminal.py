"""Format estimates: bars by stage and kind, the memory that a card must have, and comparisons as a table or chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from simpletune.engine.memory.snapshot import KINDS, MemorySnapshot
from simpletune.estimate.job_estimate import CONTEXT, FRAGMENTED, LEAST_FRAGMENTED, MIB, Estimate, fragmentation
from simpletune.runs.report.charts import KIND_COLOURS, stacked, text_bar
from simpletune.system.gpus import Card
from simpletune.system.options import Json, plural

WIDTH = 40  # characters of the longest bar
SIGNS = "█▓▚▒░▞·"  # of KINDS
GB = 10**9


def as_text(name: str, estimate: Estimate, card: Card | None, reserved: int = 0) -> str:
    """Return what ``simpletune estimate`` prints.

    Args:
        name: name of the run.
        estimate: estimate of the run.
        card: card that the run should fit on; None: no card was named.
        reserved: bytes of the card that other programs use.
    """
    width, height = estimate.size
    lines = [f"{name}: predicted peak memory on the card, MiB ({width}x{height} px), nothing loaded", ""]
    lines += bars(estimate.stages)
    lines += ["", *_verdict(estimate, card, reserved)]
    lines += ["", *_needs(estimate)]
    return "\n".join(lines)


def bars(snapshots: Mapping[str, MemorySnapshot]) -> list[str]:
    """Draw a bar for each snapshot, with one character per kind, and the legend."""
    longest = max(snapshot.bytes for snapshot in snapshots.values())
    title = max(len(name) for name in snapshots)
    lines = []
    for name, snapshot in snapshots.items():
        drawn = text_bar([snapshot.by_kind.get(kind, 0) for kind in KINDS], longest, WIDTH, SIGNS)
        lines.append(f"  {name:<{title}} {snapshot.bytes / MIB:>8,.0f}  {drawn:<{WIDTH}}  {place(snapshot)}".rstrip())
    present = [at for at, kind in enumerate(KINDS) if any(s.by_kind.get(kind) for s in snapshots.values())]
    lines.append("  " + " " * title + "           " + "  ".join(f"{SIGNS[at]} {KINDS[at]}" for at in present))
    return lines


def place(snapshot: MemorySnapshot) -> str:
    """Describe where a snapshot was taken: ``backward, block 23``."""
    where = snapshot.module.replace("transformer_blocks.", "block ")
    return ", ".join(part for part in (snapshot.phase, where) if part)


def _verdict(estimate: Estimate, card: Card | None, reserved: int) -> Iterator[str]:
    peak = estimate.peak
    yield f"  peak of the whole job  {peak.bytes / MIB:>8,.0f}  {estimate.peak_stage}: {place(peak)}"
    lost, least = fragmentation(peak.bytes) / MIB, LEAST_FRAGMENTED / MIB
    yield f"  fragmentation          {lost:>8,.0f}  an allowance of {FRAGMENTED:.0%}, at least {least:.0f}"
    yield f"  CUDA context           {CONTEXT / MIB:>8,.0f}  an allowance: kernels and libraries"
    if reserved:
        yield f"  other programs         {reserved / MIB:>8,.0f}  from --reserve"
    yield f"  the card must have     {(estimate.needed() + reserved) / MIB:>8,.0f}"
    if card is not None:
        yield f"  {card.name + ' has':<22} {card.bytes / MIB:>8,.0f}  as torch reports it"
        left = (card.bytes - reserved - estimate.needed()) / MIB
        yield (
            f"  it fits, {left:,.0f} MiB are left" if left >= 0 else f"  it does not fit: {-left:,.0f} MiB are missing"
        )


def _needs(estimate: Estimate) -> Iterator[str]:
    needs = estimate.needs
    host, disk, download = (sum(part.values()) for part in (needs.host, needs.disk, needs.download))
    yield f"  host memory about {host / 2**30:.1f} GiB ({_listed(needs.host, 2**30)})"
    if needs.shared >= 2**30 / 20:
        yield (
            f"  each further process on a machine about {(host - needs.shared) / 2**30:.1f} GiB: they share "
            f"{needs.shared / 2**30:.1f} GiB of frozen weights"
        )
    yield f"  disk about {(disk + download) / GB:.1f} GB ({_listed({'download': download, **needs.disk}, GB)})"
    if download:
        yield f"  to download {download / GB:.1f} GB ({_listed(needs.download, GB)})"
    if needs.counts is not None:
        pictures, prompts = plural(needs.counts.pictures, "picture"), plural(needs.counts.prompts, "prompt")
        yield f"  {pictures} to encode with {prompts}, limited by data.variants"
    else:
        yield "  the data set was not read, so its cache on disk is not counted"


def _listed(sizes: Mapping[str, int], unit: int) -> str:
    return ", ".join(f"{name} {size / unit:.1f}" for name, size in sizes.items() if size >= unit / 20) or "little"


def comparison(estimates: Mapping[str, Estimate]) -> str:
    """Tabulate several estimates: peak by kind and the memory that the card must have, in MiB."""
    present = [kind for kind in KINDS if any(e.peak.by_kind.get(kind) for e in estimates.values())]
    first = next(iter(estimates.values())).needed()
    title = max(len(name) for name in estimates)
    lines = [
        " " * title
        + "".join(f"{kind:>13}" for kind in present)
        + f"{'peak':>10}{'needed':>10}{'vs. first':>13}  peak at"
    ]
    for name, each in estimates.items():
        kinds = "".join(f"{each.peak.by_kind.get(kind, 0) / MIB:>13,.0f}" for kind in present)
        change = f"{each.needed() / first - 1:+.1%}"
        lines.append(
            f"{name:<{title}}{kinds}{each.peak.bytes / MIB:>10,.0f}{each.needed() / MIB:>10,.0f}{change:>13}"
            f"  {each.peak_stage}: {place(each.peak)}"
        )
    return "\n".join(lines)


def comparison_chart(estimates: Mapping[str, Estimate], card: Card | None) -> Json:
    """Chart several estimates: peak by kind in GB of 10^9 bytes, and the card's memory as a line."""
    rows: list[Json] = [
        {"name": name, "part": kind, "value": size / GB}
        for name, each in estimates.items()
        for kind in KINDS
        if (size := each.peak.by_kind.get(kind))
    ]
    limit = None if card is None else (f"{card.name}: {card.bytes / GB:.1f} GB", card.bytes / GB)
    spec = stacked(rows, "predicted peak memory, GB", KIND_COLOURS, ".2f", totals=True, limit=limit)
    return {"title": {"text": "Peak memory of the whole job", "offset": 12}, "width": 480, **spec}
