"""What `--resume` cannot mean is refused before torch is imported and the data is prepared."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from simpletune.apps.cli import train
from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.runs.checkpoint_folders import STATE, checkpoint_folder
from simpletune.runs.folder import CHOSEN, read_chosen
from simpletune.runs.resume import check_resumable
from simpletune.system.locks import exclusive
from simpletune.training.set_up import announce_resume


class Imported(Exception):
    """The libraries would be imported now."""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A train command whose libraries are not imported, and whose run has two checkpoints."""

    def refuse() -> None:
        raise Imported

    monkeypatch.setattr(train, "import_libraries", refuse)
    for step in (50, 100):
        folder = checkpoint_folder(tmp_path / "runs" / "demo", step)
        folder.mkdir(parents=True)
        (folder / STATE).write_text("{}")
    return ["train", "demo", f"output.runs={tmp_path}/runs"]


@pytest.mark.parametrize(
    ("resume", "told"),
    [
        ("lastest", "--resume: lastest does not exist. Did you mean latest?"),
        ("autp", "--resume: autp does not exist. Did you mean auto?"),
        ("RUNS/demo", "RUNS/demo is not a checkpoint. "),
        ("RUNS/demo/checkpoints/step-000101", "Did you mean RUNS/demo/checkpoints/step-0001"),
        ("zzz", "zzz does not exist. Use latest, auto or a checkpoint's folder. The run has RUNS/demo/"),
    ],
)  # fmt: skip
def test_a_wrong_resume_is_refused_before_anything_is_imported(
    resume: str, told: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--resume", resume.replace("RUNS", f"{tmp_path}/runs")]) == 2
    assert told.replace("RUNS", f"{tmp_path}/runs") in capsys.readouterr().err


def test_a_resume_that_may_work_goes_on_and_one_without_a_checkpoint_does_not(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for resume in ("latest", "auto", f"{tmp_path}/runs/demo/checkpoints/step-000100"):
        with pytest.raises(Imported):
            main([*command, "--resume", resume])
    assert main([*command, "name=other", "--resume", "latest"]) == 2
    assert f"--resume latest: {tmp_path}/runs/other has no checkpoint. Start without" in capsys.readouterr().err


def test_a_run_in_use_is_refused_before_anything_is_imported(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with exclusive(tmp_path / "runs" / "demo"):
        assert main(command) == 2
    assert "demo is in use by another run" in capsys.readouterr().err


def test_texts_for_readers_are_no_changed_settings() -> None:
    data = {"name": "x", "model": {"pretrained": "demo:tiny-sd3"}, "data": {"path": "demo:pictures"}}
    before = validate(data | {"about": "long " * 40, "$schema": "schema.json"}, "x").model_dump(
        mode="json", by_alias=True
    )
    saved = SimpleNamespace(
        config=json.loads(json.dumps(before)), manifest=[], processes=1, micro_batches=[], folder="", base={}
    )
    after = validate(data | {"optimizer": {"lr": 0.25}}, "x")
    changed = check_resumable(saved, after, [])  # type: ignore[arg-type]
    assert len(changed) == 1 and changed[0].startswith("optimizer.lr: ") and changed[0].endswith(" -> 0.25")


def test_a_base_by_name_is_not_looked_for_in_a_folder_of_that_name(tmp_path: Path, capsys) -> None:
    """What the user wrote, such as demo:tiny-sd3, is compared; what reads the base's shapes gets its folder."""
    data = {"name": "x", "model": {"pretrained": "demo:tiny-sd3"}, "data": {"path": "demo:style", "resolution": 64}}
    config = validate(data | {"train": {"steps": 4}, "output": {"runs": str(tmp_path)}}, "x")
    run = tmp_path / "x"
    run.mkdir()
    (run / CHOSEN).write_text('{"threads": 1, "checkpointed": 2, "modulation": "resident"}')
    before = json.loads(config.model_copy(update={"device": "cpu"}).model_dump_json(by_alias=True))
    saved = SimpleNamespace(
        config=before, manifest=[], processes=1, micro_batches=1, folder=run, base={}, step=2, versions={}
    )
    prepared = SimpleNamespace(plan=SimpleNamespace(steps_per_epoch=1, manifest=list))
    chosen = read_chosen(resolve_folders(config))
    announce_resume(saved, config, prepared, 1, 1, chosen)  # type: ignore[arg-type]
    assert f"resume  from {run}: step 2 of 4" in capsys.readouterr().out and chosen["checkpointed"] == 2
