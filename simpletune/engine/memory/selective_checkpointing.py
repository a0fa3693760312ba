"""Keep what a checkpointed block's attention kernels return, so that its recomputation need not run them again.

Attention's output takes as much memory as a block's input, and its products are a third of a block's at 1024 px: no
other part of a block saves as much time per byte. Exact: the recomputation receives the same numbers.

torch's selective checkpointing does the same for any operation, by a dispatch mode that sees every operation of the
block. Here the mode is active only during attention, so that other operations cost the host nothing extra.

Shapes: b samples, h heads, n tokens, d width of a head.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.engine.memory.fake import replace_attribute
from simpletune.engine.memory.offload_inputs import CheckpointInputOffload, OffloadedInput

KERNELS = "aten::_scaled_dot_product_"
"""How the names of attention's fused operations begin: flash, efficient, cuDNN, and the CPU's flash."""
Kept = deque["KernelOutput | None"]
"""For each call of attention not yet recomputed, what its kernel returned; None for a call without a kernel."""


def attentions(block: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a block, of diffusers' common class or of a model's own, such as FLUX.2's."""
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention

    return [module for module in block.modules() if isinstance(module, Attention | AttentionModuleMixin)]


class SavedAttention:
    """Keeps what the attention kernels of one block return in a forward pass for the pass's recomputation.

    Args:
        block: the block, whose attention modules are changed in place.
        inputs: moves the inputs of checkpointed blocks, and these outputs, to host memory; None: they stay on the
            device.
    """

    def __init__(self, block: nn.Module, inputs: CheckpointInputOffload | None = None):
        self._inputs = inputs
        self._mode: _Keep | _Return | None = None
        for module in attentions(block):
            module.forward = self._watch(module.forward)

    def contexts(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Return the contexts of a forward pass and of its recomputation."""
        kept: Kept = deque()
        keep, give_back = _Keep(kept, self._inputs), _Return(kept, self._inputs)
        return replace_attribute(self, "_mode", keep), replace_attribute(self, "_mode", give_back)

    def _watch(self, plain: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            if self._mode is None:
                return plain(*args, **kwargs)
            with _AroundKernels(self._mode):
                return plain(*args, **kwargs)

        return forward


class _AroundKernels(TorchFunctionMode):
    """A context that activates a dispatch mode during each call of attention, and at no other time."""

    def __init__(self, mode: _Keep | _Return):
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        is_attention = function is F.scaled_dot_product_attention
        if not is_attention:
            return function(*args, **(kwargs or {}))
        with self._mode.around_call(), self._mode:
            return function(*args, **(kwargs or {}))


@dataclass
class KernelOutput:
    """What a kernel returned."""

    op: OpOverload
    values: list[object]  # tensors, possibly moved to host memory, and numbers; the first is the output [b, h, n, d]
    orders: list[list[int] | None]  # for each tensor that was moved, the order of its dimensions in memory
    version: int  # the output's version counter when it was taken

    @classmethod
    def of(cls, op: OpOverload, returned: Sequence[object]) -> KernelOutput:
        """Take what a kernel returned, detached from the graph."""
        values = list(map(_detach, returned))
        assert isinstance(values[0], Tensor)
        return cls(op, values, [None] * len(values), values[0]._version)

    def offload(self, inputs: CheckpointInputOffload) -> None:
        """Move the tensors to host memory."""
        for number, value in enumerate(self.values):
            if isinstance(value, Tensor):
                order = sorted(range(value.dim()), key=lambda side, of=value: -of.stride(side))  # type: ignore[misc]
                moved = inputs.pack(value.permute(order))
                if isinstance(moved, OffloadedInput):
                    self.values[number], self.orders[number] = moved, order

    def restore(self, inputs: CheckpointInputOffload) -> None:
        """Bring the tensors back to the device, with the layout that they had."""
        for number, (value, order) in enumerate(zip(self.values, self.orders, strict=True)):
            if order is not None:
                assert isinstance(value, OffloadedInput)
                inverse = sorted(range(len(order)), key=order.__getitem__)
                self.values[number] = _detach(inputs.unpack(value).permute(inverse))


class _KernelMode(TorchDispatchMode):
    """A mode that sees what attention runs in a pass of a block; ``kept`` is what its kernels returned in the forward
    pass."""

    def __init__(self, kept: Kept, inputs: CheckpointInputOffload | None):
        super().__init__()
        self._kept, self._inputs = kept, inputs
        self._output: KernelOutput | None = None


class _Keep(_KernelMode):
    """The mode of the forward pass, which keeps what attention's kernels return."""

    @contextmanager
    def around_call(self) -> Iterator[None]:
        self._output = None
        yield
        if self._output is not None and self._inputs is not None:
            self._output.offload(self._inputs)
        self._kept.append(self._output)
        self._output = None

    def __torch_dispatch__(
        self,
        op: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        output = op(*args, **(kwargs or {}))
        if op.name().startswith(KERNELS):
            self._output = KernelOutput.of(op, output)
        return output


class _Return(_KernelMode):
    """The mode of the recomputation, which returns what the kernels returned in the forward pass, in the same order."""

    @contextmanager
    def around_call(self) -> Iterator[None]:
        if not self._kept:
            raise RuntimeError("cannot run a second backward pass: kept outputs of attention are freed after the first")
        self._output = self._kept.popleft()
        first = None if self._output is None else self._output.values[0]
        if self._output is not None and isinstance(first, Tensor) and first._version != self._output.version:
            raise RuntimeError("a kept output of attention was overwritten before its recomputation")
        if self._output is not None and self._inputs is not None:
            self._output.restore(self._inputs)
        yield
        self._output = None

    def __torch_dispatch__(
        self,
        op: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        before = self._output
        if before is None or not op.name().startswith(KERNELS):
            return op(*args, **(kwargs or {}))
        if before.op is not op:
            raise RuntimeError(f"attention ran {before.op.name()} in the forward pass and {op.name()} again")
        return tuple(before.values)


def _detach(value: object) -> object:
    """Return a detached tensor that shares memory and version counter, as torch's selective checkpointing makes it."""
    if not isinstance(value, Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()
