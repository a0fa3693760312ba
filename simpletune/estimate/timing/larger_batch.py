"""Predict a step with more pictures in a micro-batch from the recorded work of a smaller one, without simulating it.

Most work grows in proportion; what concerns weights alone does not: their updates, unpacking and transfers. A product
keeps its kind, so that a card which small products do not fill, or a host that is slower than the card, shows as less
time for each picture. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from simpletune.config.train import Train
from simpletune.engine.memory.snapshot import MemorySnapshot
from simpletune.estimate.timing.sections import COMPUTE, KernelWork, StreamWork
from simpletune.estimate.timing.speeds import LINK, Speeds
from simpletune.estimate.timing.timeline import step_seconds

FACTORS = (4, 2)  # on the micro-batch
WORTH = 0.8  # of a picture's seconds: with less saved, the prediction's own error would decide
OF_WEIGHTS = ("clip", "optimizer")  # phases of the update
GROWING = ("activations", "workspace")  # kinds of memory


@dataclass(frozen=True)
class LargerBatch:
    """A micro-batch with which a picture takes clearly less time."""

    batch_size: int
    pictures: float
    """Times as many pictures in the same time."""
    step: float
    """Times as long a step."""
    accumulation: int | None = None
    """Micro-batches a step with which the training stays the same; None: there are no such."""

    def as_json(self) -> dict[str, object]:
        """Return the figures, and what they mean in ``words``."""
        figures = {"pictures_in_the_same_time": round(self.pictures, 2), "step_takes": round(self.step, 2)}
        return {"batch_size": self.batch_size, **figures, "words": self.words}

    @property
    def words(self) -> str:
        """Say what the larger batch gains and what it changes."""
        change = "a different training, though: fewer, larger steps for as many pictures"
        if self.accumulation is not None:
            change = f"with train.gradient_accumulation={self.accumulation} the steps see the same pictures"
        return (
            f"train.batch_size={self.batch_size}: a step would take {self.step:.1f} times as long, so the same time "
            f"trains {self.pictures:.1f} times as many pictures; {change}"
        )


def find_larger_batch(
    sections: Sequence[StreamWork],
    speeds: Speeds,
    train: Train,
    phases: Mapping[str, MemorySnapshot],
    may: Callable[[int, int], bool],
) -> LargerBatch | None:
    """Find how many times the micro-batch takes clearly less time for a picture, if any.

    Args:
        sections: of a recorded step.
        train: the section ``train`` of that step's configuration.
        phases: the largest snapshot of each phase of that step.
        may: returns whether a factor of the micro-batch is possible, given the peak in bytes that it leads to.
    """
    one, best, before = step_seconds(sections, speeds).seconds, None, train.accumulation
    for factor in FACTORS:
        peak = max((scaled_bytes(each, factor) for each in phases.values()), default=0)
        step = step_seconds(scaled_sections(sections, factor), speeds).seconds / one if may(factor, peak) else factor
        if step <= WORTH * factor and (best is None or factor / step > best.pictures):
            fewer = before // factor if before % factor == 0 and train.global_batch is None else None
            best = LargerBatch(train.micro_batch * factor, factor / step, step, fewer)
    return best


def scaled_bytes(snapshot: MemorySnapshot, factor: int) -> int:
    """Return the bytes of a snapshot with ``factor`` times the pictures; more than they take, if anything."""
    return snapshot.bytes + (factor - 1) * sum(snapshot.by_kind.get(kind, 0) for kind in GROWING)


def scaled_sections(sections: Sequence[StreamWork], factor: int) -> list[StreamWork]:
    """Return a step's sections with ``factor`` times the pictures."""
    passes = [each for each in sections if each.phase not in OF_WEIGHTS]
    # What goes to the host in the passes are activations, which come back with the same size; weights only come.
    parked = {work.extents for each in passes for work in each.work if work.kind == "to_host"}
    found = []
    for section in sections:
        work = section.work
        if section.phase not in OF_WEIGHTS:
            copied = section.stream != COMPUTE
            work = Counter[KernelWork]()
            for each, count in section.work.items():
                fixed = each.kind.startswith("unpack") or (copied and each.kind in LINK and each.extents not in parked)
                work[each if fixed else _scaled(each, factor)] += count
        found.append(replace(section, work=work))
    return found


def _scaled(work: KernelWork, factor: int) -> KernelWork:
    """Return a kernel's work for ``factor`` times the pictures: rows of products, heads, pixels and bytes come first
    among its extents, but after the number of tensors of a group."""
    first, *rest = work.extents
    if work.kind == "each":
        return work._replace(extents=(first, *(factor * extent for extent in rest)))
    return work._replace(extents=(factor * first, *rest))
