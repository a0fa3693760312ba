"""Evaluations of a run, and the checkpoint chosen by them."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from recorded_runs import ScoredRow, scored
from safetensors.torch import load_file, save_file
from tiny_runs import TrainOnce

from simpletune.apps.cli.main import main
from simpletune.config.load import ConfigError, validate
from simpletune.config.validation_schedule import LEAST, MOST, choose_validation_samples
from simpletune.runs import best_checkpoint
from simpletune.runs.best_checkpoint import (
    FIDELITY,
    HELD_OUT,
    LAST,
    USER,
    choose_best,
    evaluations_since_best,
    is_lower,
    paired_difference,
    put_choice,
    step_to_keep,
)
from simpletune.runs.checkpoint_folders import checkpoint_folder, list_checkpoints
from simpletune.runs.folder import DRIFT, read_rows
from simpletune.runs.report.evaluations import choice_sections, fidelity_sections
from simpletune.runs.report.run_data import RunData
from simpletune.runs.weights_names import find_named
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import WeightReader
from simpletune.training.train import train
from simpletune.training.validation_loss import LossEvaluator, ValidationFigures


def run_of(folder: Path, losses: dict[int, list[float]], saved: list[int] | None = None, held_out: bool = True) -> Path:
    """A run's folder with evaluations and checkpoints."""
    rows = [
        {"step": step, "eval_loss": sum(each) / len(each), "eval_losses": each, "held_out": held_out}
        for step, each in losses.items()
    ]  # fmt: skip
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in losses if saved is None else saved:
        if step:
            (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    return folder


def test_lower_means_lower_by_more_than_the_paired_error() -> None:
    assert paired_difference([1.0, 2.0], [2.0, 4.0]) == (-1.5, 0.5)
    assert is_lower([1.0, 2.0], [2.0, 4.0])
    assert not is_lower([1.0, 5.0], [2.0, 4.5])  # -0.25 with an error of 0.75
    assert is_lower([1.0], [1.5]) and not is_lower([1.0], [1.0])


def test_the_last_is_taken_and_the_lowest_loss_is_told(tmp_path: Path) -> None:
    """The first of equals is the lowest."""
    losses = {0: [3.0, 5.0, 4.0], 100: [2.0, 4.0, 3.1], 200: [1.9, 4.1, 3.1], 300: [2.5, 4.6, 3.5]}
    run = run_of(tmp_path, losses)
    found = choose_best(run)
    assert found is not None and (found.step, found.by, step_to_keep(run)) == (300, LAST, 100)
    for words in (
        "a loss of 3.5333 on 3 held-out samples, -0.4667 ± 0.0333 against the base",
        "lowest at step 100, -0.5",
    ):
        assert words in found.why, found.why
    assert found.describe("runs/a").startswith("runs/a@300, the last: a loss of")
    (run / "checkpoints/step-000100").rmdir()  # by hand
    found = choose_best(run)
    assert found is not None and found.step == 300 and "lowest at step 200" in found.why
    (tmp_path / "later").mkdir()
    found = choose_best(run_of(tmp_path / "later", {0: [3.0, 5.0], 100: [2.0, 4.0], 200: [1.0, 3.1]}))
    assert found is not None and found.step == 200 and found.why.endswith("it is the lowest")


def test_a_last_one_that_is_worse_than_the_base_is_no_choice(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: [3.0, 5.0], 100: [2.0, 4.0], 200: [2.9, 4.9], 300: [3.2, 5.4]})
    found = choose_best(run)
    assert found is not None and (found.step, found.by) == (100, HELD_OUT)
    assert "the last, step 300, is worse than the base: +0.3000 ± 0.1000 against the base" in found.why
    (tmp_path / "equal").mkdir()
    found = choose_best(run_of(tmp_path / "equal", {0: [3.0, 5.0], 100: [2.0, 4.0], 200: [3.4, 4.8]}))  # +0.1 ± 0.3
    assert found is not None and (found.step, found.by) == (200, LAST)
    (tmp_path / "alone").mkdir()
    found = choose_best(run_of(tmp_path / "alone", {0: [3.0, 5.0], 100: [4.0, 6.0]}))  # there is no other
    assert found is not None and (found.step, found.by) == (100, LAST) and "+1.0000 ± 0.0000" in found.why
    (tmp_path / "ruined").mkdir()
    found = choose_best(run_of(tmp_path / "ruined", {0: [3.0, 5.0], 100: [4.0, 6.0], 200: [9.0, 9.0]}))
    assert found is not None and (found.step, found.by) == (200, LAST)
    assert "every checkpoint is worse than it; lowest at step 100" in found.why


def test_steps_that_were_not_saved_and_the_base_are_no_choice(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: [0.1, 0.2], 50: [0.2, 0.3], 100: [1.0, 2.0], 150: [0.4, 0.5]}, saved=[100])
    found = choose_best(run)
    assert found is not None and (found.step, step_to_keep(run)) == (100, 100) and "150" not in found.why
    assert evaluations_since_best(run) == 3  # the base is the best, of saved steps or not


def test_a_last_one_that_was_not_evaluated_is_taken(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: [3.0, 5.0], 100: [2.0, 4.0]}, saved=[100, 200])
    found = choose_best(run)
    assert found is not None and (found.step, found.by) == (200, LAST) and "lowest at step 100" in found.why


def test_without_held_out_pictures_the_last_is_taken_and_that_is_said(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: [3.0, 5.0], 100: [1.0, 2.0], 200: [2.0, 3.0]}, held_out=False)
    found = choose_best(run)
    assert found is not None and (found.step, found.by) == (200, LAST) and "validation.split" in found.why
    assert choose_best(tmp_path / "nothing") is None


def test_the_user_s_choice_comes_first(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: [3.0, 5.0], 100: [1.0, 2.0], 200: [2.0, 3.0], 300: [2.0, 3.0]})
    put_choice(run, 200)
    found = choose_best(run)
    assert found is not None and (found.step, found.by, step_to_keep(run)) == (200, USER, 200)
    with pytest.raises(UserError, match="--choose 150: .* no checkpoint of this step. It has 100, 200, 300"):
        put_choice(run, 150)
    put_choice(run, None)
    found = choose_best(run)
    assert found is not None and found.step == 300


def test_the_command_chooses_a_step_and_takes_it_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, {0: [3.0, 5.0], 100: [1.0, 2.0], 200: [2.0, 3.0]})
    (run / "config.json").touch()
    chosen = lambda step: main(["evaluate", str(run), "--choose", step])  # noqa: E731
    assert chosen("100") == 0 and "@100, by user" in capsys.readouterr().out
    assert chosen("auto") == 0 and "@200, the last: a loss of" in capsys.readouterr().out
    assert chosen("last") == 2 and "--choose last: this is not a step" in capsys.readouterr().err


def test_fidelity_comes_before_the_loss_and_strength_is_part_of_it(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: [3.0, 5.0], 100: [1.0, 2.0], 200: [2.0, 3.0], 300: [2.5, 3.5]})
    scored(run, [(None, None, 0.1, 0, 0), (100, 1, 0.5, 0.01, 0.01), (200, 0.8, 0.7, -0.01, 0.02),
                 (200, 1, 0.8, -0.05, 0.02), (300, 1, 0.9, -0.09, 0.01), (400, 1, 0.99, 0.1, 0)])  # fmt: skip
    found = choose_best(run)
    assert found is not None and (found.step, found.by, found.strength) == (200, FIDELITY, 0.8)
    assert found.suffix == "@200:0.8"
    for words in (
        "0.700 by dino",
        "prompt fidelity 0.290 by clip, -0.010 against the base",
        "4 models follow prompts as well",
    ):
        assert words in found.why, found.why
    put_choice(run, 300)
    assert choose_best(run).step == 300  # type: ignore[union-attr]


def test_where_none_follows_prompts_those_that_do_it_best_are_compared(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: [3.0], 100: [1.0], 200: [2.0], 300: [2.5]})
    rows = [(None, None, 0.1, 0, 0), (100, None, 0.5, -0.1, 0.02), (200, None, 0.7, -0.11, 0.04),
            (300, None, 0.9, -0.3, 0.02)]  # fmt: skip
    scored(run, rows)
    found = choose_best(run)
    assert found is not None and (found.step, found.strength) == (200, 1)  # 300 is like the subject, ignoring prompts
    assert found.why.startswith(
        "none of 3 models follows prompts as well as the base; of the 2 that come nearest, its pictures are"
    )
    scored(run, rows, reads=False)
    found = choose_best(run)
    assert found is not None and found.step == 300 and "clip" not in found.why


def test_an_evaluation_of_few_prompts_chooses_nothing(tmp_path: Path) -> None:
    """Its intervals would say 95% and cover half."""
    run = run_of(tmp_path, {})
    rows: list[ScoredRow] = [(None, None, 0.1, 0, 0), (100, 1, 0.9, 0.01, 0.01), (200, 1, 0.5, 0.01, 0.02)]
    for step in (100, 200, 300):
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True, exist_ok=True)
    scored(run, rows, prompts=4)
    found = choose_best(run)
    assert found is not None and (found.step, found.by) == (300, LAST) and "4 prompts does not tell" in found.why
    scored(run, rows, prompts=5)
    assert choose_best(run).step == 100  # type: ignore[union-attr]


# How much is evaluated


@pytest.mark.parametrize(
    ("steps", "every", "asked", "expected"),
    [(100_000, 1000, "auto", (9, 101)), (10**6, 10**5, "auto", (MOST, 11)), (100, 10, "auto", (LEAST, 11)),
     (100, None, 7, (7, 2)), (100, 10, 0, (0, 0))],
)  # fmt: skip
def test_an_evaluation_takes_two_percent_within_bounds(
    steps: int, every: int | None, asked: object, expected: tuple[int, int], tiny_config: dict
) -> None:
    tiny_config["validation"]["loss_samples"] = asked
    tiny_config["checkpoint"]["every"] = every
    found = choose_validation_samples(validate(tiny_config, "test"), 1.0, steps)
    assert (found.samples, found.times) == expected
    assert found.share == pytest.approx(2 * found.samples * found.times / steps)  # two prompts a sample
    assert asked != "auto" or found.share <= 0.02 or found.samples == LEAST
    assert ("more than 2%" in found.describe()) == (found.samples == LEAST)
    resumed = choose_validation_samples(validate(tiny_config, "test"), 1.0, 10 * steps, before=5)
    assert resumed.samples == (asked and 5)  # losses stay paired with those before, unless there are none any more


# A run


def evaluated_config(tiny_config: dict, **validation: object) -> dict:
    config = copy.deepcopy(tiny_config)
    config["checkpoint"] = {"every": 2, "keep_last": 1}
    config["train"] = {"steps": 6, "batch_size": 2}
    config["validation"] |= {"split": 2, "loss_samples": 3, "class_prompt": "a disc", **validation}
    return config


@pytest.mark.parametrize("method", ["lora", "full"])
def test_drift_is_the_change_of_the_prediction(method: str, tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    config = evaluated_config(tiny_config) | {"train": {"steps": 4, "batch_size": 2}}
    config["adapter"] = {"method": method} | ({"rank": 2} if method == "lora" else {})
    seen: list[dict[str, torch.Tensor]] = []
    compare = LossEvaluator._compare

    def watched(self: LossEvaluator, transformer, base):
        passes = self._passes(transformer, self.groups)
        seen.append({f"{group}.{n}": prediction for group, n, prediction, _ in passes})
        return compare(self, transformer, base)

    monkeypatch.setattr(LossEvaluator, "_compare", watched)
    folder = train(validate(config, "test"))
    base = WeightReader([folder / DRIFT]).get_all()
    rows = {row["step"]: row for row in read_rows(folder / "evaluations.jsonl")}
    assert list(rows) == [0, 2, 4] and rows[0]["drift"] == {"training": 0, "class": 0, "unrelated": 0}
    for step, now in zip((2, 4), seen, strict=True):
        for group in ("training", "class", "unrelated"):
            names = [name for name in base if name.startswith(group)]
            assert len(names) == 3
            change = torch.stack([(now[name].double() - base[name].double()).square().mean() for name in names])
            scale = torch.stack([base[name].double().square().mean() for name in names]).mean()
            assert rows[step]["drift"][group] == pytest.approx(float(change.mean() / scale), rel=1e-4)
            assert rows[step]["drift_error"][group] == pytest.approx(float((change / scale).std() / 3**0.5), rel=1e-3)
        assert rows[step]["drift"]["training"] > 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["drift_after"] == rows[4]["drift"] and summary["eval_loss_after"] == rows[4]["eval_loss"]
    assert summary["best"]["by"] == LAST and summary["lowest_held_out"].keys() == {"step", "eval_loss"}


def test_evaluating_changes_no_weight_and_a_resumed_run_repeats_it(tiny_config: dict) -> None:
    config = evaluated_config(tiny_config)
    config["checkpoint"]["keep_last"] = 2
    whole = train(validate(config, "test"))
    silent = copy.deepcopy(config) | {"name": "silent"}
    silent["validation"] = {"prompts": [], "split": 2, "loss_samples": 1, "unrelated_prompts": []}
    plain = train(validate(silent, "test"))

    def tensors(run: Path) -> dict[str, list]:
        reader = WeightReader([run / "pytorch_lora_weights.safetensors"])
        return {name: tensor.tolist() for name, tensor in reader.get_all().items()}

    assert tensors(whole) == tensors(plain)

    short = shutil.copytree(whole, whole.with_name("short"))
    shutil.rmtree(checkpoint_folder(short, 6))
    (short / DRIFT).unlink()  # a LoRA's base can be asked again
    again = train(validate(config | {"name": "short"}, "test"), resume="latest")
    rows, repeated = (list(read_rows(run / "evaluations.jsonl")) for run in (whole, again))
    assert repeated == rows
    assert tensors(again) == tensors(whole)


def test_full_fine_tuning_without_the_base_s_predictions_has_a_loss_and_no_drift(tiny_config: dict) -> None:
    config = evaluated_config(tiny_config) | {"adapter": {"method": "full"}}
    folder = train(validate(config | {"train": {"steps": 4, "batch_size": 2}}, "test"))
    (folder / DRIFT).unlink()
    train(validate(config, "test"), resume="latest")
    rows = {row["step"]: row for row in read_rows(folder / "evaluations.jsonl")}
    assert "drift" in rows[4] and "drift" not in rows[6] and len(rows[6]["eval_losses"]) == 3


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_base_that_predicts_zeros_has_no_drift_to_divide_by(
    method: str, tiny_config: dict, tiny_pipeline: Path, tmp_path: Path
) -> None:
    """A LoRA leaves the output layer at zero, so nothing changes; full fine-tuning leaves it."""
    folder = shutil.copytree(tiny_pipeline, tmp_path / "zeros")
    (file,) = (folder / "transformer").glob("*.safetensors")
    weights = load_file(file)
    save_file({n: w * 0 if n.startswith("proj_out.") else w for n, w in weights.items()}, file, {"format": "pt"})
    config = evaluated_config(tiny_config) | {"adapter": {"method": method}, "train": {"steps": 2}}
    config["model"] |= {"pretrained": str(folder)}
    run = train(validate(config, "test"))
    rows, none = list(read_rows(run / "evaluations.jsonl")), {"training": 0, "class": 0, "unrelated": 0}
    assert [row.get("drift") for row in rows] == [none, none if method == "lora" else None]
    assert json.loads((run / "summary.json").read_text()).get("drift_after") == rows[-1].get("drift")
    assert all(len(row["eval_losses"]) == 3 for row in rows)


def test_the_lowest_loss_is_never_pruned_and_can_be_chosen(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {0: 3.0, 2: 2.0, 4: 1.0, 6: 2.0, 8: 2.5, 10: 2.6}
    given = lambda self, transformer, step: ValidationFigures(losses[step], [losses[step], losses[step] + 1])  # noqa: E731
    monkeypatch.setattr(LossEvaluator, "evaluate", given)
    tiny_config["output"]["report"] = True
    folder = train(validate(evaluated_config(tiny_config) | {"train": {"steps": 10}}, "test"))
    assert [step for step, _ in list_checkpoints(folder)] == [4, 10]  # keep_last is 1
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["best"]["step"], summary["lowest_held_out"]) == (10, {"step": 4, "eval_loss": 1.0})
    assert "lowest at step 4, -1.6000 ± 0.0000 against the last" in summary["best"]["why"]
    assert f"{folder}@10, the last: a loss of 2.6000" in capsys.readouterr().out
    assert "the last, step 10; held-out loss is lowest at step 4" in (folder / "README.md").read_text()
    report = (folder / "report.md").read_text()
    assert "step 10, counts as the best: a loss of 2.6000" in report and "4 (lowest loss)" in report
    assert find_named(f"{folder}@best").step == 10
    put_choice(folder, 4)
    named = find_named(f"{folder}@best")
    assert named.step == 4 and named.lora is not None and "step-000004" in str(named.lora)


def test_training_ends_early_and_is_finished(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def given(self: LossEvaluator, transformer: object, step: int) -> ValidationFigures:
        asked.append(step)
        loss = abs(step - 4) + 1.0
        return ValidationFigures(loss, [loss, loss + 1])

    monkeypatch.setattr(LossEvaluator, "evaluate", given)
    stop = {"early_stop": {"patience": 2, "min_steps": 6}}
    config = validate(evaluated_config(tiny_config, **stop) | {"train": {"steps": 40}}, "test")
    folder = train(config)
    summary = json.loads((folder / "summary.json").read_text())
    assert asked == [0, 2, 4, 6, 8, 8]  # the last one once more, with its result
    assert (summary["steps"], summary["steps_asked"], summary["stopped_early"]) == (8, 40, True)
    assert "stopped early at step 8 of 40: no lower validation loss in 2 evaluations" in capsys.readouterr().out
    assert [step for step, _ in list_checkpoints(folder)] == [4, 8]
    assert (summary["best"]["step"], summary["lowest_held_out"]["step"]) == (8, 4)
    asked.clear()
    assert train(config, resume="auto") == folder and not asked  # finished
    train(config, resume="latest")  # asked for: it goes on
    assert asked[:2] == [10, 10] and json.loads((folder / "summary.json").read_text())["steps"] == 10


def test_stopping_early_needs_held_out_pictures(tiny_config: dict) -> None:
    tiny_config["validation"] |= {"loss_samples": 4, "early_stop": {}}
    with pytest.raises(ConfigError, match="validation.early_stop: without validation.split .* Set split"):
        validate(tiny_config, "test")


def test_without_evaluations_nothing_is_written(tiny_config: dict, train_once: TrainOnce) -> None:
    folder = train_once(tiny_config)
    assert not (folder / DRIFT).exists() and not (folder / "evaluations.jsonl").exists()
    assert json.loads((folder / "summary.json").read_text())["best"]["by"] == best_checkpoint.LAST


# The report


def test_the_report_shows_fidelity_with_intervals_and_pictures(tmp_path: Path) -> None:
    run = run_of(tmp_path, {0: [3.0, 5.0], 100: [1.0, 2.0]})
    rows = [{**row, "drift": {"unrelated": row["step"] / 1000}, "drift_error": {"unrelated": 0.01}}
            for row in read_rows(run / "evaluations.jsonl")]  # fmt: skip
    (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Image.new("RGB", (64, 64), "red").save(run / "first.png")
    scores = lambda value: {  # noqa: E731
        "subject_fidelity": {"dino": {"value": value, "low": value - 0.1, "high": value + 0.1}},
        "prompt_fidelity": {
            "clip": {"value": 0.3, "low": None, "high": None, "from_base": {"value": 0.0, "high": None}}
        },
    }
    points = [
        {"title": "base", "step": None, "strength": None, "scores": scores(0.1), "pictures": ["first.png"]},
        {"title": "step 100", "step": 100, "strength": 1, "scores": scores(0.5), "pictures": ["gone.png"]},
    ]
    encoders = [{"title": "dino"}, {"title": "clip"}]
    main = {"subject_fidelity": "dino", "prompt_fidelity": "clip"}
    (run / "evaluation.json").write_text(json.dumps({"main": main, "points": points, "encoders": encoders}))
    record = RunData(run, "one", {}, None, [], [], {}, {}, [])
    (section,) = fidelity_sections([record])
    assert [chart.name for chart in section.charts] == ["fidelity-prompt", "fidelity-drift"]
    base, tuned = section.charts[1].spec["data"]["values"]
    assert base["picture"].startswith("data:image/jpeg;base64,") and tuned["picture"] is None
    assert (tuned["subject"], tuned["subject_low"], tuned["drift"]) == (0.5, 0.4, 0.1)
    assert section.tables[0].rows[1] == ("step 100", "0.500 (0.400 to 0.600)")
    assert section.tables[1].rows[0] == ("base", "0.300")
    assert section.notes[-1].startswith("subject: likeness to your pictures") and "PRES" not in section.notes[-1]
    (chosen,) = choice_sections(record)
    assert "step 100 (one@100), by fidelity" in chosen.notes[0] and chosen.charts[0].name == "drift"
    assert chosen.tables[0].rows[1][:3] == ("100 (best) (lowest loss)", "1.5000", "-2.5000 ± 0.5000")
