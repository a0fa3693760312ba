"""Bytes, launches and products of a step: the committed counts, and the arithmetic that they rest on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import traffic
from simpletune.estimate.timing.sections import KernelWork, StreamWork
from simpletune.system.options import Json

COMMITTED = json.loads((Path(traffic.__file__).parent / "results" / "cpu" / "traffic.json").read_text())["rows"]
FAST = [f"{traffic.DEMO}int8", f"{traffic.DEMO}int8 products", f"{traffic.DEMO}full, adamw_bf16 in backward"]
OTHERS = [pytest.param(name, marks=pytest.mark.pages) for name in traffic.ROWS if name not in FAST]
TOLERANCE = 0.01


def figures(row: Json) -> dict[str, float]:
    """All counts of a row by name."""
    counts = {f"{kind}: {name}": count for kind in ("bytes", "launches") for name, count in row[kind].items()}
    return {**counts, "operations": row["operations"], "seconds": row["seconds"]}


@pytest.mark.parametrize("name", [*FAST, *OTHERS])
def test_a_step_moves_what_it_moved(name: str) -> None:
    """A change on purpose is recorded by deleting the rows and running ``python -m benchmarks traffic``."""
    today, before = figures(traffic.measure(*traffic.ROWS[name])), figures(COMMITTED[name])
    assert set(today) == set(before)
    changed = {
        key: f"{before[key]:,.0f} -> {value:,.0f}"
        for key, value in today.items()
        if abs(value - before[key]) > TOLERANCE * before[key]
    }
    assert not changed, changed


def test_a_bf16_step_moves_at_most_35_gb_and_int8_less_than_a_third_of_that_more() -> None:
    """Before norms, gates and residuals were single operators, bf16 moved 45.2 GB and int8 57.4."""
    gb = {name: COMMITTED[f"LoRA r16, {name}"]["gb"] for name in traffic.BASES}
    assert gb["bf16"] <= 35 and gb["int8"] <= 57.4 - (45.2 - gb["bf16"]) + 0.1
    assert gb["int8"] - gb["bf16"] <= 0.3 * 45.2
    assert all(gb[name] <= gb["int8"] for name in ("int8 products", "int8 products and gradients", "nf4"))


def test_an_int8_base_adds_only_the_unpacking_of_its_weights() -> None:
    """Three bytes a weight for each product: one read, two written; the last block's first half has no gradient."""
    bf16, int8 = (COMMITTED[f"LoRA r16, {name}"]["bytes"] for name in ("bf16", "int8"))
    width, blocks, passes = 1536, 24, 3  # forward, recomputed, gradient
    weights = width * width * (4 + 8) * 2 * blocks - width * width * (1 + 8)  # the last block's text: no output
    assert int8["unpacking"] == pytest.approx(3 * passes * weights, rel=0.02)
    assert int8[traffic.ELEMENTWISE] == pytest.approx(bf16[traffic.ELEMENTWISE], rel=0.01)
    assert {name: int8[name] for name in ("norms", "gelu")} == {name: bf16[name] for name in ("norms", "gelu")}


def test_classes_add_up_work_by_hand() -> None:
    work = {
        KernelWork("product_tn", "bf16", (10, 20, 30)): 2,
        KernelWork("bias", "bf16", (400,)): 2,
        KernelWork("int8_product", "bf16", (10, 20, 30)): 1,
        KernelWork("attention", "bf16", (3, 10, 20, 64)): 1,
        KernelWork("attention_backward", "bf16", (3, 10, 20, 64)): 1,
        KernelWork("convolution", "bf16", (100, 4, 5)): 1,
        KernelWork("each", "fp32", (120, 1000)): 1,
        KernelWork("gelu", "bf16", (50,)): 4,
        KernelWork("to_host", "bytes", (77,)): 1,
    }
    sections = [StreamWork("compute", "forward", "", work=Counter(work)), StreamWork("compute", "", "", 0.5)]
    sections[1].work[KernelWork("norm", "bf16", (1000,))] = 3
    found = traffic.counted(sections)
    products = 2 * 2 * (300 + 600 + 200) + (300 + 600 + 2 * 200) + 2 * (100 * 9 + 180)
    attention = 3 * 2 * (2 * 10 + 2 * 20) * 64 * 3  # q, k, v, y of 16 bits; as much again and their gradients
    assert found["bytes"] == {
        "products": products, "attention": attention, "element-wise": 1000, "gelu": 200, "copies": 77, "norms": 1500,
    }  # fmt: skip
    assert found["operations"] == 3 * 2 * 6000 + 18 * 2000
    assert found["launches"] == {
        "products": 4, "attention": 2, "element-wise": 2, "gelu": 4, "copies": 1, "norms": 1.5,
    }  # fmt: skip
