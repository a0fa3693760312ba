"""Every command of the README runs: the scripts and the command line, straight after the demo, from another folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = re.findall(r"^    python (inference/\S+\.py.*?)(?:\s+#.*)?$", README, re.M)
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
    run([sys.executable, "-m", "simpletune", "train", str(ROOT / "configs" / "demo.json"), *short], folder)
    return folder


def test_the_readme_names_all_scripts_and_verbs() -> None:
    from simpletune.cli.main import VERBS as known

    assert {line.split()[0] for line in SCRIPTS} == {
        f"inference/{file.name}" for file in (ROOT / "inference").glob("*.py") if not file.name.startswith("_")
    }
    assert set(VERBS) == set(known)


@pytest.mark.parametrize("line", SCRIPTS)
def test_the_scripts_run_after_the_demo(line: str, after_the_demo: Path) -> None:
    script, *words = shlex.split(line)
    done = run([sys.executable, str(ROOT / script), *words], after_the_demo)
    pictures = re.findall(r"^(\S+\.png): ", done.stdout, re.M)
    assert len(pictures) == 1
    with Image.open(after_the_demo / pictures[0]) as picture:
        assert picture.width >= 64
    assert "peak memory" in done.stdout


def test_the_verbs_run_after_the_demo(after_the_demo: Path) -> None:
    demo = str(ROOT / "configs" / "demo.json")
    for words in (["check", demo], ["schema"], ["prepare", demo, "device=cpu"], ["generate", "--prompt", "a red disc"]):
        done = run([sys.executable, "-m", "simpletune", *words], after_the_demo)
        assert done.stdout
    summary = json.loads((after_the_demo / "runs" / "demo" / "summary.json").read_text())
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    done = run(
        [sys.executable, "-m", "simpletune", "compare", "--prompt", "a red disc", "--seeds", "2"], after_the_demo
    )
    assert "3 models, 2 pictures each" in done.stdout
