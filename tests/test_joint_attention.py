"""Steps on the CPU: attention by plain products, shared updates, GELU by a table give what diffusers' blocks give."""

from __future__ import annotations

import copy
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import CONFIG, shake_updates
from test_run import run_with
from torch import Tensor, nn

from simpletune.adapters.lora import Lora
from simpletune.adapters.lora_product import add_update, add_updates, project
from simpletune.config.load import read_config
from simpletune.config.resolve import resolved
from simpletune.models.sd3_transformer import RandomTensors, load
from simpletune.options import UserError
from simpletune.quant.plain import FP32
from simpletune.step import attention
from simpletune.step.gelu_table import gelu, tables, take_table
from simpletune.step.joint_attention import JointAttention, Scratch, attend, take_joint_attention

KINDS = {
    "sd3": {},
    "sd3.5": {"qk_norm": "rms_norm", "dual_attention_layers": [0, 1]},
}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_gradients_of_attention_are_exact() -> None:
    scratch = Scratch()
    q, k, v = drawn(2, 3, 4, 5), drawn(2, 3, 7, 5, seed=1), drawn(2, 3, 7, 5, seed=2)
    inputs = tuple(tensor.requires_grad_() for tensor in (q, k, v))
    torch.autograd.gradcheck(lambda *t: attend(*t, scratch), inputs)
    torch.testing.assert_close(attend(q, k, v, scratch), F.scaled_dot_product_attention(q, k, v))


def test_scores_of_several_shapes_share_their_memory() -> None:
    scratch = Scratch()
    kept = []
    for tokens in (5, 9, 3):
        q, k, v = (drawn(1, 2, tokens, 4, seed=seed).requires_grad_() for seed in range(3))
        kept.append(((q, k, v), attend(q, k, v, scratch)))
    for inputs, result in reversed(kept):
        expected = F.scaled_dot_product_attention(*inputs)
        torch.testing.assert_close(result, expected)
        grads = torch.autograd.grad(result.sin().sum(), inputs), torch.autograd.grad(expected.sin().sum(), inputs)
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("strength", [1, 4])
def test_in_bf16_as_near_to_the_exact_ones_as_pytorch_s_kernel(strength: float) -> None:
    inputs = [drawn(1, 6, 154, 64, seed=seed) * strength for seed in range(2)] + [drawn(1, 6, 154, 64, seed=2)]
    out = drawn(1, 6, 154, 64, seed=3)

    def errors(function: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs]
        result = function(*leaves)
        result.backward(out.to(dtype))
        return [result.detach(), *(leaf.grad for leaf in leaves)]

    inputs = [tensor.bfloat16().double() for tensor in inputs]
    exact = errors(F.scaled_dot_product_attention, torch.float64)
    ours = errors(lambda *t: attend(*t, Scratch()), torch.bfloat16)
    theirs = errors(F.scaled_dot_product_attention, torch.bfloat16)
    for name, x, mine, other in zip(("output", "query", "key", "value"), exact, ours, theirs, strict=True):
        distance, beside = ((tensor.double() - x).norm() / x.norm() for tensor in (mine, other))
        assert distance < 1.4 * beside, name


def model_of(kind: str, dtype: torch.dtype, lora: Lora | None) -> Any:
    """A random SD3 whose updates count; without one everything trains."""
    config = {**CONFIG, **KINDS[kind]}
    model: Any = load(config, RandomTensors(config, 3), FP32(), torch.device("cpu"))
    if lora is None:
        model.requires_grad_(True)
    else:
        lora.attach(model, 0)
        shake_updates(model)
    return model.to(dtype).train()


def results(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The prediction, and the gradient of everything that trains."""
    model.zero_grad()
    inputs = [drawn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(((2, 4, 8, 8), (2, 7, 24), (2, 16)))]
    sample, text, pooled = inputs
    timestep = torch.tensor([100.0, 900.0], dtype=dtype)
    predicted = model(sample, text, pooled, timestep, return_dict=False)[0]
    predicted.float().square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    return {"prediction": predicted.detach(), **found}


TRAINED = {
    "full": None,
    "attention": Lora(rank=3),
    "all": Lora(rank=3, alpha=6.0, targets="all_linear"),
    "image": Lora(rank=3, targets="attention_image"),
    "queries": Lora(rank=3, targets=["attn.to_q", "attn.add_q_proj"]),
}


@pytest.mark.parametrize("by_products", [True, False], ids=["products", "kernel"])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_predict_and_learn_the_same(kind: str, trained: str, by_products: bool) -> None:
    theirs = model_of(kind, torch.float64, TRAINED[trained])
    ours = copy.deepcopy(theirs)
    take_joint_attention(ours.transformer_blocks, by_products)
    take_table(ours.transformer_blocks)
    expected, found = results(theirs, torch.float64), results(ours, torch.float64)
    unread = {name for name in expected if name not in found}
    assert not unread
    for name, value in found.items():
        reference = expected.get(name, torch.zeros_like(value))  # the last block's queries of the text
        torch.testing.assert_close(value, reference, msg=name, rtol=1e-9, atol=1e-12)
    assert not found.keys() - expected.keys() - {name for name in found if ".add_q_proj." in name}


def test_under_autocast_products_are_in_bf16() -> None:
    theirs = model_of("sd3.5", torch.float32, None)
    ours = copy.deepcopy(theirs)
    take_joint_attention(ours.transformer_blocks, True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = results(theirs, torch.float32), results(ours, torch.float32)
    torch.testing.assert_close(found["prediction"], expected["prediction"], rtol=0.05, atol=0.02)
    for name, value in expected.items():
        assert (found[name].float() - value.float()).norm() <= 0.1 * value.float().norm() + 1e-6, name


def test_the_text_s_queries_that_nobody_reads_are_not_computed() -> None:
    model = model_of("sd3", torch.float64, TRAINED["attention"])
    take_joint_attention(model.transformer_blocks, True)
    shapes = []

    def record(query: Tensor, key: Tensor, value: Tensor, scratch: Scratch) -> Tensor:
        shapes.append((query.shape[2], key.shape[2]))
        return attend(query, key, value, scratch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simpletune.step.joint_attention.attend", record)
        found = results(model, torch.float64)
    assert shapes == [(23, 23)] * 3 + [(16, 23)]
    last = [value for name, value in found.items() if name.startswith("transformer_blocks.3.attn.add_q_proj")]
    assert len(last) == 2 and not any(value.any() for value in last)


def test_updates_of_layers_with_one_input_are_added_at_once() -> None:
    x = drawn(2, 5, 6).requires_grad_()
    layers = [
        (drawn(8, 6, seed=n), drawn(r, 6, seed=n + 10), drawn(8, r, seed=n + 20)) for n, r in enumerate((3, 2, 4))
    ]
    factors = [tensor.requires_grad_() for _, a, b in layers for tensor in (a, b)]
    scales = (0.5, 1.0, 2.0)

    def together(x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        return add_updates([F.linear(x, w) for w, _, _ in layers], x, factors[::2], factors[1::2], scales)

    torch.autograd.gradcheck(together, (x, *factors))
    for found, (w, a, b), scale in zip(together(x, *factors), layers, scales, strict=True):
        torch.testing.assert_close(found, add_update(F.linear(x, w), x, a, b, scale))


def test_layers_that_share_no_update_are_called_one_by_one() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

    x = drawn(3, 4, dtype=torch.float32)
    for lora in (Lora(rank=2, targets=["q", "k"]), Lora(rank=2, targets=["q", "k", "v"], dropout=0.9)):
        model = Three()
        lora.attach(model, 0)
        shake_updates(model)
        layers = [model.q, model.k, model.v]
        called: list[nn.Module] = []
        for layer in layers:
            layer.register_forward_hook(lambda module, *_, called=called: called.append(module))
        torch.manual_seed(0)
        found = project(layers, x)
        torch.manual_seed(0)
        assert called == layers
        for value, layer in zip(found, layers, strict=True):
            torch.testing.assert_close(value, layer(x))


def test_updates_that_are_off_are_off_for_all() -> None:
    model = model_of("sd3", torch.float64, TRAINED["attention"])
    plain = copy.deepcopy(model)
    take_joint_attention(model.transformer_blocks, True)
    lora = TRAINED["attention"]
    assert lora is not None
    with lora.disabled(model), lora.disabled(plain), torch.no_grad():
        inputs = (drawn(1, 4, 8, 8), drawn(1, 7, 24), drawn(1, 16), torch.tensor([5.0], dtype=torch.float64))
        torch.testing.assert_close(model(*inputs).sample, plain(*inputs).sample)


def test_the_table_of_gelu_has_every_bf16_number() -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    expected = F.gelu(numbers, approximate="tanh")
    assert torch.equal(gelu(numbers).view(torch.int16), expected.view(torch.int16))
    few = numbers[(numbers.abs() < 30)].reshape(2, -1)
    for values in (few, few.t()):
        x, exact = values.clone().requires_grad_(), values.double().requires_grad_()
        grad = torch.linspace(-3, 3, x.numel(), dtype=torch.bfloat16).view(x.shape)
        gelu(x).backward(grad)
        F.gelu(exact, approximate="tanh").backward(grad.double())
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2**-7, atol=1e-5)
    wide = numbers.float()
    assert torch.equal(gelu(wide).nan_to_num(), F.gelu(wide, approximate="tanh").nan_to_num())
    assert all(len(table) == 2**16 for table in tables())


def settled(overrides: list[str], size: int = 64) -> tuple[str, Any]:
    """What is found for a configuration, and the model that was set up."""
    config = resolved(read_config(Path("configs/demo.json"), overrides)[0])
    model: Any = load(config.model.known_config(), RandomTensors(config.model.known_config(), 0), FP32(), CPU)
    return attention.settle_attention(config, model, (size, size), CPU), model


CPU = torch.device("cpu")


def test_which_steps_take_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe_matmul(yes: bool) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": yes, "avx2": True})

    def own(model: Any) -> bool:
        return isinstance(model.transformer_blocks[0].attn.processor, JointAttention)

    bf16, fp32 = ["precision.compute=bf16"], ["precision.compute=fp32"]
    describe_matmul(True)
    found, model = settled(bf16)
    assert found == "products" and own(model) and model.transformer_blocks[0].attn.processor.scratch is not None
    found, model = settled(bf16, size=1024)
    assert found == "flash" and own(model) and model.transformer_blocks[0].attn.processor.scratch is None
    for overrides in ([*bf16, "speed.compile=true"], fp32):
        found, model = settled(overrides)
        assert found == "flash" and not own(model), overrides
    describe_matmul(False)
    found, model = settled(bf16)
    assert found == "flash" and own(model)
    found, model = settled([*fp32, "speed.attention=products"])
    assert found == "products" and own(model)
    with pytest.raises(UserError, match="products is for the CPU, and the run is on cuda. Use auto"):
        attention.usable("products", 2, 20, 64, torch.device("cuda"), torch.bfloat16)
    with pytest.raises(UserError, match="products is not for compiled blocks. Use auto with speed.compile"):
        read_config(Path("configs/demo.json"), ["speed.compile=true", "speed.attention=products"])


def test_a_run_by_products_learns_what_a_run_by_the_kernel_does(tiny_config: dict) -> None:
    losses = {}
    for kernel in ("products", "flash"):
        run = Path(run_with(tiny_config, name=kernel, precision={"weights": "bf16"}, speed={"attention": kernel}))
        assert json.loads((run / "summary.json").read_text())["attention"] == kernel
        lines = (run / "metrics.jsonl").read_text().splitlines()
        losses[kernel] = torch.tensor([json.loads(line)["loss"] for line in lines])
    torch.testing.assert_close(losses["products"], losses["flash"], rtol=5e-3, atol=0)


FREED = """
import resource
from simpletune.devices import keep_freed_memory
if {keep}:
    keep_freed_memory()
def work():
    kept = [b"x" * 2**24 for _ in range(3)]  # 48 MiB
for _ in range(4):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_kept_for_the_next_step() -> None:
    def faults(keep: bool) -> int:
        done = subprocess.run(
            [sys.executable, "-c", FREED.format(keep=keep)], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    pages = 4 * 48 * 2**20 // resource.getpagesize()
    assert faults(keep=True) < pages / 20
    assert faults(keep=False) > pages / 2
