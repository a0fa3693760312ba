"""Files that a run's figures are made from, changed while the run was stopped: a warning, and no wrong figure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import TrainOnce, merged, run_with, stop_at

from simpletune.config.load import validate
from simpletune.config.schema import run_folder
from simpletune.runs.folder import (
    BEST,
    CHOSEN,
    SCORES,
    put_chosen,
    read_chosen,
    read_json_or_none,
    read_rows,
    read_scores,
)
from simpletune.system.checksums import with_sum
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import content_hash

STEPS = {"train": {"steps": 4}, "checkpoint": {"every": 2}}
CHECKS = {"validation": {"prompts": ["a red disc"], "steps": 1, "loss_samples": 2, "every": 2}}


def figures(run: Path) -> dict:
    summary = json.loads((run / "summary.json").read_text())
    kept = {key: value for key, value in summary.items() if "drift" in key or "eval" in key or "loss" in key}
    return kept | {"rows": [{**row} for row in read_rows(run / "evaluations.jsonl")]}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> TrainOnce:
    """A copy of a run that was stopped in its last step."""
    folder, known = tmp_path_factory.mktemp("stopped"), dict[str, Path]()

    def copied(config: dict) -> Path:
        method = config["adapter"]["method"]
        if method not in known:
            stop_at("step.begun", merged(config, output={"runs": str(folder / method)}), "term", 4)
            known[method] = folder / method / config["name"]
        return shutil.copytree(known[method], Path(config["output"]["runs"]) / config["name"])

    return copied


def zeros(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-64:] = bytes(64)
    file.write_bytes(bytes(content))


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def digit(file: Path) -> None:
    """Another first digit of the last loss."""
    text = file.read_text()
    at = text.rindex('loss": ') + len('loss": ')
    file.write_text(text[:at] + ("7" if text[at] != "7" else "6") + text[at + 1 :])


PREDICTIONS = "base_predictions.safetensors"
OTHERS = {"eval_before.json": digit, "samples/base/prompt-00.png": half}


@pytest.mark.parametrize(
    "adapter, damages",
    [
        pytest.param({"method": "lora", "rank": 2}, {PREDICTIONS: zeros, **OTHERS}, id="lora"),
        pytest.param({"method": "full"}, {PREDICTIONS: half}, id="full, predictions"),
        pytest.param({"method": "full"}, OTHERS, id="full, others"),
    ],
)
def test_no_figure_is_made_from_a_changed_file(
    adapter: dict,
    damages: dict[str, Callable[[Path], None]],
    tiny_config: dict,
    train_once: TrainOnce,
    stopped: TrainOnce,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tiny_config | {"adapter": adapter} | STEPS | CHECKS
    expected, run = figures(train_once(config)), stopped(config)
    for name, damage in damages.items():
        damage(run / name)
    capsys.readouterr()
    run_with(config, "auto")
    said, found = capsys.readouterr().out, figures(run)
    for name in damages:
        assert f"{name} has changed since it was written" in said
        assert (run / f"{name}.damaged").is_file()
    if adapter["method"] == "full" and PREDICTIONS in damages:  # the base is gone: no drift
        last = found["rows"][-1]
        assert "drift" not in last and last["eval_loss"] == expected["rows"][-1]["eval_loss"]
    else:
        assert found == expected


def test_a_changed_row_is_said(tiny_config: dict, stopped: TrainOnce, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config | STEPS | CHECKS
    run, names = stopped(config), ("metrics.jsonl", "evaluations.jsonl")
    for name in names:
        digit(run / name)
    run_with(config, "auto")
    said = capsys.readouterr().out
    assert all(f"{name} has changed since it was written" in said for name in names)


def test_nothing_is_said_of_files_as_they_were(
    tiny_config: dict, stopped: TrainOnce, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config | STEPS | CHECKS
    run = stopped(config)
    before = content_hash(run / PREDICTIONS)
    for steps in (5, 6):
        run_with(config, "auto", train={"steps": steps})
    assert "changed since" not in capsys.readouterr().out
    assert content_hash(run / PREDICTIONS) == before


def test_a_finished_run_is_looked_through(
    tiny_config: dict, copy_run: TrainOnce, capsys: pytest.CaptureFixture[str]
) -> None:
    """By ``--resume auto``, which does nothing else; what is as it was is not mentioned."""
    config = tiny_config | STEPS | CHECKS
    run = copy_run(config)
    run_with(config, "auto")
    assert "already finished" in (said := capsys.readouterr().out) and "warning" not in said
    damages = {"metrics.jsonl": digit, "evaluations.jsonl": digit, **OTHERS}
    for name, damage in damages.items():
        damage(run / name)
    run_with(config, "auto")
    said = capsys.readouterr().out
    assert all(f"{name} has changed since it was written" in said for name in damages) and "already finished" in said
    assert all((run / f"{name}.damaged").is_file() for name in OTHERS)


def test_a_changed_choice_is_not_followed(tiny_config: dict, tmp_path: Path, capsys) -> None:
    """What was chosen for auto, the best checkpoint, and the scores by which it is chosen; 0.1.0 wrote no checksum."""
    config = validate(tiny_config, "test")
    run = run_folder(config)
    run.mkdir(parents=True)
    put_chosen(config, config, threads=2)
    (run / BEST).write_text(json.dumps(with_sum({"step": 200})))
    (run / SCORES).write_text(json.dumps(with_sum({"points": [{"step": 200, "value": 0.25}]}), indent=2))
    assert read_chosen(config)["threads"] == 2 and read_json_or_none(run / BEST) == {"step": 200}
    assert read_scores(run) == {"points": [{"step": 200, "value": 0.25}]}
    for name in (CHOSEN, BEST, SCORES):
        text = (run / name).read_text()
        (run / name).write_text(text.replace("2", "3", 1))
    assert read_chosen(config) == {}
    assert "chosen.json is damaged: set aside as chosen.json.damaged" in capsys.readouterr().out
    for name in (BEST, SCORES):
        with pytest.raises(UserError, match=rf"{name} is damaged \(its checksum does not match\)"):
            read_json_or_none(run / name)
        (run / name).write_text('{"step": 100}')
        assert read_json_or_none(run / name) == {"step": 100}
