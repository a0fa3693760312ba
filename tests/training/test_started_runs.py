"""``adapter.start``: runs that begin with a LoRA, under every precision and lever, resumed, and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launcher
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_runs import TrainOnce, merged, run_with, saved_weights
from two_processes import run_of, together

from simpletune.adapters.methods.adapter import OUTPUT
from simpletune.apps.cli.main import main
from simpletune.apps.web.run.matrix import matrix_of
from simpletune.apps.web.run.progress import evaluation_lines
from simpletune.config.load import validate
from simpletune.config.validation_schedule import TRAINED, drift_group, drift_words, loss_words
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_rows
from simpletune.runs.model_card import CARD
from simpletune.system.checksums import sha256_of
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import read_header
from simpletune.training.prepare import prepare_only

TEXT = {
    f"lora_te1_text_model_encoder_layers_0_self_attn_q_proj.{part}.weight": torch.ones(2, 2)
    for part in ("lora_down", "lora_up")
}
FROZEN = {"lr": 1e-30}  # changes no bit, so a run's result is what it started from


@pytest.fixture
def parent(tiny_config: dict, copy_run: TrainOnce) -> Path:
    return copy_run(tiny_config | {"name": "parent", "checkpoint": {"every": 2}})


def start_at(parent: object, **more: object) -> dict[str, Any]:
    return {"method": "lora", "rank": 2, "start": str(parent), **more}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": {"weights": "int8"}},
        {"precision": {"weights": "nf4"}, "train": {"reduce": "exact"}},
        {"precision": {"weights": "fp32", "compute": "fp16"}, "ema": {"decay": 0.5}},
        {"optimizer": {"name": "adamw_schedule_free"}},
        {"memory": {"checkpointing": "all", "resident_blocks": 0}, "precision": {"weights": "bf16"}},
    ],
    ids=str,
)
def test_a_run_begins_with_its_parent(changes: dict, tiny_config: dict, parent: Path) -> None:
    tiny_config["train"]["steps"], optimizer = 1, {**changes.pop("optimizer", {}), **FROZEN}
    child = run_with(tiny_config, name="child", adapter=start_at(parent), optimizer=optimizer, **changes)
    torch.testing.assert_close(load_file(child / OUTPUT), load_file(parent / OUTPUT), rtol=0, atol=0)


def test_a_resumed_run_needs_no_parent(tiny_config: dict, parent: Path) -> None:
    changes = {"name": "child", "adapter": start_at(f"{parent}@2"), "checkpoint": {"every": 2}}
    run = run_with(tiny_config, **changes)
    whole, fresh = saved_weights(run, 4), saved_weights(parent, 4)  # the parent began as a run without one does
    assert any(not torch.equal(tensor, fresh[name]) for name, tensor in whole.items())
    shutil.rmtree(checkpoint.checkpoint_folder(run, 4))
    shutil.rmtree(parent)
    assert run_with(tiny_config, "latest", **changes) == run
    torch.testing.assert_close(saved_weights(run, 4), whole, rtol=0, atol=0)
    with pytest.raises(UserError, match="adapter.start: .* does not exist"):
        run_with(tiny_config, **changes)


@pytest.mark.slow
def test_every_process_begins_with_it(tiny_config: dict, parent: Path, launcher: Launcher) -> None:
    data = merged(tiny_config, optimizer=FROZEN, train={"steps": 1, "gradient_accumulation": 2})
    data |= {"name": "child", "adapter": start_at(parent)}
    together(launcher, data)
    torch.testing.assert_close(load_file(run_of(data) / OUTPUT), load_file(parent / OUTPUT), rtol=0, atol=0)


def test_the_run_names_its_parent(tiny_config: dict, parent: Path) -> None:
    changes = {"name": "child", "train": {"steps": 1}, "output": {"report": True}}
    run = run_with(merged(tiny_config, **changes), adapter=start_at(f"{parent}@2:0.5"))
    file = checkpoint.checkpoint_folder(parent, 2) / OUTPUT
    about = {"name": "parent@2", "sha256": sha256_of(file), "steps": 2, "scale": 0.5}
    assert json.loads((run / "parent.json").read_text()) == about
    assert json.loads((run / "summary.json").read_text())["parent"] == about
    for place in (run, checkpoint.checkpoint_folder(run, 1)):
        assert json.loads(read_header(place / OUTPUT)["__metadata__"]["simpletune_parent"]) == about
    words = f"2 steps, strength 0.5, SHA-256 {about['sha256'][:16]}"
    card, report = (run / CARD).read_text(), (run / "report.md").read_text()
    assert f"| started from | `parent@2`, {words} |" in card and words in report and "parent@2" in report
    told = read_header(run / OUTPUT)["__metadata__"]["simpletune_config"] + card  # both are shared
    assert str(parent.parent) not in told and '"start":"parent@2:0.5"' in told
    assert "simpletune_parent" not in read_header(parent / OUTPUT)["__metadata__"]


def test_base_start_and_result_are_told_apart(
    tiny_config: dict, copy_run: TrainOnce, capsys: pytest.CaptureFixture[str]
) -> None:
    """By losses, drift and pictures: the start's are those of its parent's result, as a frozen child's own."""
    validation = {"prompts": ["a red disc"], "steps": 2, "loss_samples": 2}
    option = {"validation": validation, "output": {"report": True}, "checkpoint": {"every": 1, "keep_last": "all"}}
    parent = copy_run(merged(tiny_config, name="parent", optimizer={"lr": 0.05}, train={"steps": 2}, **option))
    capsys.readouterr()
    data = merged(tiny_config, name="child", optimizer=FROZEN, train={"steps": 2}, **option)
    child = run_with(data, adapter=start_at(parent))
    shown, summary = capsys.readouterr().out, json.loads((child / "summary.json").read_text())
    (base, *_, last), rows = (list(read_rows(run / "evaluations.jsonl")) for run in (parent, child))
    assert [(row["step"], row.get("start")) for row in rows] == [(0, None), (0, True), (1, None), (2, None)]
    assert rows[0] == base and abs(last["eval_loss"] - base["eval_loss"]) > 1e-3
    for row in rows[1:]:
        assert row["eval_losses"] == pytest.approx(last["eval_losses"], rel=1e-5)
        assert row["drift"] == pytest.approx(last["drift"], rel=1e-4) and min(row["drift"].values()) > 1e-4
    told = [summary[f"eval_loss_{name}"] for name in ("before", "start", "after")]
    assert told == [rows[0]["eval_loss"], rows[1]["eval_loss"], rows[3]["eval_loss"]]
    words = "{:.4f} for the base, {:.4f} at the start, {:.4f} after".format(*told)
    card, report = (child / CARD).read_text(), (child / "report.md").read_text()
    assert words in shown and words in card and summary["drift_start"] == rows[1]["drift"]
    drifted = f"{100 * rows[1]['drift'][TRAINED]:.3g}% for"
    assert f"drift from the base: {drifted}" in shown and "at the start; " in shown and "at the start; " in card
    assert f"| the start | {told[1]:.4f} |" in report and f"| the base | {told[0]:.4f} |" in report

    states = ("base", "start", "step-000002")
    images = {state: Image.open(child / f"samples/{state}/prompt-00.png") for state in states}
    of_parent = Image.open(parent / "samples/step-000002/prompt-00.png")
    assert images["start"].tobytes() == of_parent.tobytes() == images["step-000002"].tobytes()
    assert images["base"].tobytes() != of_parent.tobytes() and images["start"].info["weights"] == "start"
    assert Image.open(child / "samples/grid.png").width == 8 + 3 * 168
    assert matrix_of(child).titles == ["base", "start", "step 2"]
    assert 'data-step="start"' in (child / "report.html").read_text()
    assert [point[0] for point in evaluation_lines(child)[0].dots] == [0, 1, 2]

    shutil.rmtree(checkpoint.checkpoint_folder(child, 2))
    assert run_with(data, "latest", adapter=start_at(parent)) == child and "damaged" not in capsys.readouterr().out
    assert list(read_rows(child / "evaluations.jsonl")) == rows


def test_a_folder_without_a_row_of_the_start_is_read_as_before() -> None:
    summary = {"eval_loss_before": 0.3647, "eval_loss_after": 0.1348, "drift_after": {TRAINED: 0.5}}
    assert loss_words(summary) == "0.3647 before, 0.1348 after"
    assert drift_words(summary) == f"50% for {drift_group(TRAINED)}"
    assert loss_words(summary | {"on_top_of": [{}]}) == "0.3647 before (the base with its LoRAs), 0.1348 after"
    assert loss_words(summary | {"eval_loss_start": 0.1457}) == "0.3647 for the base, 0.1457 at the start, 0.1348 after"
    assert loss_words({}) is None and drift_words({}) is None


def test_files_that_are_refused_before_any_work(tiny_config: dict, parent: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("simpletune.training.set_up.encode", None)  # comes later
    tensors = load_file(parent / OUTPUT)

    def saved(name: str, changed: dict[str, torch.Tensor]) -> Path:
        save_file(changed, file := tmp_path / f"{name}.safetensors")
        return file

    damaged = {**tensors, (key := next(iter(tensors))): torch.full_like(tensors[key], float("nan"))}
    cases = {
        saved("nan", damaged): "adapter.start: .* contains NaN or infinite values",
        saved("odd", {"a.b": torch.ones(2)}): r"adapter.start: .* is an unknown kind of file \(it contains a.b\)",
        saved("text", TEXT): "adapter.start: .*text.safetensors updates only .*CLIP-L.*. Give a LoRA of the denoiser",
        tmp_path / "none": "adapter.start: .*none does not exist. Give a LoRA file",
        f"{parent}@3": "has no checkpoint of step 3. Use one of 2, 4",
        f"{parent}:0": "adapter.start: .*parent: the strength 0 must be above 0",
        f"{tmp_path}/runs/tiny": "adapter.start: .* lies in .*tiny, which a new run of this name moves aside",
        tiny_config["model"]["pretrained"]: "adapter.start: .* is a full model, not a LoRA",
    }
    shutil.copytree(parent, tmp_path / "runs/tiny")
    for named, message in cases.items():
        with pytest.raises(UserError, match=message):
            run_with(tiny_config, adapter=start_at(named))


def test_text_encoders_are_left_out_with_a_line(tiny_config: dict, parent: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "both.safetensors"
    assert main(["export", str(parent), "--format", "kohya", "--out", str(file)]) == 0
    save_file({**load_file(file), **TEXT}, file)
    changes = merged(tiny_config, optimizer=FROZEN, train={"steps": 1})
    child = run_with(changes, name="child", adapter=start_at(file))
    assert "start   leaves out 1 layer of CLIP-L in " in (said := capsys.readouterr().out)
    assert f"start   from {file.name}: 7 layers\n" in said
    torch.testing.assert_close(load_file(child / OUTPUT), load_file(parent / OUTPUT), rtol=0, atol=0)


def test_what_only_plans_does_not_read_it(tiny_config: dict, write_config) -> None:
    data = merged(tiny_config, adapter=start_at("nothing"))
    prepare_only(validate(data, "test"))
    assert main(["check", str(write_config(data))]) == 0
