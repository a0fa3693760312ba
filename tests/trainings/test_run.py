"""What a run leaves, says, refuses and survives."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from tiny_runs import TrainOnce, merged, run_with, saved_weights

from simpletune.config.load import validate
from simpletune.runs import checkpoint
from simpletune.runs.best_checkpoint import step_to_keep
from simpletune.runs.checkpoint_folders import require_resumable
from simpletune.runs.folder import (
    RunFile,
    append_metrics,
    clear_unsaved,
    newest_run,
    open_again,
    read_metrics,
    read_rows,
)
from simpletune.runs.resume import kept_settings
from simpletune.stages.png import generation_parameters
from simpletune.stages.step.train_step import TrainStep
from simpletune.system import stage_timer as stages
from simpletune.system.atomic import quarantine
from simpletune.system.checksums import CHUNK, sha256_of
from simpletune.system.console import verbose
from simpletune.system.options import UserError

SUMMARY_FIELDS = {
    "name", "device", "steps", "seconds_total", "seconds_setup", "seconds_to_first_step", "seconds_per_step",
    "samples_per_second", "peak_allocated_gib", "peak_reserved_gib", "peak_rss_gib", "stages", "trainable_parameters",
    "total_parameters", "first_loss", "final_loss", "output", "eval_loss_before", "eval_loss_after",
}  # fmt: skip


@pytest.fixture
def full_run(tiny_config: dict, train_once: TrainOnce) -> Path:
    """A run with everything on: two prompts, traces, checkpoints; trained once for all tests."""
    return train_once(
        tiny_config
        | {
            "train": {"steps": 6, "batch_size": 2},
            "checkpoint": {"every": 2, "keep_last": 2},
            "validation": {"prompts": ["a red disc", "a blue square"], "every": 3, "steps": 2, "loss_samples": 6},
            "profile": {"max_traces": 5},
        }
    )


def profiles_of(run: Path) -> Path:
    return run.parents[1] / "profiles" / run.name


def test_leaves_what_the_design_says(full_run: Path) -> None:
    summary = json.loads((full_run / "summary.json").read_text())
    assert set(summary) >= SUMMARY_FIELDS
    assert {"text", "latents", "load", "train", "validate", "save"} == set(summary["stages"])
    assert summary["peak_allocated_gib"] is None and summary["peak_rss_gib"] > 0
    assert summary["trainable_parameters"] == sum(tensor.numel() for tensor in saved_weights(full_run, 6).values())
    assert json.loads((full_run / "config.json").read_text())["train"]["clip_norm"] == 1.0
    metrics = read_metrics(full_run)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(set(row) == {"step", "epoch", "loss", "lr", "seconds", "grad_norm"} for row in metrics)
    assert [row["epoch"] for row in metrics] == [0, 0, 0, 1, 1, 1]
    assert sorted(f.name for f in (full_run / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    assert Path(summary["output"]) == full_run / "pytorch_lora_weights.safetensors"
    with safe_open(summary["output"], "pt") as handle:
        assert json.loads(handle.metadata()["simpletune_config"])["name"] == "tiny"
        assert "lora_adapter_metadata" not in handle.metadata()


def test_pictures_are_of_base_and_tuned_from_the_same_noise(full_run: Path) -> None:
    samples = full_run / "samples"
    assert sorted(f.name for f in samples.iterdir()) == ["base", "grid.png", "step-000003", "step-000006"]
    files = [samples / state / "prompt-01.png" for state in ("base", "step-000006")]
    (before, after), (base, tuned) = map(generation_parameters, files), map(Image.open, files)
    assert before["prompt"] == after["prompt"] == "a blue square" and before["seed"] == after["seed"] == 1
    assert before["weights"] == "base" and after["weights"] == "step 6"
    assert base.size == tuned.size == (32, 32)
    assert list(base.getdata()) != list(tuned.getdata())
    grid = Image.open(samples / "grid.png")
    assert grid.width > 3 * 160 and grid.height > 2 * 160


def test_tensorboard_reads_scalars_and_pictures(full_run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(profiles_of(full_run)))
    events.Reload()
    assert {"loss", "lr", "grad_norm", "seconds", "training_loss_fixed_noise"} <= set(events.Tags()["scalars"])
    assert events.Tags()["images"] == ["samples"]
    losses = [row["loss"] for row in read_metrics(full_run)]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses)


def test_one_trace_an_epoch(full_run: Path) -> None:
    traces = sorted(profiles_of(full_run).glob("epoch-*/*.pt.trace.json.gz"))
    assert [trace.parent.name for trace in traces] == ["epoch-000", "epoch-001"]
    names = {event.get("name") for event in json.loads(gzip.open(traces[0]).read())["traceEvents"]}
    assert {"## data ##", "## forward ##", "## backward ##", "## clip ##", "## optimizer ##"} <= names


def test_an_older_run_of_the_name_is_moved_aside(tiny_config: dict, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_with(tiny_config, train={"steps": 1})
    second = run_with(tiny_config, train={"steps": 2})
    assert first == second
    assert json.loads((second / "summary.json").read_text())["steps"] == 2
    assert json.loads((second.with_name("tiny.1") / "summary.json").read_text())["steps"] == 1
    assert "moved the older run" in capsys.readouterr().out
    assert newest_run(second.parent) == second


def test_resume_is_exact_with_accumulation_dropout_and_schedule(
    tiny_config: dict, tiny_images: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_images, tmp_path / "weighted")
    for text in folder.glob("*.txt"):
        text.write_text(f"3::{text.read_text()}\na picture, small, plain")
    changes: dict = {
        "adapter": {"dropout": 0.3}, "schedule": {"name": "cosine", "warmup_steps": 2},
        "data": {"path": str(folder), "caption_dropout": 0.5, "flip": True, "crop": "random", "variants": 2,
                 "repeats": 2, "brightness": 0.2, "hue": 20, "rotation": 9,
                 "caption_lines": "several", "shuffle_tags": True},
        "memory": {"checkpointing": "all"}, "checkpoint": {"every": 3},
        "train": {"steps": 6, "batch_size": 2, "gradient_accumulation": 2},
    }  # fmt: skip
    whole = run_with(tiny_config, name="whole", **changes)
    stopped = shutil.copytree(whole, whole.with_name("again"))
    shutil.rmtree(stopped / "checkpoints" / "step-000006")
    run_with(tiny_config, "latest", name="again", **changes)
    losses = [[row["loss"] for row in read_metrics(run)] for run in (whole, stopped)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    torch.testing.assert_close(saved_weights(stopped, 6), saved_weights(whole, 6), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": {"rank": 3}}, "made with other settings:\n  adapter.rank: 2 -> 3"),
        ({"train": {"seed": 5, "steps": 4}}, "train.seed: 0 -> 5"),
        ({"data": {"prompt": "other"}}, "the data has changed since the checkpoint:\n  000.png: changed caption"),
        ({"train": {"steps": 2}}, "the checkpoint has 2 steps and the configuration asks for 2. Increase train.steps"),
    ],
)
def test_resume_refuses_what_may_not_change(
    tiny_config: dict, changes: dict, message: str, copy_run: TrainOnce
) -> None:
    copy_run(tiny_config | {"train": {"steps": 2}})
    with pytest.raises(UserError, match=message):
        run_with(tiny_config, "latest", **{"train": {"steps": 4}} | changes)


def test_resume_says_what_changed_and_may(tiny_config: dict, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(tiny_config, train={"steps": 2})
    run_with(tiny_config, "latest", train={"steps": 3}, optimizer={"lr": 0.5})
    shown = capsys.readouterr().out
    assert "resume  changed train.steps: 2 -> 3" in shown and "resume  changed optimizer.lr: 0.01 -> 0.5" in shown


def test_resume_says_what_stays_although_it_was_changed(
    tiny_config: dict, copy_run: TrainOnce, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the evaluation has as many samples as it says; with 0, there is none."""
    monkeypatch.setenv("SIMPLETUNE_AUTO_THREADS", "1")
    data = merged(tiny_config, validation={"loss_samples": 2}, speed={"threads": 1})
    run = copy_run(data | {"train": {"steps": 2}})
    changes = {"validation": {"loss_samples": 5, "every": 3}, "speed": {"threads": "auto"}}
    with verbose():
        run_with(data, "latest", train={"steps": 4}, **changes)
    shown = capsys.readouterr().out
    assert (
        "resume  validation.loss_samples stays 2, because evaluations are compared sample by sample (2 -> 5)" in shown
    )
    assert 'resume  speed.threads stays 1, because another number changes rounding (1 -> "auto")' in shown
    assert "resume  changed validation.every: null -> 3" in shown and "evaluate 2 samples" in shown
    assert [len(row["eval_losses"]) for row in read_rows(run / "evaluations.jsonl")] == [2] * 4  # 0, 2, 3, 4
    with verbose():
        run_with(data, "latest", train={"steps": 5}, validation={"loss_samples": 0})
    shown = capsys.readouterr().out
    assert "resume  changed validation.loss_samples: 5 -> 0" in shown and "evaluate " not in shown
    assert [row["step"] for row in read_rows(run / "evaluations.jsonl")] == [0, 2, 3, 4]


def test_what_a_resumed_run_keeps(tiny_config: dict) -> None:
    def kept(**changes: object) -> dict[str, str]:
        config = validate(merged(tiny_config, **changes), "kept")
        return kept_settings(config, 4, {"threads": 3, "modulation": "plan"}, 3)

    budget = {"budget_gib": 8.0}
    for samples, stays in {4: False, 0: False, 5: True, "auto": True}.items():
        assert ("validation.loss_samples" in kept(validation={"loss_samples": samples})) == stays, samples
    assert "speed.threads" in kept() and "speed.threads" not in kept(speed={"threads": 2})
    assert kept(memory={"modulation": "auto"})["memory.modulation"] == "plan, as before"
    assert "memory.modulation" not in kept(memory={"modulation": "resident"})
    assert "memory.budget_gib" not in kept(memory={"checkpointing": "auto", **budget})
    batch = {"batch_size": 2, "global_batch": 4}
    assert "memory.budget_gib" in kept(memory={"checkpointing": "none", **budget}, train=batch)
    assert "price is that of the first start" in kept()["output.prices"]


def test_full_fine_tuning_says_that_other_prompts_end_its_drift(
    tiny_config: dict, copy_run: TrainOnce, capsys: pytest.CaptureFixture[str]
) -> None:
    data = merged(tiny_config, validation={"loss_samples": 1}) | {"adapter": {"method": "full"}, "train": {"steps": 1}}
    run = copy_run(data)
    run_with(data, "latest", train={"steps": 2}, validation={"unrelated_prompts": ["other"]})
    assert '["other"]. Drift is no longer measured: the base has trained since' in capsys.readouterr().out
    assert "drift" in read_rows_list(run)[1] and "drift" not in read_rows_list(run)[2]


def read_rows_list(run: Path) -> list[dict]:
    return list(read_rows(run / "evaluations.jsonl"))


def test_a_damaged_checkpoint_is_named(tiny_config: dict) -> None:
    run = run_with(tiny_config, train={"steps": 1})
    file = run / "checkpoints" / "step-000001" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match="optimizer.safetensors is damaged. Use an older checkpoint"):
        run_with(tiny_config, str(file.parent), train={"steps": 2})


def test_damage_anywhere_in_a_large_file_changes_its_checksum(tmp_path: Path) -> None:
    file, content = tmp_path / "weights", bytearray(3 * CHUNK)
    file.write_bytes(content)
    assert sha256_of(file) == hashlib.sha256(content).hexdigest()
    sums = set()
    for place in (0, CHUNK, len(content) - 1):
        damaged = content.copy()
        damaged[place] ^= 1
        file.write_bytes(damaged)
        sums.add(sha256_of(file))
    assert len(sums | {hashlib.sha256(content).hexdigest()}) == 4


def test_resume_without_a_checkpoint(tiny_config: dict) -> None:
    with pytest.raises(UserError, match="has no checkpoint. Start without --resume"):
        run_with(tiny_config, "latest")
    folder = Path(tiny_config["output"]["runs"]) / tiny_config["name"] / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=rf"lastest does not exist. Did you mean latest\? The run has {folder}"):
        require_resumable(validate(tiny_config, "test"), "lastest")


def test_a_loss_that_is_not_finite_stops_the_run(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TrainStep.loss
    calls = []

    def poisoned(self, model, batch):
        calls.append(batch.names)
        return honest(self, model, batch) * (math.nan if len(calls) == 3 else 1)

    monkeypatch.setattr(TrainStep, "loss", poisoned)
    message = r"step 3: the loss is nan. Samples: 00\d.png. .*last checkpoint is .*step-000002"
    with pytest.raises(UserError, match=message) as caught:
        run_with(tiny_config, checkpoint={"every": 2})
    assert caught.value.code == 4 and calls[2][0] in str(caught.value)


def test_the_loss_falls(tiny_config: dict) -> None:
    run = run_with(tiny_config, train={"steps": 24, "batch_size": 2}, validation={"loss_samples": 12})
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    assert summary["final_loss"] < summary["first_loss"]


def test_no_silent_cpu(tiny_config: dict) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UserError, match="no NVIDIA GPU was found.*set device=cpu"):
        run_with(tiny_config, device="auto")


def test_going_on_with_a_run_that_is_gone_or_left_things_lying(tiny_config: dict) -> None:
    config = validate(tiny_config, "test")
    with pytest.raises(UserError, match="--resume: .*tiny does not exist. Check name"):
        open_again(config, 2, step_to_keep)
    run = Path(tiny_config["output"]["runs"]) / "tiny"
    for step in (1, 2):
        (run / "samples" / f"step-{step:06d}").mkdir(parents=True)
        append_metrics(run, {"step": step, "loss": 0.5})
    (run / ".metrics.jsonl.part").write_text("half")
    open_again(config, 1, step_to_keep)
    assert [entry.name for entry in (run / "samples").glob("step-*")] == ["step-000001"]
    assert not list(run.glob(".*.part")) and [row["step"] for row in read_metrics(run)] == [1]


UNSAVED = {
    "base_predictions.safetensors", "chosen.json", "config.json", "control.json", "control_answers.jsonl", "data.json",
    "drawn", "environment.json", "eval_before.json", "evaluations.jsonl", "metrics.jsonl", "overflows.jsonl",
    "parent.json", "planned.json", "predicted.json", "remote.json", "samples", "skipped.jsonl", "stack.json",
    "wandb",
}  # fmt: skip


def test_what_was_written_before_the_first_checkpoint_is_cleared_and_nothing_else(
    tiny_config: dict, tmp_path: Path
) -> None:
    kept = set()
    for name in RunFile.known:
        config = validate(tiny_config | {"output": {"runs": str(tmp_path / name)}}, "test")
        entry = tmp_path / name / config.name / name
        entry.parent.mkdir(parents=True)
        entry.mkdir() if name == "checkpoints" else entry.touch()
        clear_unsaved(config)
        kept |= {name} if entry.exists() else set()
    assert kept == {*RunFile.known} - UNSAVED - {"checkpoints"}


def test_a_folder_in_the_place_of_a_file_is_set_aside(tiny_config: dict, tmp_path: Path) -> None:
    config = validate(tiny_config | {"output": {"runs": str(tmp_path)}}, "test")
    places = [tmp_path / config.name / name for name in RunFile.known]
    for place in places:
        place.mkdir(parents=True)
    open_again(config, 0, lambda folder: None)
    folders = {"checkpoints", "control.json", "drawn", "evaluation.json", "remote.json", "samples", "wandb"}
    # control, scores and link are read by others, who say what is wrong
    assert {place.name for place in places if place.is_dir()} == folders


def test_a_run_that_was_killed_before_it_removed_the_oldest_checkpoint_does_so_when_it_goes_on(
    tiny_config: dict,
) -> None:
    config = validate(tiny_config | {"checkpoint": {"keep_last": 2}}, "test")
    run = Path(tiny_config["output"]["runs"]) / "tiny"
    for step in (1, 2, 3, 4):
        checkpoint.checkpoint_folder(run, step).mkdir(parents=True)
        (checkpoint.checkpoint_folder(run, step) / checkpoint.STATE).write_text("{}")
    append_metrics(run, {"step": 1, "loss": 0.5})
    open_again(config, 3, step_to_keep)
    assert [step for step, _ in checkpoint.list_checkpoints(run)] == [2, 3]
    assert (run / "checkpoints" / "step-000004.superseded").is_dir()


def test_a_broken_line_amid_the_metrics_is_no_half_written_last_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste')
    assert read_metrics(tmp_path) == [{"step": 1}]
    (tmp_path / "metrics.jsonl").write_text('{"ste\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 1 is damaged"):
        read_metrics(tmp_path)


def test_peak_memory_where_the_kernel_does_not_tell_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    told, large = stages.peak_rss_gib(), bytearray(2**20)
    monkeypatch.setattr(Path, "read_text", lambda file, **_: "VmRSS: 1 kB")
    assert 0.9 * told < stages.peak_rss_gib() < 100 * told and large


def test_an_older_copy_of_what_is_damaged_makes_room(tmp_path: Path) -> None:
    for text in ("first", "second"):
        (tmp_path / "base").mkdir()
        (tmp_path / "base" / "file").write_text(text)
        aside = quarantine(tmp_path / "base")
    assert (aside / "file").read_text() == "second" and list(tmp_path.iterdir()) == [aside]
