"""LoRA updates added in place: the same sums and gradients as PEFT's own, nearer to the exact ones in bf16."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.adapters.methods.layers import wrap
from simpletune.adapters.methods.lokr_layer import LokrLayer
from simpletune.adapters.methods.lora_layers import (
    _as_it_is,
    _Updated,
    add_update,
    cast_together,
    compute_in_output_type,
)
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.nf4_linear import Nf4Linear


def factors() -> tuple[Tensor, ...]:
    """x [2, 5, 6], W [8, 6], A [3, 6], B [8, 3]."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, 5, 6), (8, 6), (3, 6), (8, 3)))


def plainly(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return y + F.linear(F.linear(x, a), b) * scale


@pytest.mark.parametrize("scale", [0.7, 1.0])
@pytest.mark.parametrize("frozen", [(), ("x",), ("a", "b")], ids=["all", "input frozen", "update frozen"])
def test_gradients_are_those_of_the_sum(frozen: tuple[str, ...], scale: float) -> None:
    x, w, a, b = factors()
    for name, tensor in {"x": x, "a": a, "b": b}.items():
        tensor.requires_grad_(name not in frozen)
    torch.autograd.gradcheck(lambda *t: add_update(F.linear(t[0], w), *t, scale), (x, a, b))
    torch.testing.assert_close(add_update(F.linear(x, w), x, a, b, scale), plainly(F.linear(x, w), x, a, b, scale))


def test_the_output_s_memory_is_used_again() -> None:
    x, w, a, b = factors()
    y = F.linear(x, w)
    place, expected = y.data_ptr(), plainly(y, x, a, b, 0.5)
    found = add_update(y, x, a.requires_grad_(), b, 0.5)
    assert found.data_ptr() == place
    torch.testing.assert_close(found, expected)
    strided = torch.empty(2, 8, 5, dtype=torch.float64).transpose(1, 2).copy_(F.linear(x, w))
    torch.testing.assert_close(add_update(strided, x, a, b, 0.5), expected)


def test_in_bf16_nearer_to_the_exact_sum_than_rounding_in_between() -> None:
    generator = torch.Generator().manual_seed(1)
    x, w, a, b = (torch.randn(s, generator=generator) for s in ((64, 48), (32, 48), (4, 48), (32, 4)))
    exact = plainly(F.linear(x, w), x, a, b, 0.3)
    half = [tensor.bfloat16() for tensor in (x, w, a, b)]
    y = F.linear(half[0], half[1])
    rounded, added = plainly(y, half[0], *half[2:], 0.3), add_update(y.clone(), half[0], a, b, 0.3)
    assert added.dtype == torch.bfloat16
    assert (added.float() - exact).norm() < (rounded.float() - exact).norm()


class _Written(TorchDispatchMode):
    """Counts the tensors of a layer's output size that are written, views aside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == 512 * 64 and not func.is_view:
            self.count += 1
        return result


def written(model: nn.Module, x: Tensor) -> int:
    with _Written() as mode:
        model(x).sum().backward()
    return mode.count


def test_every_layer_of_a_model_does_it_with_fewer_passes() -> None:
    config = LoraConfig(r=4, lora_alpha=2, target_modules=["0", "2"], init_lora_weights=False)

    def model() -> Any:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)).bfloat16().requires_grad_(False)
        return inject_adapter_in_model(config, layers)

    plain, ours = model(), model()
    compute_in_output_type(ours)
    x = torch.randn(512, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(ours(x), plain(x), rtol=0.02, atol=0.02)
    # of each layer two forward and one backward, and one of those of the second that computes a gradient of its input
    assert written(ours, x) + 2 * 3 + 1 == written(plain, x)
    ours.zero_grad(), plain.zero_grad()
    ours(x).square().mean().backward()
    plain(x).square().mean().backward()
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad.to(mine.dtype), rtol=0.05, atol=1e-4, msg=name)


@pytest.mark.parametrize("scale", [0.7, 1.0])
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2)], ids=["all", "input frozen", "update frozen"])
def test_gradients_of_an_update_and_its_layer_in_one_node(frozen: tuple[int, ...], scale: float) -> None:
    x, w, a, b = factors()
    for number, tensor in enumerate((x, a, b)):
        tensor.requires_grad_(number not in frozen)
    bias = torch.randn(8, dtype=torch.float64)
    apply = lambda x, a, b: _Updated.apply(x, a, b, scale, _as_it_is, (), bias, w)  # noqa: E731
    torch.autograd.gradcheck(apply, (x, a, b))
    torch.testing.assert_close(apply(x, a, b), plainly(F.linear(x, w, bias), x, a, b, scale))


@pytest.mark.parametrize("kind", ["bf16", "int8", "nf4", "nf4 with scales in 8 bits"])
def test_a_layer_and_its_update_are_one_node_with_the_same_bits(kind: str) -> None:
    """A hook on the base layer asks for two nodes."""
    base: Any = nn.Linear(64, 128).bfloat16().requires_grad_(False)
    if kind == "int8":
        base = Int8Linear.from_linear(base, torch.bfloat16)
    elif kind != "bf16":
        base = Nf4Linear.from_linear(base, torch.bfloat16, double=kind != "nf4")
    config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    model: Any = inject_adapter_in_model(config, nn.Sequential(base))
    compute_in_output_type(model)
    start, found = torch.randn(8, 64).bfloat16(), []
    saved: list[Tensor] = []
    for hooks in (False, True):
        if hooks:
            model[0].base_layer.register_forward_hook(lambda *_: None)
        model.zero_grad()
        x = start.clone().requires_grad_()
        with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
            y = model(x)
        node = "_UpdatedBackward" if kind == "bf16" else "_UpdatedQuantisedBackward"
        assert (type(y.grad_fn).__name__ == node) != hooks
        y.square().mean().backward()
        found.append((y, *(each.grad for each in model.parameters() if each.requires_grad)))
        found[-1] += (x.grad,)
    *same, near = zip(*found, strict=True)
    assert len(same) == 3 and all(torch.equal(*pair) for pair in same)
    torch.testing.assert_close(*near, rtol=0.02, atol=1e-4)
    unpacked = [each for each in saved if each.shape == (128, 64) and each.dtype == torch.bfloat16]
    assert kind == "bf16" or not unpacked


class _Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def bf16_block(together: bool) -> Any:
    """Two bf16 layers with fp32 factors."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)).bfloat16().requires_grad_(False)
    block: Any = inject_adapter_in_model(LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False), layers)
    compute_in_output_type(block)
    if together:
        cast_together([block])
    return block


def test_a_block_casts_its_factors_and_their_gradients_together_with_the_same_bits() -> None:
    x, gradients, casts = torch.randn(8, 64).bfloat16(), [], []
    for together in (False, True):
        block = bf16_block(together)
        with _Counted() as mode:
            block(x).square().mean().backward()
        gradients.append([each.grad for each in block.parameters() if each.requires_grad])
        casts.append((mode.counts["_to_copy"], mode.counts["_foreach_copy_"]))
    assert casts == [(8, 0), (0, 2)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    assert all(each.dtype == torch.float32 for each in gradients[1])


@pytest.mark.parametrize("whole", [False, True], ids=["two factors", "one factor"])
def test_a_block_casts_lokr_s_second_matrices_together_with_the_same_bits(whole: bool) -> None:
    """The first matrix's gradient is summed in fp32: it is not cast ahead."""
    x, gradients, casts = torch.randn(8, 64).bfloat16(), [], []
    second = {"lokr_w2": (16, 16)} if whole else {"lokr_w2_a": (16, 2), "lokr_w2_b": (2, 16)}
    for together in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)).bfloat16().requires_grad_(False)
        for name in ("0", "2"):
            factors = {each: torch.randn(shape) / 4 for each, shape in {"lokr_w1": (4, 4), **second}.items()}
            wrap(block, name, LokrLayer(block.get_submodule(name), factors))
        if together:
            cast_together([block])
        with _Counted() as mode:
            block(x).square().mean().backward()
        gradients.append([each.grad for each in block.parameters() if each.requires_grad])
        casts.append((mode.counts["_to_copy"], mode.counts["_foreach_copy_"]))
    assert casts[1][1] == 2 and casts[0][0] - casts[1][0] == 4 * len(second)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    assert all(each.dtype == torch.float32 for each in gradients[1])
    assert set(block[0].factors) == {"lokr_w1", *second} and "cast" not in vars(block[0])


def test_a_cast_serves_one_pass() -> None:
    block, x = bf16_block(together=True), torch.randn(8, 64).bfloat16()
    before = block(x)
    with torch.no_grad():
        block[0].lora_B["default"].weight.mul_(2)
    assert not torch.equal(block(x), before), "weights that change are cast anew"
    assert "cast" not in vars(block[0])


@pytest.mark.parametrize("state", ["disabled", "another adapter", "two adapters"])
def test_a_layer_with_other_than_one_active_update_is_pefts(state: str) -> None:
    ours, theirs = (inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], init_lora_weights=False),
                                            nn.Sequential(nn.Linear(4, 4))) for _ in range(2))  # fmt: skip
    layers: list[Any] = [ours[0], theirs[0]]  # type: ignore[index]
    for layer in layers:
        layer.update_layer("other", 2, lora_alpha=2, config=LoraConfig(r=2, init_lora_weights=False))
    theirs.load_state_dict(ours.state_dict())
    compute_in_output_type(ours)  # type: ignore[arg-type]
    for layer in layers:
        if state == "disabled":
            layer.enable_adapters(False)
        else:
            layer.set_adapter(["other"] if state == "another adapter" else ["default", "other"])
    x = torch.randn(3, 4)
    torch.testing.assert_close(ours(x), theirs(x))


def test_dropout_falls_on_the_update_alone() -> None:
    config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False, lora_dropout=0.999999)
    model: Any = inject_adapter_in_model(config, nn.Sequential(nn.Linear(64, 64)))
    compute_in_output_type(model)
    x = torch.randn(8, 64)
    torch.testing.assert_close(model(x), model[0].base_layer(x), atol=5.0, rtol=0)
    dropped = (model(x) - model[0].base_layer(x)).abs().median()
    model.eval()
    assert dropped < 0.1 * (model(x) - model[0].base_layer(x)).abs().median()
