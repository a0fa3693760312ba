"""Every grid that trains, draws or times something here measures a few small rows, writes its page, and goes on."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import edges, inpainting, int8, int8_quality, methods, quality, recipe, sliders, speed, which_method
from simpletune.engine.profiling.figures import KINDS
from simpletune.system.options import Json

ROOT = Path(__file__).resolve().parents[2]
ONE = "validation.loss_samples=2 schedule.warmup_steps=0 train.steps=2"
SMALL: dict[str, tuple[str, list[str]]] = {
    "quality": (f"--prompts 2 --rows 'base, fp32;LoRA r1' {ONE}", ["quality.png", "quality/lora-r1-int8.png"]),
    "recipe": (f"--prompts 2 --rows 'base;the demo, 100' {ONE}", ["recipe.png"]),
    "which-method": (f"--prompts 2 --rows 'base;LoHa, rank 2' {ONE}", ["which_method.png"]),
    "student-study": (f"--prompts 2 --rows 'LoRA r1, seed 0' {ONE}", ["student_study.png"]),
    "vertex-quality": ("--prompts 2 --rows 'LoRA r8, seed 0' train.steps=2 checkpoint.every=1", ["vertex_quality.png"]),
    "choice": (
        "--prompts 2 --set second --rows 'subject: LoRA r8' train.steps=4 checkpoint.every=2 schedule.warmup_steps=0",
        [],
    ),
    "inpainting": ("--prompts 2 --rows 'not trained;seed 0'", ["inpainting.png"]),
    "sliders": ("--prompts 2 --rows 'seed 0'", ["sliders.png"]),
    "edges": ("--rows 'autoencoder;48x48'", []),
    "int8": (f"--rows 'bf16;int8 products and gradients;down, embedded' {ONE}", ["int8.png"]),
    "int8-quality": (f"--prompts 2 --rows 'rotated, seed 0' {ONE}", ["int8_quality.png"]),
    "methods": ("--rows 'lokr, factor 16, rank 16'", []),
    "speed": ("--device cpu --rows 'diffusers, full;LoRA int8;full bf16'", []),
    "scaling": ("--rows 'LoRA, 1 on;LoRA, exchange'", ["scaling.html"]),
}
"""The arguments of each grid, and the files that it writes beside its table."""
FEWER: list[tuple[Any, str, object]] = [
    (quality, "STEPS", 2), (which_method, "STEPS", 2), (which_method, "ROUNDS", 2), (recipe, "SEEDS", 1),
    (sliders, "TRAINED", 2), (sliders, "STEPS", 2),
    (inpainting, "IMAGES", 8), (inpainting, "TRAINED", 2), (inpainting, "STEPS", 2), (edges, "PROMPTS", 2),
    (edges, "ALONE", (*edges.ALONE, *ONE.split())), (int8, "STEPS", 2), (int8, "ENDS", 1), (int8_quality, "STEPS", 2),
    (int8_quality, "ENDS", 1), (int8_quality, "SHOWN", 1), (methods, "BLOCKS", 1),
    (methods, "SIZE", 64), (methods, "ROUNDS", 2), (methods, "SHIPPED", {"sd3_medium_lora_24gb": "none"}),
    (speed, "SECONDS", 0.1),
]  # fmt: skip


def numbers(value: object) -> Iterator[float]:
    """All numbers in a row."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield value


def require_consistent(grid: str, name: str, row: Json) -> None:
    """What holds between the figures of a row."""
    if grid == "speed" and "flops_per_step" in row:
        assert sum(row[kind] for kind in KINDS) == pytest.approx(1, abs=0.01)
        assert row["tflops"] * 1e12 * row["seconds_per_step"] == pytest.approx(row["flops_per_step"])
        assert row["times_floor"] == pytest.approx(row["seconds_per_step"] / row["floor"])
        assert (row["autoencoder"] > 0) == name.startswith("diffusers") and (row["quantisation"] > 0) == (
            "int8" in name
        )
    if grid == "int8" and "apart" in row:
        assert (float(row["apart"]) == 0) == (name == "bf16") and float(row["apart"]) < 0.05
    if grid == "int8-quality":
        assert 0 < row["apart"] < 0.05 and 0 < row["pixels"] < row["next"]
    if grid == "which-method" and not name.startswith("base"):
        assert row["least"] <= row["step"] <= row["most"] and row["bytes"] > 2 * row["parameters"]
        assert row["peak"] > 3000 and row["drift"] > 0
    if grid == "vertex-quality":
        assert list(row["points"]) == ["0", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("grid", SMALL)
def test_a_grid_measures_a_few_rows_and_goes_on(grid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for module, name, value in FEWER:
        monkeypatch.setattr(module, name, value)
    words, files = SMALL[grid]
    command = [grid, *shlex.split(words), "--minutes", "60", "--out", str(tmp_path)]
    assert benchmarks.main(command) == 0
    (data,) = tmp_path.glob("*.json")
    rows = json.loads(data.read_text())["rows"]
    assert rows and all(math.isfinite(number) for number in numbers(rows))
    page = data.with_suffix(".md").read_text()
    assert f"python -m benchmarks {grid}" in page and page.count("\n|") > 2
    assert [name for name in files if not (tmp_path / name).stat().st_size > 1000] == []
    before = data.read_bytes()
    assert benchmarks.main(command) == 0 and data.read_bytes() == before  # nothing is left to measure
    base = [row["drift"] for name, row in rows.items() if name.startswith("base") and "drift" in row]
    assert not any(base)
    for name, row in rows.items():
        require_consistent(grid, name, row)
    if grid == "methods":
        committed = json.loads((ROOT / "benchmarks/results/cpu/methods.json").read_text())["rows"]
        (name,) = rows
        for key in ("parameters", *methods.SHIPPED, *(f"{each}_ratio" for each in methods.SHIPPED)):
            assert rows[name][key] == pytest.approx(committed[name][key], rel=0.01)
