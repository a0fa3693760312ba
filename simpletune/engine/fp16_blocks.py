"""Compute a model's blocks in fp16, except those whose activations overflow, in fp32.

fp16 ends at 65504. A pass of a block sets the block's flag on the device if its inputs are finite and its outputs are
not. The host reads the flags late and decides which blocks compute in fp32 from then on; such a block keeps its weights
as they are, widens them for each pass, and passes its outputs on in fp32. A block in fp16 narrows its inputs, so it
flags itself if they exceed fp16. A layer between blocks computes as the block before it does, and flags that one.

Shapes: b samples, n tokens, d width; c channels, h and w of a UNet's features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from simpletune.engine.denoiser import Denoiser, layers_between_units, model_units, modules_around_units
from simpletune.system.console import say
from simpletune.system.options import plural

T = TypeVar("T")
TOKENS = 3  # dimensions of [b, n, d]; latents have more, [b, c, h, w]


class BlockPass:
    """The forward pass of one block, or of a layer between blocks (index None), which it replaces, in fp16 or fp32."""

    def __init__(self, blocks: Fp16Blocks, index: int | None, block: nn.Module):
        self.plain = self.fast = block.forward  # fast: may be compiled

        @functools.wraps(self.plain)
        def forward(*args: object, **kwargs: object) -> object:
            if index is not None:
                blocks.latest = index
            own = blocks.latest
            if own in blocks.wide:
                return run_in_fp32(block, self.plain, args, kwargs)
            narrow, named = tuple(map(_narrow, args)), {name: _narrow(value) for name, value in kwargs.items()}
            result = self.fast(*narrow, **named)
            blocks.watch(own, (*args, *kwargs.values()), result)
            return result

        forward.block_pass = self  # type: ignore[attr-defined]
        block.forward = forward


class Fp16Blocks:
    """A watch on the blocks of a model that computes in fp16; those that overflow switch to fp32.

    Changes it in place, before anything else wraps its blocks.
    """

    def __init__(self, denoiser: Denoiser):
        self.wide: frozenset[int] = frozenset()
        """The blocks that compute in fp32."""
        self.wide_in_generation: frozenset[int] = frozenset()
        """Blocks that overflowed outside of training; they compute in fp32 only outside of training."""
        self.latest = 0
        """The block that ran last."""
        blocks = model_units(denoiser)
        self.count = len(blocks)
        self._flags: Tensor | None = None
        for index, block in enumerate(blocks):
            BlockPass(self, index, block)
        for layer in layers_between_units(denoiser):
            BlockPass(self, None, layer)
        for module in modules_around_units(denoiser):
            self._watch_sums(module)
        norm_out = denoiser.get_submodule(denoiser.after_units)
        plain = norm_out.forward

        # The output norm accepts fp32 from a last block in fp32; normalised activations fit into fp16 again.
        def forward(*args: object, **kwargs: object) -> Tensor:  # [b, n, d] and perhaps [b, m], or [b, c, h, w]
            if next(_floating_tensors((*args, *kwargs.values()))).dtype != torch.float32:
                return plain(*args, **kwargs)
            result: Tensor = run_in_fp32(norm_out, plain, args, kwargs)
            return result.half()

        norm_out.forward = forward

    def _watch_sums(self, module: nn.Module) -> None:
        """Flag the last block inside of a module if what the module adds to it overflows: in fp32, so is the sum."""
        plain = module.forward

        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            result: Any = plain(*args, **kwargs)
            own = self.latest
            if own not in self.wide:
                self.watch(own, (*args, *kwargs.values()), result, unless_flagged=True)
            return result

        module.forward = forward

    @torch.no_grad()
    def watch(
        self, index: int, before: Sequence[object], after: Sequence[object], unless_flagged: bool = False
    ) -> None:
        """Set a block's flag if its inputs are finite and its outputs are not; with ``unless_flagged``, if no flag has
        been set, which would explain it. Reads nothing from the device."""
        inputs, outputs = list(_floating_tensors(before)), list(_floating_tensors(after))
        with torch.autocast(outputs[0].device.type, enabled=False):  # which would convert whole tensors
            own = _is_finite(inputs) & ~_is_finite(outputs)
        flags = self.flags(outputs[0].device)
        flags[index].logical_or_(own & ~flags.any() if unless_flagged else own)

    def flags(self, device: torch.device) -> Tensor:  # bool [blocks]
        """Return which blocks have overflowed since the last ``clear``, on the device."""
        if self._flags is None or self._flags.device != device:
            self._flags = torch.zeros(self.count, dtype=torch.bool, device=device)
        return self._flags

    def clear(self) -> None:
        """Reset the flags, on the device."""
        if self._flags is not None:
            self._flags.zero_()


def flagged_blocks(flags: Sequence[float]) -> list[int]:
    return [index for index, flag in enumerate(flags) if flag]


def describe_overflow(blocks: Sequence[int] | frozenset[int]) -> str:
    listed = ", ".join(str(index) for index in sorted(blocks))
    return f"{plural(len(blocks), 'block overflows', 'blocks overflow')} fp16 ({listed})"


def watch_fp16(denoiser: Denoiser, dtype: torch.dtype) -> Denoiser:
    """Watch a loaded model if its products, of this type, are in fp16."""
    if dtype == torch.float16:
        denoiser.fp16_blocks = Fp16Blocks(denoiser)  # type: ignore[assignment]
    return denoiser


def fp16_blocks_of(denoiser: nn.Module) -> Fp16Blocks | None:
    """Return the watched blocks of a model; None if it computes in another type."""
    found = denoiser.__dict__.get("fp16_blocks")
    return found if isinstance(found, Fp16Blocks) else None


def block_pass_of(block: nn.Module) -> BlockPass | None:
    """Return the pass of a watched block; None for another block."""
    found = getattr(block.forward, "block_pass", None)
    return found if isinstance(found, BlockPass) else None


def finite_passes(denoiser: nn.Module, compute: Callable[[], T]) -> T:
    """Run passes outside of training, and repeat them with the blocks that overflowed in fp32. Reads from the device.
    ``compute`` must not depend on how often it is called."""
    blocks = fp16_blocks_of(denoiser)
    if blocks is None:
        return compute()
    training = blocks.wide
    try:
        while True:
            blocks.wide = training | blocks.wide_in_generation
            blocks.clear()
            result = compute()
            flags = blocks._flags
            found = () if flags is None or isinstance(flags, FakeTensor) else flagged_blocks(flags.tolist())
            new = frozenset(found) - blocks.wide
            if not new:
                return result
            blocks.wide_in_generation |= new
            say(f"fp16    {describe_overflow(new)} outside of training: repeated with fp32 there")
    finally:
        blocks.wide = training
        blocks.clear()


def run_in_fp32(
    module: nn.Module, forward: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Any:
    """Run a module's forward pass in fp32 on widened inputs, with its frozen 16-bit weights widened for this pass."""
    wide, named = tuple(map(_widen, args)), {name: _widen(value) for name, value in kwargs.items()}
    device = next(_floating_tensors((*wide, *named.values()))).device
    with torch.autocast(device.type, enabled=False), _wide_weights(module):
        return forward(*wide, **named)


@contextmanager
def _wide_weights(module: nn.Module) -> Iterator[None]:
    """Replace frozen 16-bit parameters by fp32 copies in this context. Quantised weights stay, because their layers
    unpack them to the inputs' type; the adapter's stay, because its products are in the activations' type."""
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.requires_grad and parameter.dtype == torch.float16:
                replaced.append((part._parameters, name, parameter))
    try:
        for own, name, parameter in replaced:
            own[name] = _wide_parameter(parameter)
        yield
    finally:
        for own, name, parameter in replaced:
            own[name] = parameter


def _wide_parameter(parameter: nn.Parameter) -> Tensor:
    """Return a frozen parameter in fp32. Of quanto's tensors, only the scales, which determine the product's type,
    change."""
    if type(parameter.data) is Tensor or isinstance(parameter.data, FakeTensor):
        return parameter.detach().float()
    from optimum.quanto import WeightQBytesTensor

    q: Any = parameter.detach()
    wide: Tensor = WeightQBytesTensor(q.qtype, q.axis, q.size(), q.stride(), q._data, q._scale.float(), None)
    return wide


def _is_finite(tensors: Sequence[Tensor]) -> Tensor:  # bool []
    """Return whether all tensors are finite, on their device; a maximum needs no temporary copy."""
    return torch.stack([torch.linalg.vector_norm(t, math.inf).float() for t in tensors]).isfinite().all()


def _floating_tensors(values: Sequence[object]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor) and value.is_floating_point())


def _narrow(value: object) -> object:
    if isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() >= TOKENS:
        return value.half()
    return value


def _widen(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
