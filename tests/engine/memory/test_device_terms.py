"""What CUDA's kernels allocate inside a call, and how their results lie in memory: by hand, and by torch's headers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory import cuda_libraries
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.cuda_libraries import attention_kernel
from simpletune.engine.memory.fake import IN_FP32, autocast_like_cuda
from simpletune.engine.memory.kernel_workspace import (
    BACKWARD,
    convolution_workspace,
    cuda_layouts,
    cudnn_backward,
    efficient_backward,
    efficient_forward,
    flash_backward,
    reduction,
    temporaries,
)  # fmt: skip
from simpletune.estimate.simulate.simulate import accounting_like_cuda, simulate
from simpletune.estimate.simulate.simulate_stages import simulate_stage

L4 = (8, 9)


@pytest.fixture
def config_of(tiny_config: dict) -> Callable[..., TrainConfig]:
    """The tiny pipeline's configuration with sections updated."""
    return lambda **changes: validate(
        {**tiny_config, **{name: {**tiny_config.get(name, {}), **value} for name, value in changes.items()}}, "test"
    )


def heads_first(dtype: torch.dtype = torch.bfloat16, width: int = 64) -> Tensor:
    """[b, h, S, d] in this order in memory, as SD3's query is."""
    return torch.zeros(2, 24, 4429, width, dtype=dtype, device="meta")


def rows_first() -> Tensor:
    """[b, h, S, d] in memory as [b, S, h, d], as the output's gradient is."""
    return torch.zeros(2, 4429, 24, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)


def test_kernels_of_attention_by_hand() -> None:
    """Flash attention copies an output that is laid out as the query."""
    sums, q, grad, rows = 4 * 2 * 24 * 4480 * 65, heads_first(), rows_first(), 4 * 2 * 24 * 4429
    assert flash_backward(grad, q, q, q, rows_first()) == sums
    assert flash_backward(grad, q, q, q, heads_first()) == sums + q.nbytes
    assert flash_backward(heads_first(), q, q, q, heads_first()) == sums + 2 * q.nbytes
    assert cudnn_backward(grad, q, q, q, heads_first()) == sums + q.nbytes
    copies = 3 * sums - 2 * 4 * 2 * 24 * 4480  # 108 multiprocessors for 48 heads
    assert flash_backward(grad, q, q, q, rows_first(), multiprocessors=108) == copies
    assert temporaries("flash", 108)[BACKWARD](grad, q, q, q, rows_first()) == copies
    assert efficient_backward(grad, q) == 4 * 2 * 24 * 4480 * 64 + rows
    assert efficient_backward(grad, heads_first(torch.float32)) == rows
    assert efficient_forward(q) == efficient_forward(heads_first(torch.float32, 512)) == 0
    assert efficient_forward(heads_first(width=512)) == rows * 512


def test_the_kernel_depends_on_the_card_the_type_and_the_option(config_of, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, dtype, kernel in (
        ((7, 5), "fp16", "efficient"), ((8, 0), "bf16", "flash"), ((8, 9), "fp32", "efficient"),
        ((9, 0), "bf16", "flash"), ((12, 0), "bf16", "flash"),
    ):  # fmt: skip
        assert attention_kernel(capability, dtype) == kernel
        assert attention_kernel(capability, dtype, "math") == "math"
    counted: list[str] = []
    monkeypatch.setattr(
        "simpletune.estimate.simulate.simulate.temporaries", lambda kernel, *_: counted.append(kernel) or {}
    )
    config = config_of(precision={"weights": "bf16"})
    for changed, capability in (
        (config, None), (config, (9, 0)), (config, (12, 0)), (config_of(), L4),
        (config_of(precision={"weights": "bf16"}, speed={"attention": "efficient"}), L4),
    ):  # fmt: skip
        with accounting_like_cuda(changed, capability):
            pass
    assert counted == ["flash", "flash", "flash", "efficient", "efficient"]


@pytest.mark.parametrize(("kernel", "out_rows_first"), [("flash", False), ("cudnn", False), ("efficient", True)])
def test_results_are_laid_out_as_on_cuda_and_keep_their_values(kernel: str, out_rows_first: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 10, 64, requires_grad=True)
    plain = functional.scaled_dot_product_attention(q, q * 1, q * 1)
    (wanted,) = torch.autograd.grad(plain.square().sum(), q)
    with Accounting(layouts=cuda_layouts(kernel)):
        k, v = q * 1, q * 1
        out = functional.scaled_dot_product_attention(q, k, v)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
        (total,) = torch.autograd.grad(out.square().sum(), q)
    assert out.transpose(1, 2).is_contiguous() == out_rows_first
    assert all(grad.transpose(1, 2).is_contiguous() == out_rows_first for grad in grads[1:])
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(total, wanted)


def test_a_mask_makes_flash_attention_the_memory_efficient_one() -> None:
    """Its layout, and its bytes: sums of grad q in 64 rows' steps, not flash attention's in 128."""
    q, mask = torch.randn(1, 2, 130, 64, requires_grad=True), torch.ones(1, 1, 1, 130, dtype=torch.bool)
    for kernel, given, rows_last in (("flash", None, False), ("flash", mask, True), ("cudnn", mask, False)):
        with Accounting(layouts=cuda_layouts(kernel)):
            k, v = q * 1, q * 1
            out = functional.scaled_dot_product_attention(q, k, v, given)
            grads = torch.autograd.grad(out.square().sum(), (k, v))
        assert out.transpose(1, 2).is_contiguous() == rows_last, (kernel, given)
        assert all(grad.transpose(1, 2).is_contiguous() == rows_last for grad in grads)
    grad, query, term = rows_first(), heads_first(), temporaries("flash", 108)[BACKWARD]
    assert term(grad, query, query, query, query, attn_mask=mask) == efficient_backward(grad, query)
    assert term(grad, query, query, query, query, attn_mask=None) == flash_backward(
        grad, query, query, query, query, multiprocessors=108
    )
    assert temporaries("cudnn")[BACKWARD](grad, query, query, query, query, attn_mask=mask) == cudnn_backward(
        grad, query, query, query, query
    )
    assert BACKWARD not in temporaries("math")


def test_a_sum_over_rows_shares_a_buffer_between_blocks() -> None:
    # torch's allocator on a simulated L4 gave 45 MiB to Adafactor's mean over a [1536, 6144] gradient's rows.
    gradient = torch.empty(1536, 6144, device="meta")
    assert reduction(gradient, [-2]) == reduction(gradient, 0) == 45 * 2**20
    assert reduction(gradient, [-1]) == reduction(gradient) == reduction(gradient[:64], [0]) == 0
    assert reduction(gradient.T, [0]) == 0
    assert reduction(gradient.view(2, 768, 6144), [0, 1]) == 45 * 2**20
    with Accounting(temporaries()) as count:
        torch.zeros(1536, 6144).mean(dim=-2)
    assert count.peak.by_kind["workspace"] >= 45 * 2**20


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolutions_allowance_is_one_copy_of_input_weight_and_output(stride: int) -> None:
    x, weight = torch.zeros(1, 8, 20, 12), torch.zeros(16, 8, 3, 3)
    with Accounting(temporaries()) as count:
        y = functional.conv2d(x, weight, None, stride, 1)
    allowed = 4 * (x.numel() + weight.numel() + y.numel())
    assert convolution_workspace(x, weight, None, [stride] * 2, [1, 1], [1, 1]) == allowed
    assert count.peak.bytes - count.current.bytes >= allowed


def test_a_convolutions_gradients_have_an_allowance_too() -> None:
    x, weight = torch.zeros(1, 8, 20, 12, requires_grad=True), torch.zeros(16, 8, 3, 3, requires_grad=True)
    y = functional.conv2d(x, weight, None, 1, 1)
    with Accounting(temporaries()) as count:
        y.sum().backward()
    assert count.peak.by_kind["workspace"] >= 4 * (x.numel() + weight.numel() + y.numel())


def test_stages_have_the_allowance_and_a_step_with_autocast_keeps_wide_norms(
    config_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = config_of()
    mixed = config_of(precision={"weights": "fp32", "compute": "bf16"}, memory={"checkpointing": "none"})
    # Freed after each product, cuBLAS's workspace would be most of so small a stage.
    monkeypatch.setattr(cuda_libraries, "frees_workspaces", lambda: False)
    as_on_cuda = simulate_stage(plain, "latents", L4).bytes, simulate(mixed).peak.bytes
    monkeypatch.setattr("simpletune.engine.memory.kernel_workspace.convolution_workspace", lambda *_: 0)
    monkeypatch.setattr("simpletune.engine.memory.fake.IN_FP32", ())
    assert simulate_stage(plain, "latents", L4).bytes < as_on_cuda[0]
    assert simulate(mixed).peak.bytes < as_on_cuda[1]


def test_norms_under_autocast_are_fp32_as_on_cuda() -> None:
    """The functions are of torch's own list."""
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with autocast_like_cuda():
        assert functional.layer_norm(x, (8,)).dtype == torch.bfloat16  # no autocast
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.nn.LayerNorm(8, elementwise_affine=False)(x).dtype == torch.float32
            assert functional.mse_loss(x, x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.layer_norm(x, (8,)).dtype == torch.bfloat16
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    listed = re.search(r"#define AT_FORALL_FP32\(_\)(.*?)#define", header, re.DOTALL)
    assert listed is not None and set(IN_FP32) <= set(re.findall(r"_\((\w+)", listed[1]))
