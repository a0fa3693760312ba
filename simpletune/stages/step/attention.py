"""Select PyTorch's kernel for the denoiser's attention: the requested one, or PyTorch's own choice.

The request applies only to the denoiser. The autoencoder's attention has one wide head (512 in SD3's), which flash
and cuDNN cannot compute, so PyTorch always chooses there and in the text encoders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from simpletune.config.batches import mixes_lengths
from simpletune.config.schema import TrainConfig
from simpletune.engine.speed import Kernel
from simpletune.models.shared.buckets import Size
from simpletune.system.console import detail
from simpletune.system.options import UserError

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@contextmanager
def use_attention(kernel: Kernel) -> Iterator[None]:
    """Restrict PyTorch's attention to this kernel within the context; auto leaves the choice to PyTorch, which
    ``choose_device`` keeps from choosing cuDNN."""
    if kernel == "auto":
        yield
        return
    with sdpa_kernel(BACKENDS[kernel]):
        yield


class AttentionCall(NamedTuple):
    """One shape of attention in a run, which has no dropout: queries [batch, heads, tokens, width].

    Args:
        batch: the number of samples.
        heads: the number of heads.
        tokens: the number of tokens that attend.
        keys: the number of tokens that are attended to.
        width: the width of a head.
        trained: whether it has a backward pass.
        what: a description of what needs it.
        masked: whether it has a mask.
    """

    batch: int
    heads: int
    tokens: int
    keys: int
    width: int
    trained: bool
    what: str
    masked: bool = False


def attention_calls(config: TrainConfig, sizes: Iterable[Size]) -> list[AttentionCall]:
    """List the shapes of attention in a run's training on pictures of these sizes, validation loss and validation
    pictures, largest first."""
    validation = config.validation
    rows = 2 if validation.guidance > 1 else 1  # both halves of guidance are one batch
    passes = [(size, config.train.micro_batch, True, "training") for size in sizes]
    if validation.loss_samples:
        passes += [(size, 1, False, "the validation loss") for size, *_ in passes]
    if validation.prompts != []:
        passes.append((config.image_size(), rows, False, "validation pictures"))
    found: dict[AttentionCall, None] = {}
    for size, batch, trained, what in passes:
        differ = mixes_lengths(config) if trained else batch > 1
        masked = config.model.text.masked and differ
        for shape in config.model.architecture.attentions(size):
            found[AttentionCall(batch, *shape, trained, f"{what} of {size[0]}x{size[1]} px", masked)] = None
    return sorted(found, key=lambda shape: (shape.trained, shape.tokens), reverse=True)


def choose_kernel(kernel: Kernel, shape: AttentionCall, device: torch.device, dtype: torch.dtype) -> str:
    """Return the kernel for one shape of the model's attention: the requested one, tried by running it, with its
    backward pass if it has one; for auto the one that PyTorch chooses.

    Raises:
        UserError: the requested kernel cannot run here.
    """
    if kernel == "math":
        return kernel  # always available; a trial would take memory quadratic in the tokens
    size = (shape.batch, shape.heads, shape.tokens, shape.width)
    q = torch.zeros(size, device=device, dtype=dtype, requires_grad=shape.trained)
    k = torch.zeros((shape.batch, shape.heads, shape.keys, shape.width), device=device, dtype=dtype)
    mask = torch.ones(shape.batch, 1, 1, shape.keys, device=device, dtype=torch.bool) if shape.masked else None
    if kernel != "auto":
        try:
            with use_attention(kernel):
                y = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask)
                if shape.trained:
                    y.backward(torch.zeros_like(y))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"speed.attention: {kernel} cannot compute {shape.heads} heads of {shape.tokens} x {shape.width} in a "
                f"batch of {shape.batch}, for {shape.what}, in {dtype} on {device.type} ({reason}). Use auto or math"
            ) from None
        return kernel
    by_number = {int(backend.value): name for name, backend in BACKENDS.items()}
    return by_number.get(int(torch._fused_sdp_choice(q, k, k, mask)), "math")


def settle_attention(config: TrainConfig, sizes: Iterable[Size], device: torch.device) -> str:
    """Choose and log the attention kernel of a run on pictures of these sizes; for auto, that of the largest shape.
    Raises UserError if the requested one cannot run here."""
    asked, shapes = config.speed.attention, attention_calls(config, sizes)
    tried = shapes[:1] if asked == "auto" else shapes  # a requested one with all, so that none fails during the run
    found = [choose_kernel(asked, shape, device, config.precision.product_dtype()) for shape in tried][0]
    detail(f"attend  with the {found} kernel (speed.attention {asked})")
    return found
