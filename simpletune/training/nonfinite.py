"""Detect NaN and infinity at the step where they arise, attribute them, and act on ``train.on_nonfinite``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from simpletune.config.schema import TrainConfig
from simpletune.data.samples import PlannedSample
from simpletune.engine.fp16_blocks import describe_overflow
from simpletune.runs.checkpoint_folders import last_saved, list_checkpoints
from simpletune.runs.folder import OVERFLOWS, SKIPPED, append_metrics, read_rows
from simpletune.stages.step.batch_loader import Batch, BatchLoader
from simpletune.stages.step.concept import ConceptBatch
from simpletune.stages.step.fp16 import LATER, is_overflow
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.options import UserError, join_names
from simpletune.training.pending_steps import PendingStep, global_figures

CODE = 4  # exit code
IN_A_ROW = 5  # consecutive skipped steps that end a run
LISTED = 4
T = TypeVar("T")


class NonFiniteGuard:
    """Check the loss and the gradient norm of every step; logging reads both from the device anyway.

    With ``train.on_nonfinite`` ``stop``, the check happens at logging, after the next step was launched. The run then
    ends and discards its weights; the step's gradient norms show where the problem began. With ``skip``, the check
    happens before the update.

    Args:
        folder: run folder, whose ``skipped.jsonl`` lists skipped steps.
        start: first step of this process.
        warn: prints a warning and adds it to the summary.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        core: TrainStep,
        batches: BatchLoader,
        start: int,
        warn: Callable[[str], None],
    ):
        self.folder, self.core, self.batches, self.warn = folder, core, batches, warn
        self.accelerator = core.accelerator
        self.skips = config.train.on_nonfinite == "skip"
        self.skipping = False
        """Whether the last step skipped its update."""
        before = {row["step"] for row in read_rows(folder / SKIPPED)}
        self._in_a_row = next(n for n in range(len(before) + 1) if start - n not in before)

    def allows_update(self, loss: Tensor, norm: Tensor) -> bool:
        """Return whether a step may update the weights. With ``skip``, the host waits for the backward pass."""
        if self.skips:
            mean, whole, _, _, *figures = global_figures(loss, norm, self.core).tolist()
            finite = math.isfinite(mean) and math.isfinite(whole)
            self.skipping = not finite and not is_overflow(mean, whole, figures)
        return not self.skipping

    def check(self, done: PendingStep, loss: float, norm: float, fp16: list[float]) -> bool:
        """Return whether a step's loss and gradient norm are finite; warn about a skipped step and record it. Steps
        that overflowed only because of fp16 are recorded elsewhere; the device has undone them.

        Args:
            fp16: with products in fp16, the loss scale and the blocks' flags.

        Raises:
            UserError: the run must end.
        """
        blocks = []
        if self.core.fp16 is not None and (blocks := self.core.fp16.widen(done.step, fp16[1:])):
            wide = f"computed in fp32 from step {done.step + 1 + LATER} on"
            self.warn(f"step {done.step + 1}: {describe_overflow(blocks)}, {wide}")
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            return True
        if is_overflow(loss, norm, fp16):
            if self.accelerator.is_main_process:
                row = {"step": done.step + 1, "loss_scale": fp16[0], "blocks": blocks}
                append_metrics(self.folder, row, OVERFLOWS)
            return False
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        about = self._describe(done, what)
        if not self.skips:
            raise UserError(f"{about}. {how_to_go_on(self.folder)}", CODE)
        self._in_a_row += 1
        names = self._samples(done.step)
        if self.accelerator.is_main_process:
            row = {"step": done.step + 1, "loss": str(loss), "grad_norm": str(norm), "samples": names}
            append_metrics(self.folder, row, SKIPPED)
        if self._in_a_row >= IN_A_ROW:
            raise UserError(
                f"{about}. train.on_nonfinite=skip ends the run after {self._in_a_row} non-finite steps in a row. "
                f"{how_to_go_on(self.folder)}",
                CODE,
            )
        self.warn(f"{about}. Skipped the update (train.on_nonfinite=skip)")
        return False

    def _describe(self, done: PendingStep, what: str) -> str:
        """Describe what is non-finite, and in which samples and parameters. Loads the step's batches again, because
        keeping them would use device memory."""
        losses = torch.stack(list(done.losses)).tolist()
        batches = self.batches.step(done.step)
        bad = [batch for batch, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)]
        mine = [
            (batch.names[row], inputs)
            for batch in bad or batches
            for row in range(len(batch.names))
            if (inputs := _nonfinite_inputs(batch, row))
        ]
        rows, suspects = self._gather(mine), self._gather([name for batch in bad for name in batch.names])
        names = [name for name, _ in rows] or suspects or self._samples(done.step)
        parts = [f"step {done.step + 1}: {what}. Samples: {', '.join(dict.fromkeys(names))}"]
        parts += [f"{name}: its {inputs} non-finite" for name, inputs in dict(rows).items()]
        parts += self._quarantine(done.step) if mine else []
        norms = dict(zip(done.normed, done.norms.tolist(), strict=True))
        named = self.core.named.items()
        parameters = [name for name, parameter in named if not math.isfinite(norms.get(parameter, 0.0))]
        if parameters:
            parts.append(f"Non-finite gradients: {join_names(parameters, LISTED)}")
        return ". ".join(parts)

    def _samples(self, step: int) -> list[str]:
        """List the names of a step's samples in all processes."""
        return self._gather([sample.view.image.name for sample in self._planned(step) if sample.weight])

    def _planned(self, step: int) -> list[PlannedSample]:
        """List the samples of a step's micro-batches in this process."""
        return [sample for samples in self.batches.passes.micro_batches(step) for sample in samples]

    def _gather(self, found: list[T]) -> list[T]:
        """Gather findings from all processes, because each sees only its own samples."""
        return gather_object(found) if self.accelerator.num_processes > 1 else found

    def _quarantine(self, step: int) -> Iterator[str]:
        """Rename non-finite cached latents and embeddings, so that the next start encodes them again."""
        for cache, key in dict.fromkeys(self.batches.places(step)):
            if nonfinite_names([("", cache.load(key).values())]):
                yield f"Set aside, to be encoded again: {cache.quarantine(key)}"


def how_to_go_on(folder: Path) -> str:
    """Suggest a change, and the checkpoint to continue from."""
    then = "continue with --resume latest" if list_checkpoints(folder) else "start again"
    return f"{last_saved(folder)}. Lower optimizer.lr or inspect these samples, then {then}"


def _nonfinite_inputs(batch: Batch, row: int) -> str:
    """Name a sample's non-finite inputs; empty if there are none."""
    inputs: dict[str, Iterable[Tensor]]
    if isinstance(batch, ConceptBatch):
        inputs = {f"embedding of {prompt!r}": text.tensors().values() for prompt, text in batch.prompts.items()}
        if len(batch.drawn.embeds) > len(batch.names):  # with guidance
            inputs["embedding of the unconditional prompt"] = batch.drawn.tensors().values()
    else:
        text = {name: [tensor] for name, tensor in batch.conditioning.tensors().items()}
        inputs = {"cached latents": [batch.z_0], "prompt's embedding": text.pop("embeds"), **text}
        if batch.inpainting is not None:
            inputs["masked picture's cached latents"] = [batch.inpainting]
    found = [what for what, each in inputs.items() if nonfinite_names([("", (tensor[row] for tensor in each))])]
    return f"{' and '.join(found)} {'are' if len(found) > 1 or found[0].endswith('s') else 'is'}" if found else ""


def nonfinite_names(named: Iterable[tuple[str, Iterable[object]]]) -> list[str]:
    """List the names whose tensors contain NaN or infinity, without temporary copies of the tensors; ignores values
    other than floating-point tensors."""
    found = []
    for name, values in named:
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                if not math.isfinite(torch.linalg.vector_norm(value.detach(), math.inf).item()):
                    found.append(name)
                    break
    return found


def require_finite(parameters: Mapping[str, nn.Parameter], folder: Path, step: int) -> None:
    """Refuse to save a checkpoint with NaN or infinity; reads the device once for all parameters."""
    with torch.no_grad():
        peaks = [torch.linalg.vector_norm(p, math.inf).float() for p in parameters.values() if p.numel()]
        devices = {peak.device for peak in peaks}
        if all(torch.stack([p for p in peaks if p.device == device]).isfinite().all().item() for device in devices):
            return
    raise not_saved(nonfinite_names((name, (parameter,)) for name, parameter in parameters.items()), folder, step)


def not_saved(bad: list[str], folder: Path, step: int) -> UserError:
    """Build the error for a checkpoint that would have NaN or infinity in these parameters."""
    return UserError(
        f"step {step}: {len(bad)} trained parameters are non-finite ({join_names(bad, LISTED)}), so no checkpoint was "
        f"saved. {how_to_go_on(folder)}",
        CODE,
    )
