"""Format predicted times and prices: a few lines for one card, a table for several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simpletune.estimate.job_time import JobTime
from simpletune.system.prices import Price

MIB = 2**20


@dataclass(frozen=True)
class CardRow:
    """A card in a comparison.

    Args:
        time: time of the job on the card.
        price: price per hour; None if unknown.
        needed: bytes that a card must have.
        why_not: why the card cannot run the job; empty if it can.
    """

    time: JobTime
    price: Price | None
    needed: int
    why_not: str

    def as_json(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {
            **self.time.as_json(self.price),
            "needed_mib": round(self.needed / MIB),
            "why_not": self.why_not or None,
        }


def time_lines(time: JobTime, price: Price | None) -> Iterator[str]:
    """Describe the time of a job on one card."""
    low, high = time.interval
    step = time.step
    yield f"  predicted time on {time.card.name} ({time.source})"
    yield (
        f"    a step {format_duration(step.seconds)} "
        f"({format_duration(step.seconds * low)} to {format_duration(step.seconds * high)}), "
        f"bound by {step.bound}: {_uses(time)}"
    )
    if time.per_epoch is not None:
        yield f"    an epoch of {time.per_epoch} steps {format_duration(time.per_epoch * step.seconds)}"
    stages = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in time.stages.items() if seconds)
    yield f"    the job of {time.steps} steps {format_duration(time.seconds)} ({stages})"
    cost = time.cost(price)
    if price is not None and cost is not None:
        yield f"    costs {cost:.2f} ({cost * low:.2f} to {cost * high:.2f}) at {price.words}"
    if time.per_epoch is None:
        yield "    the data set was not read, so preparing it is not counted"


def card_table(name: str, rows: Sequence[CardRow]) -> Iterator[str]:
    """Tabulate hours and price of a job on several cards; mark the fastest and the cheapest."""
    able = [row for row in rows if not row.why_not]
    fastest = min(able, key=lambda row: row.time.seconds, default=None)
    priced = [row for row in able if row.price is not None]
    cheapest = min(priced, key=lambda row: row.time.cost(row.price) or 0.0, default=None)
    yield f"{name}: predicted time and price"
    yield f"  {'card':<14}{'s/step':>9}  {'bound by':<10}{'hours':>8}{'from':>8}{'to':>8}{'price':>10}  note"
    for row in rows:
        time, (low, high) = row.time, row.time.interval
        cost = time.cost(row.price)
        hours = time.seconds / 3600
        marks = [word for word, best in (("fastest", fastest), ("cheapest", cheapest)) if row is best]
        notes = [row.why_not] if row.why_not else marks
        if row.price is None:
            notes.append("no price known: give one with --prices")
        money = "" if cost is None or row.price is None else f"{cost:.2f} {row.price.currency or ''}".rstrip()
        yield (
            f"  {time.card.name:<14}{time.step.seconds:>9.3f}  {time.step.bound:<10}{hours:>8.2f}{hours * low:>8.2f}"
            f"{hours * high:>8.2f}{money:>10}  {', '.join(notes)}".rstrip()
        )
    yield ""
    for row in rows:
        price = "" if row.price is None else f"; {row.price.words}"
        yield f"  {row.time.card.name}: speeds {row.time.source}{price}"


def format_duration(seconds: float) -> str:
    """Format a duration with a suitable unit."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _uses(time: JobTime) -> str:
    """List the uses of a step's time, largest first."""
    uses = sorted(time.step.by_use.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name} {format_duration(seconds)}" for name, seconds in uses if seconds > 0.01 * time.step.seconds
    )
