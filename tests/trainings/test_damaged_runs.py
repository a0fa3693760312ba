"""A run's folder, damaged file by file: each command answers in words, and a damaged checkpoint is not used."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import DAMAGES, OF_FOLDERS, Place, answer, changed_state, damage, is_alike, make_origin, targets

from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.runs import checkpoint
from simpletune.runs.best_checkpoint import step_to_keep
from simpletune.runs.folder import open_again, read_metrics
from simpletune.system.options import UserError
from simpletune.training.train import train

ROOT = Path(__file__).resolve().parents[2]
CONTINUE = ROOT / "docs" / "how-to" / "continue-a-run.md"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A finished run with checkpoints of steps 2, 4 and 6."""
    return make_origin(tmp_path_factory.mktemp("origin"))


@pytest.fixture
def place(origin: Place, tmp_path: Path) -> Place:
    """The finished run, to be damaged."""
    return origin.copied(tmp_path / "copy")


# --- state.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bit", "digit"])
def test_no_change_of_a_single_bit_or_digit_of_a_state_is_accepted(place: Place, kind: str) -> None:
    folder = place.checkpoint(4)
    checkpoint.read_checkpoint(folder)
    file, draw, accepted = folder / checkpoint.STATE, random.Random(1), []
    text = file.read_bytes()
    for _ in range(400):
        changed = changed_state(text, draw, kind)
        file.write_bytes(changed)
        try:
            checkpoint.read_checkpoint(folder)
        except UserError as error:
            assert str(file) in str(error)
        else:
            accepted.append(changed)
    assert not accepted, f"{len(accepted)} of 400"


def _rewritten(folder: Path, change: Any) -> None:
    file = folder / checkpoint.STATE
    file.write_text(change(file.read_text()))


STATES = {
    "a later step": lambda text: text.replace('"step": 4,', '"step": 5,', 1),
    "the last step": lambda text: text.replace('"step": 4,', '"step": 6,', 1),
    "an earlier step": lambda text: text.replace('"step": 4,', '"step": 2,', 1),
    "the manifest": lambda text: re.sub(r'("manifest": .*?"sha256": ")[0-9a-f]', r"\1x", text, count=1),
    "a key of the manifest": lambda text: text.replace('"repeat"', '"repaet"', 1),
    "another key of the manifest": lambda text: text.replace('"file"', '"fiel"', 1),
    "the learning rate": lambda text: text.replace('"lr": 0.01', '"lr": 0.02', 1),
    "cut": lambda text: text[:-7],
    "other JSON": lambda text: '{"a": 1}',
    "a list": lambda text: "[]",
    "a renamed key": lambda text: text.replace('"processes"', '"process"', 1),
    "a renamed checksum": lambda text: text.replace('"state_sha256"', '"state_sha257"'),
    "another checksum": lambda text: text[:-3] + ("1" if text[-3] == "0" else "0") + text[-2:],
}


def found(place: Place) -> tuple[int, list[str]]:
    """The step that a run would continue from, and what checkpoints there are then."""
    saved = checkpoint.find_checkpoint("latest", place.run)
    assert saved is not None
    return saved.step, sorted(entry.name for entry in saved.folder.parent.iterdir())


@pytest.mark.parametrize("change", STATES)
def test_of_a_changed_state_the_checkpoint_before_is_found(
    place: Place, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place.stopped()
    before = (place.checkpoint(4) / checkpoint.STATE).read_text()
    _rewritten(place.checkpoint(4), STATES[change])
    assert (place.checkpoint(4) / checkpoint.STATE).read_text() != before
    assert found(place) == (2, ["step-000002", "step-000004.damaged"])
    said = capsys.readouterr().out
    assert "step-000004/state.json is damaged" in said and "step-000004.damaged" in said


@pytest.mark.parametrize(
    ("file", "kind"),
    product(
        (checkpoint.STATE, checkpoint.TRAINABLE, checkpoint.OPTIMIZER), [name for name in DAMAGES if name != "digit"]
    ),
)
def test_of_a_checkpoint_with_a_damaged_file_the_one_before_is_found(
    place: Place, file: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place.stopped()
    DAMAGES[kind](place.checkpoint(4) / file, random.Random(1))
    assert found(place) == (2, ["step-000002", "step-000004.damaged"])
    said = capsys.readouterr().out
    assert f"step-000004/{file} is " in said and "step-000004.damaged" in said


def test_a_checkpoint_under_the_name_of_another_step_is_not_used(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.stopped().checkpoint(4).rename(place.checkpoint(5))
    assert found(place) == (2, ["step-000002", "step-000005.damaged"])
    said = capsys.readouterr().out
    assert "step-000005/state.json is damaged" in said and "step 4" in said


def test_a_run_continues_from_the_checkpoint_before_a_damaged_one(
    place: Place, origin: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES["byte"](place.stopped().checkpoint(4) / checkpoint.TRAINABLE, random.Random(1))
    assert main(["train", str(place.file), "--resume", "latest"]) == 0
    said = capsys.readouterr().out
    assert "step-000004/trainable.safetensors is damaged" in said and "step 2 of 6" in said
    torch.testing.assert_close(place.weights(), origin.weights(), rtol=0, atol=0)
    assert [row["step"] for row in read_metrics(place.run)] == [1, 2, 3, 4, 5, 6]
    steps = sorted(entry.name for entry in place.checkpoint(4).parent.iterdir())
    assert steps == ["step-000002", "step-000004", "step-000004.damaged", "step-000006"]


def test_an_older_version_s_checkpoint_is_refused_and_keeps_its_name(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.stopped()
    for step in (2, 4):
        file = place.checkpoint(step) / checkpoint.STATE
        state = json.loads(file.read_text())
        for later in ("state_sha256", "fp16", "micro_batches", "figures", "base", "cuda", "cudnn"):
            del state[later]
        file.write_text(json.dumps(state))
    assert place.resume() == 2
    assert "older version of simpletune" in capsys.readouterr().err
    assert place.checkpoint(4).is_dir() and place.checkpoint(2).is_dir()


def test_a_loop_ends_where_every_checkpoint_is_damaged(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.stopped()
    for step in (2, 4):
        _rewritten(place.checkpoint(step), STATES["cut"])
    assert place.resume() == 2
    assert "all 2 checkpoints" in capsys.readouterr().err
    assert place.resume("train.steps=1") == 0
    assert place.run.with_name("t.1").joinpath("checkpoints", "step-000004.damaged").is_dir()


# --- the other files ------------------------------------------------------------------------------------------------


def test_a_damaged_line_amid_the_metrics_is_left_out_and_said(
    place: Place, origin: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link to nothing in an old checkpoint does not matter."""
    file = place.stopped().run / "metrics.jsonl"
    DAMAGES["link"](place.checkpoint(2) / checkpoint.TRAINABLE, random.Random(1))
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1][:20] + "\x00" + lines[1][21:], *lines[2:]]) + "\n")
    assert place.resume() == 0
    said = capsys.readouterr().out
    assert re.search(r"warning .*metrics.jsonl.* line 2", said) and "metrics.jsonl.damaged" in said
    assert "lacks 1 of the steps 1-4: 2" in said
    assert [row["step"] for row in read_metrics(place.run)] == [1, 3, 4, 5, 6]
    torch.testing.assert_close(place.weights(), origin.weights(), rtol=0, atol=0)


def open_at_4(place: Place) -> list[int]:
    """Open the folder of a stopped run to continue from step 4; the steps that its metrics then have."""
    open_again(validate(place.data, "test"), 4, step_to_keep)
    return [row["step"] for row in read_metrics(place.run)]


def test_a_changed_step_among_the_metrics_is_said(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    file = place.stopped().run / "metrics.jsonl"
    file.write_text(file.read_text().replace('"step": 3', '"step": 1'))
    assert open_at_4(place) == [1, 2, 4]
    assert "lacks 1 of the steps 1-4: 3" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["one byte", "deleted", "folder", "link"])
def test_missing_metrics_are_said_once(place: Place, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    DAMAGES[damage](place.stopped().run / "metrics.jsonl", random.Random(1))
    assert open_at_4(place) == []
    assert capsys.readouterr().out.count("lacks 4 of the steps 1-4: 1, 2, 3, 4") == 1


def test_a_run_of_which_all_metrics_are_lost_is_still_finished(place: Place) -> None:
    (place.run / "summary.json").unlink()
    (place.run / "metrics.jsonl").unlink()
    assert place.resume() == 0
    assert json.loads((place.run / "summary.json").read_text())["final_loss"] is None


@pytest.mark.parametrize("kind", [name for name in DAMAGES if name != "digit"])
def test_a_lost_result_of_a_finished_run_is_exported_again(
    place: Place, origin: Place, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = place.run / "pytorch_lora_weights.safetensors"
    DAMAGES[kind](result, random.Random(1))
    assert place.resume() == 0
    said = capsys.readouterr().out
    assert "exported the result again from" in said and f"Its result is {result}" in said
    assert result.with_name(f"{result.name}.damaged").is_symlink() == (kind == "link")
    assert os.path.lexists(result.with_name(f"{result.name}.damaged")) == (kind != "deleted")
    assert is_alike(place, origin)
    summary, before = (json.loads((each.run / "summary.json").read_text()) for each in (place, origin))
    assert summary["output"] == str(result) and summary["seconds_total"] == before["seconds_total"]
    assert place.resume() == 0 and "again" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_on_a_read_only_file_system(place: Place, tmp_path: Path) -> None:
    runs = place.run.parent
    command = f"mount --bind {runs} {runs} && mount -o remount,ro,bind {runs}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "sh", "-c", command]).returncode:
        pytest.skip("no file system may be mounted here")
    program = (
        f"from simpletune.apps.cli.main import main\nfor more in [], ['train.steps=8']:\n"
        f"    print('code', main(['train', {str(place.file)!r}, '--resume', 'auto', *more]), flush=True)"
    )
    script = f'{command} && exec "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "-c", program],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    finished, longer = done.stdout.split("code 0\n")
    assert "already finished (6 steps)" in finished
    assert "code 2" in longer and "Traceback" not in done.stderr
    assert re.search(r"error: .*runs.* cannot be written.*output.runs", done.stderr)


def test_a_lock_that_is_a_folder_is_said(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    lock = place.run.with_name(".t.lock")
    DAMAGES["folder"](lock, random.Random(1))
    assert place.resume() == 2
    assert f"{lock} cannot be locked" in capsys.readouterr().err


def test_names_that_look_like_those_of_locks_and_older_runs_stay_apart(tiny_config: dict, tmp_path: Path) -> None:
    config = validate({**tiny_config, "name": "a", "train": {"steps": 1}}, "test")
    runs, first = tmp_path / "runs", train(config)
    for name in ("a.1", "a.lock"):
        shutil.copytree(first, runs / name)
        (runs / name / "mine").write_text(name)
    (first / "mine").write_text("a")
    train(config)
    assert [(runs / name / "mine").read_text() for name in ("a.1", "a.lock", "a.2")] == ["a.1", "a.lock", "a"]
    assert not (runs / "a" / "mine").exists()


# --- every file, every damage, every command ------------------------------------------------------------------------


def _wrong(
    origin: Place, folder: Path, command: str, stopped: bool, kinds: Sequence[str], only: str = ""
) -> tuple[int, list[str]]:
    """How many cases there are for a command on files that match, of a finished or stopped run; which went wrong."""
    tries, wrong, first = 0, [], origin.copied(folder / "first")
    for target in targets(first.stopped() if stopped else first):
        for kind in kinds if re.search(only, target) else ():
            if kind not in ("unreadable", *(OF_FOLDERS if (first.run.parent / target).is_dir() else DAMAGES)):
                continue
            place = origin.copied(folder / f"{tries}")
            damage(place.stopped() if stopped else place, target, kind)
            code, fault = answer(place, command, place.run.parent / target if kind == "unreadable" else None)
            if command == "train" and code == 0 and not is_alike(place, origin):
                fault = "other weights"
            shutil.rmtree(place.folder)
            tries += 1
            if fault:
                wrong.append(f"{command}, {target} {kind}: {fault}")
    return tries, wrong


KINDS = (*DAMAGES, "a file", "unreadable")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "stopped"),
    [("train", True), *((command, False) for command in ("train", "report", "generate", "export", "compare"))],
)
def test_every_damage_of_every_file_is_answered_in_words(
    origin: Place, tmp_path: Path, command: str, stopped: bool
) -> None:
    tries, wrong = _wrong(origin, tmp_path, command, stopped, KINDS)
    print(f"{command}: {tries} cases")
    assert tries > 100 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("command", "only"),
    [
        pytest.param("train", r"\.json$|samples$|checkpoints$|lock$", marks=pytest.mark.slow),
        ("report", r"\.jsonl?$"),
        ("export", "config"),
    ],
)
def test_a_folder_in_a_file_s_place_is_answered_in_words(
    origin: Place, tmp_path: Path, command: str, only: str
) -> None:
    tries, wrong = _wrong(origin, tmp_path, command, command == "train", ["folder", "a file"], only)
    assert tries and not wrong, "\n".join(wrong)


STARTED_AGAIN, NEEDS_A_PERSON = [7, 137, 143], [1, 2, 3, 4, 5, 6, 130]


@pytest.mark.parametrize("code", STARTED_AGAIN + NEEDS_A_PERSON)
def test_the_loop_of_the_documentation_goes_on_only_where_a_run_was_killed_or_lost_a_process(code: int) -> None:
    page = CONTINUE.read_text()
    loop = page[page.index("until simpletune") :].partition("done\n")[0] + "done"
    script = f"simpletune() {{ n=$((n+1)); echo start; test $n -gt 3 && return 0; return {code}; }}; n=0\n{loop}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    goes_on = code in STARTED_AGAIN
    assert (done.returncode, done.stdout.count("start")) == ((0, 4) if goes_on else (code, 1))


def test_the_unit_of_the_documentation_stops_where_the_loop_does() -> None:
    (found,) = re.findall(r"RestartPreventExitStatus=([\d ]+)`", CONTINUE.read_text())
    assert [int(code) for code in re.findall(r"\d+", found)] == NEEDS_A_PERSON


def test_a_damaged_picture_and_what_is_no_figure_are_left_out_of_the_report(place: Place) -> None:
    damage(place, "t/samples/base/prompt-00.png", "one byte")
    file = place.run / "summary.json"
    file.write_text(file.read_text().replace('"steps":', '"stepz":'))
    assert answer(place, "report") == (0, "")
    report = (place.run / "report.md").read_text()
    assert "base/prompt-00.png cannot be read" in report and "summary.json is damaged (steps)" in report
