"""The benchmark grids: rows are kept, gone on with, and shown; predictions need no GPU."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks import __main__ as benchmarks
from benchmarks import (
    choice,
    convolutions,
    inference,
    int8,
    int8_quality,
    int8_rotation,
    measured_memory,
    memory,
    memory_row,
    methods,
    student_study,
    vertex,
    which_method,
)
from benchmarks.table import Results, selected, shown
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_folders
from simpletune.data.demo import SHIPPED
from simpletune.estimate.job_estimate import needed_bytes
from simpletune.models.families import FAMILIES
from simpletune.models.shared.parameter_shapes import shapes_of_class
from simpletune.runs.folder import DRIFT, EVALUATIONS
from simpletune.system import prices
from simpletune.system.gpus import Card
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import write_safetensors

RESULTS = Path(benchmarks.__file__).parent / "results" / "cpu"


def test_rows_are_kept_on_disk_and_shown(tmp_path: Path) -> None:
    columns = {"what": "", "a": "first", "b": "second"}
    results = Results(tmp_path / "new" / "some_grid", columns)
    assert results.write_table("Title", "About.", {}).read_text().splitlines()[-2:] == [
        "|  | first | second |", "|---|---|---|"
    ]  # fmt: skip
    results.measure({"x": lambda: {"a": 1234, "b": 0.5, "c": "hidden"}, "y": dict}, 60, "x")
    again = Results(tmp_path / "new" / "some_grid", columns)
    assert not again.lacks("x") and again.lacks("y")
    again.measure({"x": lambda: pytest.fail("measured again")}, 60)
    text = again.write_table("Title", "About.", {"device": "none"}).read_text()
    assert "- command: `python -m benchmarks some-grid`\n- device: none\n" in text
    assert "| x | 1,234 | 0.500 |" in text and "hidden" not in text
    assert (shown(None), shown(12.34), shown("word")) == ("", "12.3", "word")


def test_rows_are_chosen_by_parts_or_by_whole_names() -> None:
    rows = {"LoRA int8, 1024 px": 1, "LoRA int8, 1024 px, batch 4": 2, "full": 3}
    assert selected(rows, "") == list(rows) and selected(rows, "1024") == list(rows)[:2]
    assert selected(rows, "full; LoRA int8, 1024 px") == ["LoRA int8, 1024 px", "full"]
    with pytest.raises(UserError, match="'batch 8'"):
        selected(rows, "full; batch 8")


def committed(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def test_every_row_of_the_memory_grid_is_valid_and_the_committed_predictions_meet_their_targets() -> None:
    assert len(memory.ROWS) <= 48
    for row in memory.ROWS.values():
        read_config(memory.CONFIG, [*memory.ENOUGH, *row.overrides, "data.path=demo:pictures"])
    rows = committed("memory")
    targeted = {name: row.target_mib for name, row in memory.ROWS.items() if row.target_mib}
    assert len(targeted) == 7 and list(targeted.values())[:6] == [1950, 1350, 800, 400, 8600, 2000]
    for name, target in targeted.items():
        assert rows[name]["predicted_mib"] <= target == rows[name]["target_mib"], name


def test_the_memory_grid_and_the_simulated_l4_predict_the_same() -> None:
    """Both are committed; that of the L4 is predicted anew whenever an allocation is compared with it."""
    rows, others = committed("memory"), json.loads((RESULTS.parent / "dry-l4" / "memory.json").read_text())["rows"]
    both = {name: (rows[name]["predicted_mib"], others[name]["predicted_mib"]) for name in rows if name in others}
    assert len(both) == 37
    assert {name: pair for name, pair in both.items() if abs(pair[0] - pair[1]) > 0.55} == {}  # whole MiB, and tenths


def test_the_memory_grid_measures_no_time(tiny_config: dict, write_config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are uninitialised: zeros take less power, so a card that is limited by power would look faster."""
    bytes_of = dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), 3 * 2**20)
    for name in ("reset_peak_memory_stats", "synchronize", *bytes_of):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: bytes_of.get(name))
    monkeypatch.setattr(memory, "CONFIG", write_config(tiny_config))
    found = memory_row.measure((), "cpu")
    assert set(found) == {"measured_mib", "reserved_mib", "rss_mib"} and found["measured_mib"] == 3
    assert not any("s/step" in title or "seconds" in key for key, title in memory.COLUMNS.items())


@pytest.mark.slow
def test_inference_is_measured_against_diffusers_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lossy = "lossy: guidance difference for 2 steps"
    wanted = ["diffusers", "simpletune, prompts new", "simpletune", "modulation plan", lossy, "half the steps",
              "diffusers, LoRA r16", "LoRA r16, fused"]  # fmt: skip
    monkeypatch.setattr(inference, "ROWS", {name: inference.ROWS[name] for name in wanted})
    with pytest.raises(UserError, match=f"none of the {len(wanted)} rows .*'nothing'"):
        inference.run(tmp_path, only="nothing")
    page = inference.run(tmp_path, price=[("spot", 0.36)], size=(32, 32), steps=2, rounds=1, device="cpu").read_text()
    rows = json.loads((tmp_path / "inference.json").read_text())["rows"]
    assert list(rows) == wanted
    for name in ("simpletune, prompts new", "modulation plan", "LoRA r16, fused"):
        assert float(rows[name]["differs"]) < 1e-5, name
    assert float(rows[lossy]["differs"]) > 1e-4
    for row in rows.values():
        assert row["seconds_per_picture"] == pytest.approx(row["encode"] + row["denoise"] + row["decode"])
        assert row["cost"]["spot"] == pytest.approx(0.0001 * row["seconds_per_picture"])
    assert rows["diffusers"]["faster"] > 0 and re.search(r"- spot: 0.36 per hour, as of 20\d\d-", page)
    assert "`python -m benchmarks inference --size 32x32 --steps 2 --rounds 1 --price spot=0.36`" in page


def test_speed_at_equal_steps_is_reported_apart_from_fewer_steps(tmp_path: Path) -> None:
    """4 s of diffusers, 2 s of ours, 0.8 s with half the steps: twice as fast, and 2.5 times by fewer steps."""
    results = Results(tmp_path / "inference", inference.COLUMNS)
    for name, seconds, beside in [("diffusers", 4.0, None), ("simpletune", 2.0, 4.0), ("half the steps", 0.8, 4.0)]:
        results.add(name, {"seconds_per_picture": seconds, "beside": beside, "lora": False})
    inference.finish(results, inference.own_prices([("mine", 3600.0)]))
    found = {name: (row["faster"], row["fewer_steps"], row["cost"]["mine"]) for name, row in results.rows.items()}
    assert found["diffusers"] == (1.0, None, 4.0) and found["simpletune"] == (2.0, None, 2.0)
    assert found["half the steps"] == pytest.approx((2.0, 2.5, 0.8))
    for name, way in inference.ROWS.items():
        if way.steps < 1:
            more = list(inference.ROWS).index(way.more_steps)
            assert more < list(inference.ROWS).index(name), "a row is compared with an earlier one"
            assert replace(way, steps=1.0, more_steps="") == inference.ROWS[way.more_steps]
        else:
            assert not way.more_steps


def test_the_users_own_prices_come_first(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    listed = {"per_hour": 0.7068, "as_of": "2026-04", "source": "GCP g2-standard-4", "currency": "USD"}
    file.write_text(json.dumps({"l4": listed, "mine": listed}))
    found = inference.merge_prices([("mine", 0.3), ("spot", 0.2)], file)
    assert list(found) == ["mine", "spot", "l4"] and found["mine"].per_hour == 0.3
    assert found["l4"].words == "0.7068 USD per hour, as of 2026-04, GCP g2-standard-4"
    # Of the Vertex report: seconds for 4 pictures and price per hour of T4, V100, A100; cost of a picture.
    for seconds, per_hour, cost in (
        (28.6, 0.4025, 0.00080), (8.8, 2.852, 0.00174), (4.2, 4.2245, 0.00123),
        (12.6, 0.4025, 0.00035), (4.1, 2.852, 0.00081), (1.7, 4.2245, 0.00050),
    ):  # fmt: skip
        assert prices.cost_of_image(seconds / 4, per_hour) == pytest.approx(cost, abs=5.1e-6)


def test_a_file_of_prices_needs_dates_and_sources(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    for text, message in (
        ('{"l4": {"per_hour": 0.7, "source": "GCP"}}', "l4.as_of: Field required. A price has per_hour, as_of"),
        ('{"l4": {"per_hour": 0.7, "as_of": "2026-04", "source": ""}}', "l4.source"),
        ('{"l4": {"per_hour": -1, "as_of": "2026-04", "source": "GCP"}}', "l4.per_hour"),
        ('{"l4": {"per_hour": 1, "as_of": "April", "source": "GCP"}}', "l4.as_of"),
        ('{"l4": 0.7}', "l4: "),
        ("{", "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            prices.read_prices(file)


def test_the_error_of_one_int8_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "LAYERS", {"small": (64, 48)})
    page = int8.run(tmp_path, 60, "small [64, 48], ", []).read_text()
    rows = json.loads((tmp_path / "int8.json").read_text())["rows"]
    normal, outliers, channels = (rows[f"small [64, 48], {kind}"] for kind in ("normal", "outliers", "channels"))
    assert max(normal["weights"], normal["activations"]) < normal["both"] < 1.5
    assert outliers["both"] > 1.4 * normal["both"] and channels["int8_gradient"] > 1.4 * normal["int8_gradient"]
    turned = rows["rotation: small [64, 48], outliers"]
    assert turned["both_rotated"] < turned["both"] and "## One product" in page and "## Rotation" in page


def test_errors_at_the_sizes_of_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are those of their layers; a rotation takes what large inputs add."""
    models = {family.family: family for family in FAMILIES}
    for title, layers in int8_rotation.OTHERS.items():
        family = models[{"SDXL": "sdxl", "klein 4B": "klein", "Z-Image": "zimage"}[title]]
        model = family.model_copy(update={"pretrained": next(iter(family.files.hub_names))})
        shapes = shapes_of_class(model.architecture.diffusers_class, model.files.known_config())
        assert {*layers.values()} <= {
            tuple(shape) for name, shape in shapes.items() if "blocks" in name or "layers" in name
        }
    monkeypatch.setattr(int8_rotation, "OTHERS", {"model": {"up": (96, 64)}})
    page = int8.run(tmp_path, 60, "model: up", []).read_text()
    rows = json.loads((tmp_path / "int8.json").read_text())["rows"]
    normal, outliers = (rows[f"model: up [96, 64], {kind}"] for kind in ("normal", "outliers"))
    assert 0.5 < normal["weights"] < normal["both"] < 1.5 and 0.5 < normal["gradient"] < 2
    assert outliers["both"] > 1.4 * normal["both"] > outliers["both_rotated"]
    assert outliers["gradient"] == normal["gradient"] != normal["gradient_rotated"]
    assert f"## {int8_rotation.OTHER_TABLE}" in page and "model: up [96, 64], outliers" in page


def test_a_run_in_int8_is_compared_with_that_of_its_seed_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and pictures; the sheet is drawn when a row is new."""
    made: list[tuple[str, int]] = []

    def trained(self: int8_quality.Runs, kind: str, seed: int) -> int8_quality.Trained:
        made.append((kind, seed))
        change = 0.0 if kind == int8_quality.PLAIN else 0.25
        shade = int(10 * seed + 20 * change)
        images = [Image.new("RGB", (32, 32), (shade,) * 3)] * (len(self.styled) + len(self.others))
        return int8_quality.Trained([1.0, 2.0 + seed + change], {"eval_loss_after": seed}, images)

    monkeypatch.setattr(int8_quality.Runs, "_trained", trained)
    monkeypatch.setattr(int8_quality, "accuracies", lambda images, prompts: {"style": 0.5, "prompt": len(images)})
    page = int8_quality.run(tmp_path, 3, 60, "seed", []).read_text()
    rows = json.loads((tmp_path / "int8_quality.json").read_text())["rows"]
    assert len(rows) == len(made) == 12  # each run once
    plain, int8_row = (rows[int8_quality.name_of(kind, 1)] for kind in list(int8_quality.KINDS)[:2])
    assert (plain["apart"], plain["pixels"], plain["last"]) == (0, 0, 2) and int8_row["prompt"] == 3
    assert int8_row["apart"] == 0.125 and int8_row["pixels"] == pytest.approx(5 / 255)
    assert plain["next"] == pytest.approx(10 / 255) and int8_row["next"] == pytest.approx(5 / 255)
    assert "| bf16 | 2.0000 (1.5000 to 2.5000) |" in page
    sheet = tmp_path / "int8_quality.png"
    sheet.unlink()
    assert int8_quality.run(tmp_path, 3, 60, "seed", []).read_text() == page and not sheet.exists()


def test_the_command_runs_the_grid_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    given = {"overrides": ["train.steps=2"], "rows": ["--rows", "base"], "prompts": ["--prompts", "7"],
             "model": ["--model", "some/model"], "price": ["--price", "spot=0.5"], "set": ["--set", "second"],
             "card": ["--card", "T4", "--card", "H100"], "predict": ["--predict"]}  # fmt: skip
    taken = {"overrides": "overrides=['train.steps=2']", "rows": "only='base'", "prompts": "count=7",
             "model": "model='some/model'", "price": "price=[('spot', 0.5)]", "set": "chosen='second'",
             "card": "cards=['T4', 'H100']", "predict": "again=True"}  # fmt: skip
    for grid, (_, takes) in benchmarks.GRIDS.items():
        module = importlib.import_module(f"benchmarks.{grid}")
        inspect.signature(module.run).bind(tmp_path, **vars_of(grid))
        told = lambda out, grid=grid, **more: f"{grid} {out} {', '.join(f'{k}={v!r}' for k, v in more.items())}"  # noqa: E731
        monkeypatch.setattr(module, "run", told)
        words = [word for name, portion in given.items() if name in takes for word in portion]
        words += [] if grid == "cards" else ["--minutes", "3"]  # it measures nothing
        assert benchmarks.main([benchmarks.name_of(grid), *words, "--out", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"{grid} {tmp_path} ") and ("minutes=3.0" in said) == (grid != "cards")
        assert {name for name, words in taken.items() if words in said} == set(takes) & set(taken), grid
    monkeypatch.setattr(measured_memory, "run", lambda out, **more: f"measured into {out}: {more}")
    assert benchmarks.main(["memory", "--measure-only", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"measured into {tmp_path}: {{'minutes': 8.0, 'only': ''}}\n"


def vars_of(grid: str) -> dict[str, object]:
    """What the command line passes to a grid's ``run``."""
    given = vars(benchmarks.parser().parse_args([benchmarks.name_of(grid)]))
    return {name: value for name, value in given.items() if name not in ("grid", "module", "out", "measure_only")}


def test_a_users_mistake_is_a_message_and_an_exit_code(tmp_path: Path, capsys) -> None:
    for grid, price, message in (
        ("memory", "spot=0.5", "unrecognized arguments: --price spot=0.5"),
        *(("inference", price, f"{price} is not NAME=PRICE") for price in ("spot=nan", "=1", "spot=cheap")),
    ):
        with pytest.raises(SystemExit):
            benchmarks.main([grid, "--price", price])
        assert message in capsys.readouterr().err
    assert benchmarks.main(["inference", "--rows", "nothing", "--out", str(tmp_path)]) == 2
    assert "error: --rows: none of the" in capsys.readouterr().err


def test_the_memory_grid_and_the_studys_peaks_are_predicted(
    tiny_config: dict, write_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tiny model, and in this process."""

    def instead(command: list[str], **more: object) -> subprocess.CompletedProcess:
        assert command[1:3] == ["-m", "benchmarks.memory_row"]
        row = memory_row.main(tuple(json.loads(command[3])), command[4:] == ["whole"])
        return subprocess.CompletedProcess(command, 0, f"a warning\n{json.dumps(row)}\n")

    tiny_config["data"]["resolution"] = 64
    monkeypatch.setattr(memory, "CONFIG", write_config(tiny_config))
    rows = {"rank 2": memory.Row((), 10), "rank 64": memory.Row(("adapter.rank=64",)),
            "job": memory.Row((), whole=True)}  # fmt: skip
    monkeypatch.setattr(memory, "ROWS", rows)
    monkeypatch.setattr(subprocess, "run", instead)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "rank 2" not in memory.run(tmp_path, 0).read_text()  # time is up at once
    page = memory.run(tmp_path, 5).read_text()
    found = json.loads((tmp_path / "memory.json").read_text())["rows"]
    assert found["rank 2"]["predicted_mib"] < found["rank 64"]["predicted_mib"] and found["rank 2"]["target_mib"] == 10
    assert found["job"]["predicted_mib"] == max(found["job"][stage] for stage in ("text", "latents", "train"))
    assert "## The whole job, by stage" in page
    row = student_study.predicted_row("LoRA r1, int8")
    assert (row["published_gb"], row["published_step"]) == (3.50, 1.35)
    assert 0 < row["predicted_gb"] < 0.1 and 0 < row["step"] < 1


def test_convolutions_are_measured_beside_frozen_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "RESNETS", {"small": (32, 8)})
    monkeypatch.setattr(convolutions, "ROUNDS", 2)
    page = convolutions.run(tmp_path, 60, "batch 1").read_text()
    rows = json.loads((tmp_path / "convolutions.json").read_text())["rows"]
    assert set(rows) == {"small, batch 1, fp32", "small, batch 1, bf16"}
    one = 32 * 8 * 8 * 4 / 2**20  # MiB of an activation in fp32
    row = rows["small, batch 1, fp32"]
    assert row["plain_mib"] - row["int8_mib"] == pytest.approx(2 * one) and row["int8_mib"] >= 4 * one
    assert 0 < row["error"] < rows["small, batch 1, bf16"]["error"] < 2 and row["ratio"] > 0
    assert "| small, batch 1, bf16 |" in page


def test_every_method_is_one_of_both_models(tmp_path: Path) -> None:
    bench = which_method.Bench(tmp_path, 1, [])
    for name, method in which_method.METHODS.items():
        tiny = resolve_folders(bench.config(method.for_tiny(), "x"))
        assert tiny.precision.weights == "fp32" and not tiny.tracking.tensorboard and tiny.checkpoint.every is None
        for config in (tiny, which_method.on_sd3_medium(method)):
            assert not list(config.adapter.problems(config.model.architecture.known_shapes())), name


def test_the_memory_of_lokr_s_step_is_lora_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two blocks of SD3 Medium's width, whose step is not timed."""
    folder = tmp_path / "wide"
    shutil.copytree(SHIPPED, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "transformer" / "config.json"
    wide = {"num_layers": 2, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 192}
    file.write_text(json.dumps(json.loads(file.read_text()) | wide))
    honest, small = methods.with_adapter, (f"model.pretrained={folder}", "model.t5_length=77")
    monkeypatch.setattr(methods, "with_adapter", lambda *given: honest(*given, *small))
    monkeypatch.setattr(methods, "stepper", lambda adapter: lambda: None)
    name, shipped = "lokr, factor 16, rank 16", next(iter(methods.SHIPPED))
    monkeypatch.setattr(methods, "SHIPPED", {shipped: methods.SHIPPED[shipped]})
    page = methods.run(tmp_path, 60, name).read_text()
    (row,) = json.loads((tmp_path / "methods.json").read_text())["rows"].values()
    assert 300 < row[shipped] < 600 and row[f"{shipped}_ratio"] <= 1 and f"| {name} |" in page
    assert row["least"] <= row["ratio"] <= row["most"]


def test_the_committed_steps_of_methods_meet_their_targets() -> None:
    """With checkpointing; the shipped 24 GB configuration has none, so that DoRA keeps each layer's output."""
    rows, shipped = committed("methods"), next(iter(methods.SHIPPED))
    assert set(rows) >= set(methods.METHODS)
    lokr, dora = rows["lokr, factor 16, rank 16"], rows["dora, rank 16"]
    assert lokr["parameters"] == 191 * (16 * 16 + 2 * 16 * 96) and lokr["ratio"] <= 1.15
    assert all(lokr[f"{each}_ratio"] <= 1.05 for each in methods.SHIPPED)
    assert dora["parameters"] == 191 * (2 * 16 * 1536 + 1536) and dora["ratio"] <= 1.15
    assert dora[f"{shipped}_ratio"] <= 1.05


def test_the_counts_of_the_vertex_report_are_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters by rank, to the last digit; the tensors of the published files, without their headers."""
    honest = vertex.file_bytes
    for rank, (trained, total, size) in vertex.COUNTS.items():
        monkeypatch.setattr(vertex, "file_bytes", honest if rank == 8 else lambda config: 0)
        row = vertex.counts(rank)
        assert (row["trained"], row["total"]) == (trained, total)
        tensors = row["tensor_bytes"]
        assert tensors == 4 * trained and round(tensors / 2**20, 2) == round(1.52 * rank / 4, 2)
        assert 0 < size - tensors / 2**20 < 0.06 and (rank != 8 or 0 < row["file_bytes"] - tensors < 0.06 * 2**20)


def test_the_largest_batch_is_the_last_that_fits() -> None:
    """Against trying every batch, for a job whose peak does not rise at first and then by the same for each sample."""
    tried: list[int] = []

    def job(batch: int) -> int:
        tried.append(batch)
        return max(300, 100 + 37 * batch) * 2**20

    for room in (800, 4000, 100_000):
        card = Card("a card", room / 1024, (8, 9), found=1.0)
        expected = max((batch for batch in range(1, 4000) if needed_bytes(job(batch)) <= card.bytes), default=0)
        tried.clear()
        assert vertex.largest_batch(job, card) == expected and len(tried) <= 30


def test_a_choice_is_by_the_lowest_part_and_its_rise_by_noise(tmp_path: Path) -> None:
    metrics = [{"step": step, "loss": loss} for step, loss in enumerate([5.0, 1.0, 2.0, 2.0, 1.0, 9.0], 1)]
    assert choice.by_training_loss(metrics, [2, 4, 6]) == 4
    draws = [["picture", "caption", level] for level in (0.9, 0.1, 0.5, 0.3)]
    write_safetensors({"a": torch.zeros(1)}, tmp_path / DRIFT, {"of": json.dumps({"training": draws})})
    rows = [{"step": step, "held_out": True, "eval_loss": 5.0, "eval_losses": [2.0 + step, 8.0 - step, 4.0, 6.0]}
            for step in (0, 1, 2)]  # fmt: skip
    (tmp_path / EVALUATIONS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = choice.losses_by_noise(tmp_path, [1, 2])
    assert found["levels"] == [[0.1, 0.1], [0.3, 0.3], [0.5, 0.5], [0.9, 0.9]]
    assert found["by_step"] == {"0": [8.0, 6.0, 4.0, 2.0], "1": [7.0, 6.0, 4.0, 3.0], "2": [6.0, 6.0, 4.0, 4.0]}
    assert choice.rises({"losses": found, "held_out_step": 1}) == {"low_noise": -1.0, "high_noise": 1.0}
