"""The benchmark grids: rows are kept, gone on with, and shown; predictions need no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from simpletune.bench import inference, int8, memory, quality
from simpletune.bench.table import Results, shown
from simpletune.options import UserError


def test_rows_are_kept_on_disk_and_shown(tmp_path: Path) -> None:
    columns = {"what": "", "a": "first", "b": "second"}
    results = Results(tmp_path / "grid", columns)
    assert results.lacks("x")
    results.add("x", {"a": 1234, "b": 0.5, "c": "hidden"})
    again = Results(tmp_path / "grid", columns)
    assert not again.lacks("x") and again.lacks("y")
    text = again.write_table("Title", "About.", {"device": "none"}).read_text()
    assert "| x | 1,234 | 0.500 |" in text and "hidden" not in text and "- device: none" in text
    assert (shown(None), shown(12.34), shown("word")) == ("", "12.3", "word")


def test_every_row_of_the_memory_grid_is_a_valid_configuration() -> None:
    from simpletune.reading import read_config

    assert len(memory.ROWS) <= 40
    assert [row.target_mib for row in memory.ROWS.values()][:5] == [1950, 1350, 800, 8600, 2000]
    for row in memory.ROWS.values():
        read_config(memory.CONFIG, [*memory.ENOUGH, *row.overrides, "data.path=demo:pictures"])


def test_the_committed_predictions_meet_their_targets() -> None:
    file = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "cpu" / "memory.json"
    rows = json.loads(file.read_text())["rows"]
    targeted = {name: row for name, row in rows.items() if row.get("target_mib")}
    assert len(targeted) == 7
    for row in targeted.values():
        assert row["predicted_mib"] <= row["target_mib"]


def test_the_quality_grid_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "PRECISIONS", {"fp32": quality.PRECISIONS["fp32"]})
    monkeypatch.setattr(quality, "TUNED", {"LoRA": []})
    monkeypatch.setattr(quality, "STEPS", 2)
    overrides = ["train.steps=2", "schedule.warmup_steps=1", "device=cpu", f"output.cache={tmp_path}/cache",
                 "validation.eval_samples=2"]  # fmt: skip
    with pytest.raises(Exception, match="none of the 3 rows"):
        quality.run(tmp_path, 4, 60, "no such row", overrides)
    table = quality.run(tmp_path, 4, 60, "base", overrides)
    rows = json.loads((tmp_path / "quality.json").read_text())["rows"]
    assert set(rows) == {"base, fp32", "base, fp32, the trigger word"}
    assert rows["base, fp32"]["drift"] == 0
    quality.run(tmp_path, 4, 60, "", overrides)
    rows = json.loads((tmp_path / "quality.json").read_text())["rows"]
    assert rows["LoRA"]["bytes"] > 1000 and rows["LoRA"]["drift"] > 0
    assert "LoRA" in table.read_text()
    with Image.open(tmp_path / "quality.png") as picture:
        assert picture.height > 2 * 64


def test_inference_is_measured_against_diffusers_in_one_process(tmp_path: Path, monkeypatch) -> None:
    wanted = ["diffusers", "simpletune, prompts new", "modulation plan", "lossy: guidance difference for 2 steps"]
    wanted += ["diffusers, LoRA r16", "LoRA r16, fused"]
    monkeypatch.setattr(inference, "ROWS", {name: inference.ROWS[name] for name in wanted})
    with pytest.raises(UserError, match="none of the 6 rows holds 'nothing'"):
        inference.run(tmp_path, only="nothing")
    page = inference.run(tmp_path, size=(32, 32), steps=2, rounds=1, prices={"spot": 0.36}, device="cpu").read_text()
    rows = json.loads((tmp_path / "inference.json").read_text())["rows"]
    assert list(rows) == wanted
    for name in ("simpletune, prompts new", "modulation plan", "LoRA r16, fused"):
        assert float(rows[name]["differs"]) < 1e-5, name
    assert float(rows[wanted[3]]["differs"]) > 1e-4
    for row in rows.values():
        assert row["seconds_per_picture"] == pytest.approx(row["encode"] + row["denoise"] + row["decode"])
        assert row["cost"]["spot"] == pytest.approx(0.1 * row["seconds_per_picture"])
    assert 0.2 < rows["diffusers"]["faster"] < 5 and "spot, at 0.36 an hour" in page


def test_int8_products_are_measured_beside_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "LAYERS", {"small": (64, 48)})
    monkeypatch.setattr(int8, "STEPS", 2)
    monkeypatch.setattr(int8, "RUNS", {name: int8.RUNS[name] for name in ("bf16", "int8 products and gradients")})
    overrides = ["schedule.warmup_steps=1", "device=cpu", f"output.cache={tmp_path}/cache", "validation.eval_samples=2"]
    page = int8.run(tmp_path, 60, "", overrides).read_text()
    rows = json.loads((tmp_path / "int8.json").read_text())["rows"]
    ours, bf16 = rows["int8 products and gradients"], rows["bf16"]
    assert float(bf16["apart"]) == 0 < float(ours["apart"]) < 0.05 and len(ours["losses"]) == 2
    normal, outliers, channels = (rows[f"small [64, 48], {kind}"] for kind in ("normal", "outliers", "channels"))
    assert max(normal["weights"], normal["activations"]) < normal["both"] < 1.5
    assert outliers["both"] > 1.4 * normal["both"] and channels["int8_gradient"] > 1.4 * normal["int8_gradient"]
    assert "## One product" in page
    with Image.open(tmp_path / "int8.png") as picture:
        assert picture.width > 700
