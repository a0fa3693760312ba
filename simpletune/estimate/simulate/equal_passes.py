"""Simulate two of a step's micro-batches, and count the others like the second.

The first one creates the gradients, the second adds to them. If the second leaves nothing behind but its loss, all
others do the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from simpletune.engine.memory import accounting
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.fake_results import NewTensor, made_again, several_of
from simpletune.engine.memory.repeating import PartPeaks
from simpletune.estimate.timing.recorder import Recorder
from simpletune.estimate.timing.repeat import RecordedPart
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.train_step import TrainStep


def count_equal_passes(core: TrainStep, recorder: Recorder | None) -> None:
    """In an accounting of fake tensors, run only those of a step's micro-batches that differ.

    Those that ``train.reduce`` ``exact`` sums as a tree all run, because each leaves gradients behind.

    Args:
        core: changed in place.
        recorder: of the step's work.
    """
    core.compute = _Counted(core, recorder)  # type: ignore[method-assign]


@dataclass
class _Pass:
    """What a micro-batch did.

    Args:
        peaks: the largest snapshots.
        loss: the tensor that it left behind, and the kind of its memory.
        left: bytes that it left allocated.
        part: the part of the recorded step.
        times: how often it has been counted again.
    """

    peaks: PartPeaks
    loss: tuple[NewTensor, str]
    left: int
    part: RecordedPart | None
    times: int = 0


class _Counted:
    """Replaces ``TrainStep.compute``."""

    def __init__(self, core: TrainStep, recorder: Recorder | None):
        self._core, self._recorder, self._plain = core, recorder, core.compute
        self._known: _Pass | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """Run or count one micro-batch, and return its part of the step's loss."""
        counting = accounting.active()
        if not self._core.losses:
            self._known = None
        if counting is None or counting.snapshots is not None or not self._core.losses:
            return self._plain(batch)
        loss = None if self._known is None else self._again(counting, self._known)
        return self._watch(counting, batch) if loss is None else loss

    def _watch(self, counting: Accounting, batch: Batch) -> Tensor:
        """Run a micro-batch, and store what it did if the next one will do the same."""
        before, on_host = counting.current, counting.host_bytes
        part = None if self._recorder is None else RecordedPart(self._recorder)
        with counting.apart() as peaks:
            loss = self._plain(batch)
        after = counting.current
        kinds = {*before.by_kind, *after.by_kind}
        left = {kind: after.by_kind.get(kind, 0) - before.by_kind.get(kind, 0) for kind in kinds}
        left = {kind: size for kind, size in left.items() if size}
        outputs = several_of(loss, [])
        result = None if outputs is None else outputs.results[0]
        alike = len(left) == 1 and counting.host_bytes == on_host and (part is None or part.end())
        if alike and isinstance(result, NewTensor):
            ((kind, size),) = left.items()
            self._known = _Pass(peaks, (result, kind), size, part)
        return loss

    def _again(self, counting: Accounting, known: _Pass) -> Tensor | None:
        """Count a micro-batch like the one that ran; None if its work cannot be recorded again."""
        if known.part is not None and not known.part.repeat():
            return None
        known.times += 1
        layout, kind = known.loss
        counting.include(known.peaks.with_more(kind, known.left * known.times))
        loss = made_again(self._core.losses[0].fake_mode, layout, [])  # type: ignore[attr-defined]
        assert isinstance(loss, Tensor)
        with counting.allocating(kind):
            counting.see([loss])
        self._core.losses.append(loss)
        return loss
