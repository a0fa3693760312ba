"""A step that sums the gradients of its micro-batches by a fixed tree, so that the sum does not depend on who computed
them (``train.reduce`` ``exact``).

``step/assignment.py`` describes the tree. Sums are in fp32. A process keeps one partial sum per level of its part
of the tree (log2 of its micro-batches), besides the gradients that it is computing. The processes then exchange these
sums, and each adds up a slice of all numbers by the top of the tree: as much traffic as a ring all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn

from simpletune.config.schema import TrainConfig
from simpletune.engine.fsdp.fsdp_model import local_parameters
from simpletune.engine.memory import accounting
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.variant import PlainStep

BUCKET = 2**22  # numbers exchanged together; the buffers take three times as many
Sums = list[Tensor | None]
"""The sum of the losses [1], then the sums of each parameter's gradients, in fp32; None: no gradient."""


class ExactSums(PlainStep):
    """Sums by ``TreeSum``. Its processes begin with the first one's weights."""

    def __init__(
        self, config: TrainConfig, model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator
    ):
        super().__init__(config, model, optimizer, accelerator)
        processes = accelerator.num_processes
        self.tree = TreeSum(local_parameters(model), processes, passes=2 if config.prior.second_pass else 1)
        for parameter in self.parameters if processes > 1 else ():
            distributed.broadcast(parameter.data, 0)

    def accumulate(self, batches: Sequence[Batch], compute: Callable[[Batch], Tensor]) -> Tensor:
        return self.tree.accumulate(batches, compute)


class TreeSum:
    """Sums losses and gradients over the micro-batches of a step.

    Args:
        parameters: the trained parameters by their names, equal in all processes.
        processes: the number of processes, a power of two.
        passes: the number of passes per micro-batch.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], processes: int = 1, passes: int = 1):
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.processes, self.passes = processes, passes
        self._exist: list[bool] | None = None
        """Which parameters had a gradient in the last step, the same in all processes."""

    def accumulate(self, batches: Sequence[Batch], compute: Callable[[Batch], Tensor]) -> Tensor:
        """Compute a step's micro-batches and leave the sum of all processes' gradients in ``grad``.

        Args:
            batches: this process's batches, in the order of ``assignment.leaves``.
            compute: runs one forward and backward pass and returns its part of the loss.

        Returns:
            The sum of the losses, a scalar.
        """
        micros = [batches[start : start + self.passes] for start in range(0, len(batches), self.passes)]
        total = self._subtree(iter(micros), 0, 1, len(micros), compute)
        if self.processes > 1:
            self._require_alike([each is not None for each in total[1:]])
            exchange(total, self.processes)
        loss, *gradients = total
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        assert loss is not None
        return loss[0]

    def _require_alike(self, exist: list[bool]) -> None:
        """Check that the same parameters have a gradient in all processes. Raises RuntimeError, which names the
        others."""
        # Otherwise the exchange aborts (gloo) or waits forever (NCCL). Asked only when the own answer is new: in the
        # first step, and where all freeze the same parameters at once (text.embeddings.stop_at).
        if exist == self._exist:
            return
        found: list[list[bool]] = [[] for _ in range(self.processes)]
        distributed.all_gather_object(found, exist)
        uneven = [
            f"{name} has a gradient in {sum(have)} of {self.processes} processes"
            for name, have in zip(self.names, zip(*found, strict=True), strict=True)
            if len(set(have)) > 1
        ]
        if uneven:
            raise RuntimeError(f"train.reduce exact: {', '.join(uneven)}")
        self._exist = exist

    def _subtree(
        self, micros: Iterator[Sequence[Batch]], first: int, stride: int, count: int, compute: Callable[[Batch], Tensor]
    ) -> Sums:
        """Compute S(first, stride) of this process's micro-batches, in their order."""
        if first + stride >= count:
            return self._leaf(next(micros), compute)
        left = self._subtree(micros, first, 2 * stride, count, compute)
        right = self._subtree(micros, first + stride, 2 * stride, count, compute)
        return [_add(a, b) for a, b in zip(left, right, strict=True)]

    def _leaf(self, micro: Sequence[Batch], compute: Callable[[Batch], Tensor]) -> Sums:
        """Compute the loss and the gradients of one micro-batch. One made of fillers only shows which gradients
        exist."""
        loss = torch.stack([compute(batch) for batch in micro]).sum()[None].float()
        sums: Sums = [loss]
        for parameter in self.parameters:
            gradient, parameter.grad = parameter.grad, None
            sums.append(None if gradient is None else gradient.float())
        accounting.register([each for each in sums if each is not None], "gradients")
        if all(batch.parts == math.inf for batch in micro):
            return [None if each is None else each.fill_(-0.0) for each in sums]  # a + -0.0 is a, also for a = 0.0
        return sums


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a.add_(b)


def exchange(sums: Sums, processes: int) -> None:
    """Replace each process's sums by the sums over all processes, added up by the top of the tree."""
    waiting: list[Tensor] = []
    for tensor in [each for each in sums if each is not None]:
        if waiting and sum(each.numel() for each in waiting) + tensor.numel() > BUCKET:
            _exchange(waiting, processes)
            waiting = []
        waiting.append(tensor)
    _exchange(waiting, processes)


def _exchange(tensors: Sequence[Tensor], processes: int) -> None:
    """Exchange tensors in portions of at most ``BUCKET`` numbers: each process adds up a slice; all gather the
    slices."""
    whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for portion in whole.split(BUCKET):
        sent = nn.functional.pad(portion, (0, -len(portion) % processes))
        rows = torch.empty_like(sent)
        distributed.all_to_all_single(rows, sent)
        rows = top_of_tree(rows.view(processes, -1))
        distributed.all_gather_into_tensor(sent, rows)
        portion.copy_(sent[: len(portion)])
    for tensor, summed in zip(tensors, whole.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view(tensor.shape))


def top_of_tree(rows: Tensor) -> Tensor:  # [P, n] -> [n]
    """Compute S(0, 1) from the processes' sums S(q, P); changes ``rows``."""
    while len(rows) > 1:
        half = len(rows) // 2
        rows = rows[:half].add_(rows[half:])
    return rows[0]
