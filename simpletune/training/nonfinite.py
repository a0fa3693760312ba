"""NaN and infinity: seen at the step where they arise, attributed, and met as ``train.on_nonfinite`` says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from simpletune.config.schema import TrainConfig
from simpletune.data.cache import Cache, view_key
from simpletune.data.plan import Draw
from simpletune.options import UserError, shortened
from simpletune.runs.checkpoint import list_checkpoints
from simpletune.runs.folder import SKIPPED, append_metrics, read_rows
from simpletune.step.batches import Batch, Batches
from simpletune.step.core import StepCore
from simpletune.tensors import trained_parameters
from simpletune.training.pending_steps import PendingStep, global_figures

CODE = 4  # exit code
IN_A_ROW = 5  # skipped steps that end a run
LISTED = 4
T = TypeVar("T")


class NonFiniteGuard:
    """Judges the loss and the gradients' norm of every step; both are read from the device anyway.

    With ``train.on_nonfinite`` ``stop`` they are judged when the log needs them, after the next step is done: the
    run ends, its weights are thrown away, and the norms of that step's gradients tell where it began. With ``skip``
    they are judged before the update.

    Args:
        config: of the run.
        folder: of the run; skipped steps are kept in ``skipped.jsonl``.
        core: the step core.
        batches: where its batches come from.
        start: steps done before.
        warn: prints a warning that the summary keeps.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        core: StepCore,
        batches: Batches,
        start: int,
        warn: Callable[[str], None],
    ):
        self.folder, self.core, self.batches, self.warn = folder, core, batches, warn
        self.accelerator = core.accelerator
        self.skips = config.train.on_nonfinite == "skip"
        self.skipping = False
        """Whether the last step left the weights as they were."""
        before = {row["step"] for row in read_rows(folder / SKIPPED)}
        self._in_a_row = next(n for n in range(len(before) + 1) if start - n not in before)

    def allows_update(self, loss: Tensor, norm: Tensor) -> bool:
        """Whether a step may update the weights. With ``skip`` the host waits for the backward pass."""
        if self.skips:
            figures = global_figures(loss, norm, self.accelerator, stop=False)
            self.skipping = not all(map(math.isfinite, figures.tolist()))
        return not self.skipping

    def check(self, done: PendingStep, loss: float, norm: float) -> bool:
        """Whether a step's figures are finite; a skipped one is reported and kept.

        Args:
            done: the step, read.
            loss: its mean loss.
            norm: of its gradients.

        Raises:
            UserError: the run ends here.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            return True
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradients' norm is {norm}"
        about = self._about(done, what)
        if not self.skips:
            raise UserError(f"{about}. {how_to_go_on(self.folder)}", CODE)
        self._in_a_row += 1
        names = self._samples(done.step)
        if self.accelerator.is_main_process:
            row = {"step": done.step + 1, "loss": str(loss), "grad_norm": str(norm), "samples": names}
            append_metrics(self.folder, row, SKIPPED)
        if self._in_a_row >= IN_A_ROW:
            raise UserError(
                f"{about}. It is the {self._in_a_row}th in a row that train.on_nonfinite=skip would leave out: the run "
                f"ends. {how_to_go_on(self.folder)}",
                CODE,
            )
        self.warn(f"{about}. Left out: the weights are as before (train.on_nonfinite=skip)")
        return False

    def _about(self, done: PendingStep, what: str) -> str:
        """What is not finite, in which samples, in which parameters. Its batches are loaded again: they are a function
        of the step, and keeping them would take the device memory."""
        losses = torch.stack(list(done.losses)).tolist()
        batches = self.batches.step(done.step)
        bad = [batch for batch, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)]
        mine = [
            (batch.names[row], held)
            for batch in bad or batches
            for row in range(len(batch.names))
            if (held := _nonfinite_inputs(batch, row))
        ]
        rows, suspects = self._gathered(mine), self._gathered([name for batch in bad for name in batch.names])
        names = [name for name, _ in rows] or suspects or self._samples(done.step)
        parts = [f"step {done.step + 1}: {what}. Samples: {', '.join(dict.fromkeys(names))}"]
        parts += [f"{name}: its {held} not finite" for name, held in dict(rows).items()]
        parts += self._quarantine(done.step) if mine else []
        norms = dict(zip(done.normed, done.norms.tolist(), strict=True))
        named = trained_parameters(self.core.model).items()
        parameters = [name for name, parameter in named if not math.isfinite(norms.get(parameter, 0.0))]
        if parameters:
            parts.append(f"Not finite in {shortened(parameters, LISTED)}")
        return ". ".join(parts)

    def _samples(self, step: int) -> list[str]:
        """The names of a step's samples, in all processes."""
        return self._gathered([draw.view.picture.name for draw in self._draws(step) if draw.weight])

    def _draws(self, step: int) -> list[Draw]:
        """What a step's micro-batches are made of, in this process."""
        plan, process = self.batches.plan, self.accelerator.process_index
        return [draw for micro in range(plan.micros(step)) for draw in plan.micro_batch(step, micro, process)]

    def _gathered(self, found: list[T]) -> list[T]:
        """What was found in all processes: each sees only its own samples."""
        return gather_object(found) if self.accelerator.num_processes > 1 else found

    def _quarantine(self, step: int) -> Iterator[str]:
        """Rename cached latents and embeddings that are not finite, so that the next start makes them again."""
        draws = self._draws(step)
        places: list[tuple[Cache, str]] = [(self.batches.latents.cache, view_key(draw.view)) for draw in draws]
        places += [(cache, draw.caption) for draw in draws for cache in self.batches.text.caches.values()]
        for cache, key in dict.fromkeys(places):
            if nonfinite_names([("", cache.load(key).values())]):
                yield f"Set aside, to be made again: {cache.quarantine(key)}"


def how_to_go_on(folder: Path) -> str:
    """What to change, and which checkpoint there is to go back to."""
    found, change = list_checkpoints(folder), "Lower optimizer.lr, or look at these samples"
    if found:
        return f"The last checkpoint is kept: {found[-1][1]}. {change}; then continue with --resume latest"
    return f"There is no checkpoint yet. {change}; then start again"


def _nonfinite_inputs(batch: Batch, row: int) -> str:
    """Which inputs of a sample are not finite, in words; empty: none."""
    inputs = {"cached latents": batch.z_0, "prompt's embedding": batch.prompt_embeds, "pooled": batch.pooled}
    found = [what for what, tensor in inputs.items() if nonfinite_names([("", (tensor[row],))])]
    return f"{' and '.join(found)} {'are' if len(found) > 1 or found[0].endswith('s') else 'is'}" if found else ""


def nonfinite_names(named: Iterable[tuple[str, Iterable[object]]]) -> list[str]:
    """The names of which a tensor holds NaN or infinity; without temporary copies of the tensors.

    Args:
        named: (name, what belongs to it); what is no floating-point tensor is passed over.
    """
    found = []
    for name, values in named:
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                if not math.isfinite(torch.linalg.vector_norm(value.detach(), math.inf).item()):
                    found.append(name)
                    break
    return found


def require_finite(parameters: Mapping[str, nn.Parameter], folder: Path, step: int) -> None:
    """Refuse to save what has diverged: no checkpoint ever holds NaN. One read of the device for all.

    Raises:
        UserError: with the parameters.
    """
    with torch.no_grad():
        peaks = [torch.linalg.vector_norm(p, math.inf).float() for p in parameters.values() if p.numel()]
        devices = {peak.device for peak in peaks}
        if all(torch.stack([p for p in peaks if p.device == device]).isfinite().all().item() for device in devices):
            return
    bad = nonfinite_names((name, (parameter,)) for name, parameter in parameters.items())
    raise UserError(
        f"step {step}: {len(bad)} trained parameters are not finite ({shortened(bad, LISTED)}): no checkpoint is made "
        f"of them. {how_to_go_on(folder)}",
        CODE,
    )
