"""README, CONTRIBUTING and docs: scripts and some verbs run after the demo; verbs, grids and paths exist."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from simpletune.cli.main import VERBS as KNOWN
from simpletune.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = re.findall(r"^    python (inference/\S+\.py.*?)(?:\s+#.*)?$", README, re.M)
FOLDERS = ("simpletune", "configs", "benchmarks", "inference", "profiles", "tests", "docs")
DIFFUSERS_SCRIPTS = {"train_dreambooth_lora_sd3.py", "train_dreambooth_sd3.py"}
DOCS = sorted((ROOT / "docs").glob("*.md"))
VERBS = sorted(set(re.findall(r"^    simpletune (\w+)", README, re.M)))


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def after_the_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the demo was run, for a few steps."""
    folder = tmp_path_factory.mktemp("readme")
    short = ["train.steps=8", "validation.every=null", "validation.steps=2", "profile.max_traces=1", "device=cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", str(ROOT / "configs" / "demo.json"), *short]) == 0
    return folder


def test_the_readme_names_all_scripts_and_verbs() -> None:
    assert {line.split()[0] for line in SCRIPTS} == {
        f"inference/{file.name}" for file in (ROOT / "inference").glob("*.py") if not file.name.startswith("_")
    }
    assert set(VERBS) == set(KNOWN)


def require_picture(said: str, folder: Path) -> None:
    """A script has said where it left one picture, which can be read, and its peak memory."""
    pictures = re.findall(r"^(\S+\.png): ", said, re.M)
    assert len(pictures) == 1
    with Image.open(folder / pictures[0]) as picture:
        assert picture.width >= 64
    assert "peak memory" in said


@pytest.mark.parametrize("line", SCRIPTS)
def test_the_scripts_run_after_the_demo(
    line: str, after_the_demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: what a start of its own adds, ``test_a_script_runs_as_a_program`` has."""
    script, *words = shlex.split(line)
    monkeypatch.chdir(after_the_demo)
    monkeypatch.setattr(sys, "argv", [str(ROOT / script), *words])
    monkeypatch.syspath_prepend(str(ROOT / "inference"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ended.value.code == 0
    require_picture(capsys.readouterr().out, after_the_demo)


@pytest.mark.parametrize("line", [SCRIPTS[0], *(pytest.param(line, marks=pytest.mark.slow) for line in SCRIPTS[1:])])
def test_a_script_runs_as_a_program(line: str, after_the_demo: Path) -> None:
    script, *words = shlex.split(line)
    require_picture(run([sys.executable, str(ROOT / script), *words], after_the_demo).stdout, after_the_demo)


def test_the_verbs_run_after_the_demo(
    after_the_demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(after_the_demo)
    for words in (["check", "demo"], ["schema"], ["prepare", "demo", "device=cpu"], ["generate", "--prompt", "a disc"]):
        assert main(words) == 0
        assert capsys.readouterr().out
    summary = json.loads((after_the_demo / "runs" / "demo" / "summary.json").read_text())
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    assert main(["compare", "--prompt", "a red disc", "--seeds", "2"]) == 0
    assert "3 models, 2 pictures each" in capsys.readouterr().out


def test_the_grids_are_those_of_the_benchmarks() -> None:
    from benchmarks.__main__ import GRIDS

    line = re.search(r"python -m benchmarks GRID .*?: ([\w,\s]+)$", README, re.M)
    assert line is not None
    assert set(re.findall(r"\w+", line[1])) - {"or"} == {grid.__name__ for grid in GRIDS}


def test_the_tree_names_every_folder() -> None:
    tree = README.split("## The tree")[1].split("```")[1]
    folders = {name.removesuffix("/") for name in re.findall(r"^(\S+)/ ", tree, re.M)}
    assert folders == set(FOLDERS)
    rooms = {name.removesuffix("/") for name in re.findall(r"^  (\S+)", tree, re.M)}
    assert rooms == {each.name for each in (ROOT / "simpletune").iterdir() if each.is_dir() and each.name[0] != "_"}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{each.name}" for each in DOCS)])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
    if page == "docs/speed_log.md":  # names what was tried, and is gone since
        return
    files = set(re.findall(r"`((?:\w+/)*\w+\.py)\b", text)) - DIFFUSERS_SCRIPTS
    known = [file.as_posix() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert [file for file in sorted(files) if not any(f"/{each}".endswith(f"/{file}") for each in known)] == []
