"""The int8 kernels in Triton's interpreter, on the CPU, against float64. Run in a process of its own by
test_triton_interpreter.py, because TRITON_INTERPRET must be set before Triton is imported."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreted_examples import examples
from reference.int8_network import gelu, gelu_slope
from reference.rotation import block_rotation
from torch import Tensor

from simpletune.engine.quant import (
    int8_gradient_kernel,
    int8_kernel,
    int8_products,
    int8_rows_kernel,
)

TILES = [(16, 16, 32, 4, 2), (32, 64, 32, 4, 2), (64, 32, 64, 4, 2)]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
ODD = ("none", "zeros", "outlier", "tiny", "nan", "inf")
EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}
lengths = st.one_of(st.just(1), st.integers(1, 70))


def activations(rows: int, k: int, dtype: torch.dtype, odd: str, seed: int) -> Tensor:
    """Normal numbers, of which the first row is odd."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    if odd == "zeros":
        x[0] = 0
    if odd in ("nan", "inf"):
        x[0, k // 2] = float(odd)
    if odd in ("outlier", "tiny"):
        x[0, -1] *= {"outlier": 3e4, "tiny": 1e-7}[odd]
    return x.to(dtype)


def truncated(y: Tensor) -> Tensor:
    """fp32 to bf16 as the interpreter has it: the lower bits are cut off."""
    return (y.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


@examples(25)
@given(
    rows=st.integers(1, 12), k=lengths, dtype=st.sampled_from(TYPES), odd=st.sampled_from(ODD), folded=st.booleans(),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_rows_are_those_of_the_cpu(rows: int, k: int, dtype: torch.dtype, odd: str, folded: bool, seed: int) -> None:
    x = activations(rows, k, dtype, odd, seed)
    columns = torch.rand(k, generator=torch.Generator().manual_seed(seed)) if folded else None
    ours = int8_rows_kernel.rows(x, columns, int8_products.LEAST)
    torch.testing.assert_close(ours, int8_products.int8_rows(x, columns), **EXACT)


def test_long_rows_take_several_blocks() -> None:
    x = activations(3, 2 * int8_rows_kernel.LONGEST_LOAD + 5, torch.float32, "outlier", 0)
    torch.testing.assert_close(int8_rows_kernel.rows(x, None, 0), int8_products.int8_rows(x), **EXACT)


@pytest.mark.parametrize("strided", ["sliced", "transposed", "expanded"])
def test_rows_are_read_as_they_lie(strided: str) -> None:
    x = torch.randn(2, 16, 48)
    transposed, expanded = x.transpose(1, 2)[:, :6], x[:1, :3].expand(2, 3, 48)
    x = {"sliced": x[:, 2:7, :16], "transposed": transposed, "expanded": expanded}[strided]
    rows = int8_rows_kernel.rows(x, None, int8_products.LEAST)
    torch.testing.assert_close(rows, int8_products.int8_rows(x.contiguous()), **EXACT)
    rotated = int8_rows_kernel.rotated_rows(x, 16, int8_products.LEAST)
    torch.testing.assert_close(rotated, int8_products.int8_rotated_rows(x.contiguous(), 16), **EXACT)


@examples(20)
@given(
    rows=st.integers(1, 8), block=st.sampled_from([16, 64, 256]), count=st.sampled_from([1, 2, 3, 5]),
    dtype=st.sampled_from(TYPES), odd=st.sampled_from(ODD), longest=st.sampled_from([256, 8192]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_rotated_rows_are_a_float64_references_and_the_cpus(
    rows: int, block: int, count: int, dtype: torch.dtype, odd: str, longest: int, seed: int
) -> None:
    x = activations(rows, block * count, dtype, odd, seed)
    q, scale = int8_rows_kernel.rotated_rows(x, block, int8_products.LEAST, longest)
    torch.testing.assert_close((q, scale), int8_products.int8_rotated_rows(x, block), **EXACT)
    h = torch.block_diag(*[torch.from_numpy(block_rotation(block))] * count)
    exact, size = x.double() @ h, x.double().abs() @ h.abs()
    sound = exact.isfinite().all(dim=1)
    assert torch.equal(scale.isfinite(), sound)
    error = (q.double() * scale.double()[:, None] - exact).abs()
    assert (error <= 0.50001 * scale[:, None] + 1e-6 * size)[sound].all()
    assert ((scale.double() - exact.abs().amax(dim=1) / 127).abs() <= 1e-6 * size.amax(dim=1))[
        sound & (exact.abs().amax(dim=1) > int8_products.LEAST)
    ].all()


@examples(25)
@given(
    m=lengths, n=lengths, k=lengths, dtype=st.sampled_from(TYPES), odd=st.sampled_from(ODD),
    tile=st.sampled_from(TILES), scaled=st.booleans(), biased=st.booleans(), flipped=st.booleans(),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_products_are_a_float64_references_and_the_cpus(
    m: int, n: int, k: int, dtype: torch.dtype, odd: str, tile: tuple, scaled: bool, biased: bool, flipped: bool,
    seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    x, x_scale = int8_products.int8_rows(activations(m, k, dtype, odd, seed))
    weight = torch.randint(-127, 128, (n, k), generator=generator).to(torch.int8)
    weight = weight.t().contiguous().t() if flipped else weight
    scale = torch.rand(n, generator=generator) if scaled else None
    bias = torch.randn(n, generator=generator).to(dtype) if biased else None
    given = (x, x_scale, weight, scale, bias)
    ours = int8_kernel.product((x, x_scale), weight, scale, bias, dtype, tile)
    wide = int8_products.int8_product(*given, torch.float32)
    torch.testing.assert_close(ours, truncated(wide) if dtype == torch.bfloat16 else wide.to(dtype), **EXACT)

    exact = (x.double() @ weight.double().t()) * x_scale.double()[:, None] * (1 if scale is None else scale.double())
    size = exact.abs() + (0 if bias is None else bias.double().abs())
    error = (wide.double() - (exact if bias is None else exact + bias.double())).abs()
    assert (error <= 4e-7 * size).logical_or(exact.isnan()).all()
    assert torch.equal(wide.isnan(), exact.isnan())
    assert wide[0].isnan().all() == (odd in ("nan", "inf"))


@examples(20)
@given(
    m=lengths, n=st.integers(1, 20), k=st.integers(1, 20), dtype=st.sampled_from(TYPES), odd=st.sampled_from(ODD),
    tile=st.sampled_from([(16, 64, 32, 4, 2), (32, 64, 64, 4, 2), (64, 128, 64, 4, 2)]), part=st.booleans(),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_gradients_by_words_are_a_float64_references_and_the_cpus(
    m: int, n: int, k: int, dtype: torch.dtype, odd: str, tile: tuple, part: bool, seed: int
) -> None:
    """The weight lies transposed; ``part``: it is a part of a wider one."""
    n, k, generator = 4 * n, 4 * k, torch.Generator().manual_seed(seed)
    x, x_scale = int8_products.int8_rows(activations(m, k, dtype, odd, seed))
    weight = torch.randint(-127, 128, (k, n + 8 * part), generator=generator).to(torch.int8)[:, :n].t()
    assert int8_gradient_kernel.reads_words(weight)
    ours = int8_gradient_kernel.gradient((x, x_scale), weight, dtype, tile)
    wide = int8_products.int8_product(x, x_scale, weight, None, None, torch.float32)
    torch.testing.assert_close(ours, truncated(wide) if dtype == torch.bfloat16 else wide.to(dtype), **EXACT)
    exact = (x.double() @ weight.double().t()) * x_scale.double()[:, None]
    assert ((wide.double() - exact).abs() <= 4e-7 * exact.abs()).logical_or(exact.isnan()).all()


def test_what_words_cannot_be_read_of() -> None:
    weight = torch.zeros(64, 64, dtype=torch.int8)
    wider = torch.zeros(64, 66, dtype=torch.int8)[:, :64]
    parts = [weight, weight[:, :62].t(), weight[:62].t(), weight[:, 1:61].t(), wider.t()]
    assert int8_gradient_kernel.reads_words(weight.t()) and not any(map(int8_gradient_kernel.reads_words, parts))


@examples(25)
@given(
    rows=st.integers(1, 6), k=st.sampled_from([16, 33, 64, 100, 512]), dtype=st.sampled_from(TYPES),
    odd=st.sampled_from(ODD), back=st.booleans(), columned=st.booleans(), turned=st.booleans(),
    longest=st.sampled_from([64, 8192]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_rows_of_gelu_are_a_float64_references(
    rows: int, k: int, dtype: torch.dtype, odd: str, back: bool, columned: bool, turned: bool, longest: int, seed: int
) -> None:
    """Within half a scale, and what rounding to the input's type adds, which the interpreter's bf16 cuts off."""
    generator = torch.Generator().manual_seed(seed)
    x = activations(rows, k, dtype, odd, seed) * 2
    grad = torch.randn(rows, k, generator=generator).to(dtype) if back else None
    columns = torch.rand(k, generator=generator) if columned else None
    block = 16 if turned and k % 16 == 0 and not columned else 0
    q, scale = int8_rows_kernel.gelu_rows(x, grad, columns, block, int8_products.LEAST, longest)
    wide = x.double().numpy()
    exact = torch.from_numpy(gelu(wide) if grad is None else gelu_slope(wide) * grad.double().numpy())
    precision = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    size = exact.abs() * precision + (x.double().abs() if grad is None else grad.double().abs()) * 2e-6 + 6e-8
    if columns is not None:
        exact, size = exact * columns.double(), size * columns.double()
    if block:
        h = torch.block_diag(*[torch.from_numpy(block_rotation(16))] * (k // 16))
        exact, size = exact @ h, size @ h.abs()
    sound = exact.isfinite().all(dim=1)
    assert torch.equal(scale.isfinite(), sound) and not q[~sound].any()
    error = (q.double() * scale.double()[:, None] - exact).abs()
    assert (error <= 0.50001 * scale[:, None] + size)[sound].all()
    assert ((scale.double() * 127 - exact.abs().amax(dim=1)).abs() <= size.amax(dim=1))[
        sound & (exact.abs().amax(dim=1) > 1e-6)
    ].all()
