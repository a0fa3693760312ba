"""What earlier releases wrote is read: runs go on, are reported and drawn with; LoRAs mean the same; configurations
hold."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import release_files
import torch
from safetensors.torch import load_file

from simpletune.apps.cli.main import main
from simpletune.config.load import read_config

RELEASES = sorted(file.parent for file in Path(__file__).parent.glob("*/release.json"))
TOLERANCE = 1e-3  # relative: other versions of torch add up in another order


@pytest.fixture(scope="module", params=RELEASES, ids=lambda folder: folder.name)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release's files, for the tests of this module together."""
    place = tmp_path_factory.mktemp("release")
    with tarfile.open(request.param / release_files.ARCHIVE) as archive:
        archive.extractall(place, filter="data")
    return place / str(request.param.name)


@pytest.fixture(autouse=True)
def inside(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(release)


@pytest.fixture
def about(release: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / release.name / "release.json").read_text())
    return found


def test_a_killed_run_is_finished_without_training(release: Path) -> None:
    shutil.copytree(release / "runs/stopped", release / "runs/finished-later")
    assert main(["finish", "runs/finished-later"]) == 0
    checkpoint = release / "runs/stopped/checkpoints/step-000002/pytorch_lora_weights.safetensors"
    result, saved = tensors_of(release / "runs/finished-later/pytorch_lora_weights.safetensors"), tensors_of(checkpoint)
    assert result.keys() == saved.keys() and all(torch.equal(result[key], saved[key]) for key in saved)


def test_a_killed_run_goes_on_from_its_checkpoint_and_cache(
    about: dict[str, Any], release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(release / "runs/stopped", release / "again/runs/stopped")
    assert main(["train", "configs/stopped.json", "output.runs=again/runs", "--resume", "latest"]) == 0
    said = capsys.readouterr().out
    assert "step-000002: step 2 of 4" in said and "latents" not in said and "prompts in" not in said
    assert release_files.losses(release / "again", "stopped") == pytest.approx(about["losses"], rel=TOLERANCE)


def test_a_finished_run_is_reported_and_drawn_with(about: dict[str, Any], release: Path) -> None:
    assert main(["report", "runs/finished"]) == 0
    assert release_files.images_in(release / "runs/finished/report.html") == about["pictures"] > 0
    for run in ("finished", "full", "embeddings"):
        assert main(["compare", "--run", f"runs/{run}", "--prompt", "a red disc", "--steps", "2"]) == 0
        assert main(["generate", "--run", f"runs/{run}", "--prompt", "a red disc", "--steps", "2"]) == 0


def test_files_of_adapters_change_a_model_as_they_did(about: dict[str, Any], release: Path, tmp_path: Path) -> None:
    for name, expected in about["changes"].items():
        assert main(release_files.merge_words(name, tmp_path / name)) == 0
        assert release_files.change(release, name, tmp_path / name) == pytest.approx(expected, rel=TOLERANCE), name
    for name, expected in about["sums"].items():
        file = release / "loras" / f"{name}.safetensors"
        assert release_files.sum_of_updates(file) == pytest.approx(expected, rel=TOLERANCE), name
    assert len(about["changes"]) >= 12 and len(about["sums"]) >= 5


def test_its_loras_are_converted_as_they_were(release: Path, tmp_path: Path) -> None:
    made = [file for file in sorted((release / "loras").iterdir()) if file.stem.count("-") == 2]
    assert len(made) >= 12
    for file in made:
        name, _, layout = file.stem.rpartition("-")
        out = tmp_path / file.name
        assert main(["export", f"loras/{name}.safetensors", "--format", layout, "--out", str(out)]) == 0
        new, old = tensors_of(out), tensors_of(file)
        assert new.keys() == old.keys() and all(torch.equal(new[key], old[key]) for key in old), file.name


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    loaded = torch.load(file, weights_only=True)  # AUTOMATIC1111's hypernetwork: {width: (keys', values')}
    pairs = {width: pair for width, pair in loaded.items() if isinstance(width, int)}
    return {f"{width}.{n}.{key}": each[key] for width in pairs for n, each in enumerate(pairs[width]) for key in each}


def test_a_hypernetwork_and_a_merged_file_draw() -> None:
    drawn = ["--model", "models/sd15", "--lora", "loras/sd15-hypernetwork.safetensors", "--prompt", "a"]
    quick = ["--device", "cpu", "--precision", "fp32", "--size", "64x64", "--steps", "2"]
    assert main(["generate", *drawn, *quick]) == 0
    parts = [f"model.{part}=models/sd3" for part in ("text_encoders", "vae")]
    model = ["model.pretrained=models/sd3-merged.safetensors", *parts]
    assert main(["train", "configs/sd3-lora.json", *model, "name=merged", "train.steps=1"]) == 0


def test_training_starts_from_its_loras() -> None:
    for name in ("sd3-lora", "sd3-lora-kohya"):
        words = [f"adapter.start=loras/{name}.safetensors", "name=again", "train.steps=1", "train.clip=per_parameter"]
        assert main(["train", "configs/finished.json", *words]) == 0


def test_its_configurations_hold(release: Path) -> None:
    files = sorted((release / "shipped").glob("*.json"))
    assert len(files) > 40
    for file in files:
        read_config(file, [], needs_data=False, needs_model=False)


def test_release_files_come_from_a_release_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"status": "", "rev-parse": "abcdef0123", "tag": "v9.9.8", "show": ' fallback_version = "9.9.9"'}
    monkeypatch.setattr(release_files, "git", lambda word, *more: answers[word])
    with pytest.raises(SystemExit, match="commit abcdef01 has no tag v9.9.9 and does not set this version"):
        release_files.require_release("9.9.9")
    for changes in ({"tag": "v9.9.9"}, {"show": '+fallback_version = "9.9.9"'}):
        monkeypatch.setattr(release_files, "git", lambda word, *more, own={**answers, **changes}: own[word])
        assert release_files.require_release("9.9.9") == "abcdef0123"
    monkeypatch.setattr(release_files, "git", lambda *words: " M README.md")
    with pytest.raises(SystemExit, match="the tree has changes"):
        release_files.require_release("9.9.9")
