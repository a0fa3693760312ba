"""klein's own blocks against diffusers': the same bits on the CPU, in fewer operations."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.models.flux2.klein_blocks import JointBlock, ParallelBlock, use_own_blocks

SIZES = {
    "in_channels": 8, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3,
    "joint_attention_dim": 24, "timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4),
    "guidance_embeds": False,
}  # fmt: skip
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def models(dtype: torch.dtype, trained: str) -> tuple[nn.Module, nn.Module]:
    """diffusers' model and ours, with the same weights."""
    torch.manual_seed(0)
    theirs = Flux2Transformer2DModel(**SIZES)
    for name, parameter in theirs.named_parameters():
        nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
        parameter.requires_grad_(trained in name)
    ours = copy.deepcopy(theirs.to(dtype))
    use_own_blocks(ours)
    return theirs, ours


def results(model: nn.Module, dtype: torch.dtype) -> list[Tensor | None]:
    """The output, and gradients of inputs and weights."""
    draw = torch.Generator().manual_seed(1)
    x, text = (torch.randn(2, *shape, generator=draw).to(dtype).requires_grad_() for shape in ((6, 8), (5, 24)))
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(2.0), torch.arange(3.0), torch.zeros(1))
    text_places = torch.nn.functional.pad(torch.arange(5.0)[:, None], (3, 0))
    time = torch.tensor([0.3, 0.7], dtype=dtype)
    out = model(x, text, time, places, text_places, return_dict=False)[0]
    (out.float() * torch.randn(out.shape, generator=draw)).sum().backward()
    return [out, x.grad, text.grad, *(parameter.grad for parameter in model.parameters())]


CASES = [
    pytest.param(
        name, trained, autocast, id=f"{name}-{trained or 'all'}{'-autocast' * autocast}",
        marks=[] if name == "bf16" and not autocast else [pytest.mark.slow],
    )
    for name in TYPES for trained in ("", "attn.to_") for autocast in (False, True)
]  # fmt: skip


@pytest.mark.parametrize(("name", "trained", "autocast"), CASES)
def test_a_model_has_diffusers_bits_on_the_cpu(name: str, trained: str, autocast: bool) -> None:
    theirs, ours = models(TYPES[name], trained)
    assert [type(block) for block in ours.transformer_blocks] == [JointBlock]  # type: ignore[union-attr]
    assert {type(block) for block in ours.single_transformer_blocks} == {ParallelBlock}  # type: ignore[union-attr]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        pairs = zip(results(ours, TYPES[name]), results(theirs, TYPES[name]), strict=True)
        assert all((a is b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names[op._schema.name.partition("::")[2]] += 1
        return op(*args, **(kwargs or {}))


def test_a_block_runs_each_step_once() -> None:
    """A joint block and two parallel ones: queries and keys; norms of two kinds of tokens, twice; two sums."""
    _, model = models(torch.bfloat16, "attn.to_")
    with Counted() as counted:
        results(model, torch.bfloat16)
    forward = {"rms_norm_rotary": 2 + 2 * 2, "swiglu": 2 + 2, "modulate": 4 + 2, "add_gated": 2 + 2}
    wanted = forward | {f"{name}_backward": forward[name] for name in ("rms_norm_rotary", "swiglu", "modulate")}
    assert {name: counted.names[name] for name in wanted} == wanted
    assert not counted.names["native_layer_norm"] - 1  # the last norm's


def test_in_fp16_large_numbers_are_clipped_as_diffusers_does() -> None:
    theirs, ours = models(torch.float16, "")
    for model in (theirs, ours):
        x = torch.full((1, 11, 48), 6e4, dtype=torch.float16)
        positions = model.pos_embed(torch.zeros(11, 4))  # type: ignore[operator]
        modulation = torch.full((1, 144), 3e4, dtype=torch.float16)
        block = model.single_transformer_blocks[0]  # type: ignore[index]
        with torch.no_grad():
            out = block(x, None, modulation, positions)
        assert not out.isinf().any()
