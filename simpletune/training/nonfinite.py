"""NaN and infinity: seen at the step where they arise, attributed, and met as ``train.on_nonfinite`` says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from simpletune.config.schema import TrainConfig
from simpletune.data.cache import Cache, view_key
from simpletune.data.plan import Draw
from simpletune.options import UserError
from simpletune.runs.checkpoint import list_checkpoints
from simpletune.runs.folder import SKIPPED, append_metrics, read_rows
from simpletune.step.batches import Batch, Batches
from simpletune.step.core import StepCore
from simpletune.system.signals import received_signal
from simpletune.tensors import trained_parameters
from simpletune.training.pending_steps import DeviceEvent, PendingStep, copy_to_host_async

CODE = 4  # exit code
IN_A_ROW = 5  # skipped steps that end a run
LISTED = 4


class NonFiniteGuard:
    """Looks at the loss and the gradients' norm of every step. Both are read from the device anyway.

    With ``stop`` they are read as the log needs them, when the next step is launched: the weights are thrown away, and
    the norms of that step's gradients tell where it began. With ``skip`` they are read before the update.

    Args:
        config: of the run.
        folder: of the run; skipped steps are kept in ``skipped.jsonl``.
        core: the step core.
        feed: where its batches come from.
        accelerator: knows the processes.
        start: steps done before.
        warn: says a warning that the summary keeps.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        core: StepCore,
        feed: Batches,
        accelerator: Accelerator,
        start: int,
        warn: Callable[[str], None],
    ):
        self.folder, self.core, self.feed, self.accelerator, self.warn = folder, core, feed, accelerator, warn
        self.gate = self._gate if config.train.on_nonfinite == "skip" else None
        self.skipping = False
        """Whether the last step left the weights as they were."""
        self._figures: Tensor | None = None  # of the last step, where the gate has read them
        before = {row["step"] for row in read_rows(folder / SKIPPED)}
        self._in_a_row = next(n for n in range(len(before) + 1) if start - n not in before)

    def launched(self, step: int, lr: float, began: DeviceEvent, loss: Tensor, norm: Tensor) -> PendingStep:
        """Send a step's figures to the host; nothing waits.

        Args:
            step: how many were done before it.
            lr: its learning rate.
            began: before its data.
            loss: its mean loss in this process, on the device.
            norm: of all its gradients.
        """
        figures = copy_to_host_async(self._of_all(loss, norm)) if self._figures is None else self._figures
        core = self.core
        return PendingStep(
            step, lr, began, DeviceEvent(self.accelerator.device), figures, core.losses, core.normed, core.norms
        )  # fmt: skip

    def _gate(self, loss: Tensor, norm: Tensor) -> bool:
        """Whether a step may update the weights: the host waits for the backward pass."""
        self._figures = self._of_all(loss, norm).cpu()
        self.skipping = not all(map(math.isfinite, self._figures.tolist()))
        return not self.skipping

    def _of_all(self, loss: Tensor, norm: Tensor) -> Tensor:  # fp32 [3], on the device
        """Mean loss, gradients' norm, and the share of the processes that were asked to stop."""
        if self.accelerator.num_processes == 1:
            return torch.stack([loss.float(), norm.float(), torch.zeros_like(loss)])
        asked = torch.full_like(loss, float(received_signal() is not None))
        mean, share = self.accelerator.reduce(torch.stack([loss, asked]), "mean")
        return torch.stack([mean, norm.float(), share])

    def passes(self, launched: PendingStep, loss: float, norm: float) -> bool:
        """Whether a step was one; if it was skipped, that is said and kept.

        Args:
            launched: the step, read.
            loss: its mean loss.
            norm: of its gradients.

        Raises:
            UserError: the run ends here.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            return True
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradients' norm is {norm}"
        about = self._about(launched, what)
        if self.gate is None:
            raise UserError(f"{about}. {last_checkpoint_note(self.folder)}. {_REMEDY}", CODE)
        self._in_a_row += 1
        names = self._samples(launched.step)
        if self.accelerator.is_main_process:
            row = {"step": launched.step + 1, "loss": str(loss), "grad_norm": str(norm), "samples": names}
            append_metrics(self.folder, row, SKIPPED)
        if self._in_a_row >= IN_A_ROW:
            raise UserError(
                f"{about}. It is the {self._in_a_row}th in a row that train.on_nonfinite=skip would leave out: the run "
                f"ends. {last_checkpoint_note(self.folder)}. {_REMEDY}",
                CODE,
            )
        self.warn(f"{about}. Left out: the weights are as before (train.on_nonfinite=skip)")
        return False

    def _about(self, launched: PendingStep, what: str) -> str:
        """What is not finite, in which samples, in which parameters. Its batches are loaded again: they are a function
        of the step, and keeping them would take the device memory."""
        losses = torch.stack(list(launched.losses)).tolist()
        batches = self.feed.step(launched.step)
        bad = [batch for batch, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)]
        mine = [
            (batch.names[row], held)
            for batch in bad or batches
            for row in range(len(batch.names))
            if (held := _nonfinite_inputs(batch, row))
        ]
        rows, suspects = self._gathered(mine), self._gathered([name for batch in bad for name in batch.names])
        names = [name for name, _ in rows] or suspects or self._samples(launched.step)
        parts = [f"step {launched.step + 1}: {what}. Samples: {', '.join(dict.fromkeys(names))}"]
        parts += [f"{name}: its {held} not finite" for name, held in dict(rows).items()]
        parts += self._quarantine(launched.step) if mine else []
        norms = dict(zip(launched.normed, launched.norms.tolist(), strict=True))
        named = trained_parameters(self.core.model).items()
        parameters = [name for name, parameter in named if not math.isfinite(norms.get(parameter, 0.0))]
        if parameters:
            more = f" and {len(parameters) - LISTED} more" if len(parameters) > LISTED else ""
            parts.append(f"Not finite in {', '.join(parameters[:LISTED])}{more}")
        return ". ".join(parts)

    def _samples(self, step: int) -> list[str]:
        """The names of a step's samples, in all processes."""
        return self._gathered([draw.view.picture.name for draw in self._draws(step)])

    def _draws(self, step: int) -> list[Draw]:
        """What a step's micro-batches are made of, in this process."""
        plan, process = self.feed.plan, self.accelerator.process_index
        return [draw for micro in range(plan.accumulation) for draw in plan.micro_batch(step, micro, process)]

    def _gathered(self, found: list[Any]) -> list[Any]:
        """What was found in all processes: each sees only its own samples."""
        return gather_object(found) if self.accelerator.num_processes > 1 else found

    def _quarantine(self, step: int) -> Iterator[str]:
        """Rename cached latents and embeddings that are not finite, so that the next start makes them again."""
        draws = self._draws(step)
        places: list[tuple[Cache, str]] = [(self.feed.latents.cache, view_key(draw.view)) for draw in draws]
        places += [(cache, draw.caption) for draw in draws for cache in self.feed.text.caches.values()]
        for cache, key in dict.fromkeys(places):
            if nonfinite_names([("", cache.load(key).values())]):
                yield f"Set aside, to be made again: {cache.quarantine(key)}"


_REMEDY = "Lower optimizer.lr, or look at these samples; then continue with --resume latest, or start again"


def last_checkpoint_note(folder: Path) -> str:
    """Which checkpoint there is to go back to."""
    found = list_checkpoints(folder)
    return f"The last checkpoint is kept: {found[-1][1]}" if found else "There is no checkpoint yet"


def _nonfinite_inputs(batch: Batch, row: int) -> str:
    """Which inputs of a sample are not finite, in words; empty: none."""
    inputs = {"cached latents": batch.z_0, "prompt's embedding": batch.prompt_embeds, "pooled": batch.pooled}
    found = [what for what, tensor in inputs.items() if nonfinite_names([("", (tensor[row],))])]
    return f"{' and '.join(found)} {'are' if len(found) > 1 or found[0].endswith('s') else 'is'}" if found else ""


def nonfinite_names(named: Iterable[tuple[str, Iterable[Any]]]) -> list[str]:
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
        f"step {step}: {len(bad)} trained parameters are not finite ({', '.join(bad[:LISTED])}): no checkpoint is made "
        f"of them. {last_checkpoint_note(folder)}. {_REMEDY}",
        CODE,
    )
