"""The notebook for Colab and Kaggle: its commands are right, and its cells run on the CPU with the demo."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import pytest
from PIL import Image

from benchmarks import first_hour
from simpletune.apps.cli.main import main, parse
from simpletune.config.load import read_config

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "tutorials" / "simpletune_colab.ipynb"
SKIPPED = {"setup", "colab", "hub", "card"}
MODEL = "model"  # of a cell that downloads one, for which the demo's stands in
TINY = ["device=cpu", "data.resolution=64", "train.steps=2", "validation.steps=2", "schedule.warmup_steps=1"]
STAND_INS = {
    "sdxl_lora_8gb": ["model.pretrained=demo:tiny-sdxl"],
    "sd3_medium_lora_16gb": ["model.pretrained=demo:tiny-sd3", "model.t5_length=24"],
}
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
Shell = Callable[[str], int]


def tags(cell: dict[str, Any]) -> set[str]:
    return set(cell["metadata"].get("tags", ()))


def execute(cell: dict[str, Any], names: dict[str, Any], shell: Shell) -> None:
    """Run a cell as IPython does: Python, lines that begin with ``!`` as commands, and ``%cd``."""
    python: list[str] = []
    for line in [*re.sub(r"\\\n\s*", "", "".join(cell["source"])).splitlines(), "!"]:
        if line[:1] not in ("!", "%"):
            python.append(line)
            continue
        exec("\n".join(python), names)
        python = []
        command = re.sub(r"\{([^{}]+)\}", lambda found: str(eval(found[1], names)), line)
        if command.startswith("%cd "):
            os.chdir(command.removeprefix("%cd "))
        elif command[1:]:
            code = shell(command[1:])
            assert code == 0 or (code == 1 and " doctor" in command), command


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """IPython's display, which collects the pictures."""
    images: list[Path] = []
    display = ModuleType("IPython.display")
    vars(display).update(Image=lambda name, **_: Path(name), display=images.append)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    yield images


@pytest.fixture
def my_images(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (640, 512 + 128 * number), (80 * number, 120, 200)).save(folder / f"{number}.jpg")
    return folder


def with_stand_in(shell: Shell) -> Shell:
    """Add what puts a tiny model in the place of the real one to a command that is otherwise the cell's."""

    def run(command: str) -> int:
        _, verb, config, *_ = shlex.split(command)
        assert verb == "train"
        return shell(f"{command} {shlex.join([*STAND_INS[config], *TINY])}")

    return run


def run_all(monkeypatch: pytest.MonkeyPatch, images: Path, shown: list[Path], shell: Shell) -> None:
    """Run every cell that needs neither card, hub nor Colab, in the current folder; real models by their stand-ins."""
    for name, value in {"STEPS": "6", "PICTURES": str(images)}.items():
        monkeypatch.setenv(f"SIMPLETUNE_{name}", value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names: dict[str, Any] = {}
    for cell in CODE:
        if not tags(cell) & SKIPPED:
            execute(cell, names, with_stand_in(shell) if MODEL in tags(cell) else shell)
    assert [file.name for file in shown] == [
        "grid.png", "star.png", "sheet.png", "grid.png", "snow.png", "snow-sd3.png",
    ]  # fmt: skip
    assert all(file.stat().st_size > 100 for file in shown)
    with ZipFile("mine.zip") as archive:
        assert "pytorch_lora_weights.safetensors" in archive.namelist() and archive.testzip() is None


@pytest.mark.slow
def test_the_cells_run_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, my_images: Path, shown: list[Path]
) -> None:
    """Commands run in this process, which spares imports."""

    def shell(command: str) -> int:
        words = shlex.split(command)
        assert words[0] == "simpletune"
        return main([*words[1:], *["--no-train"] * (words[1] == "doctor")])

    monkeypatch.chdir(tmp_path)
    run_all(monkeypatch, my_images, shown, shell)


@pytest.mark.slow
def test_the_cells_run_in_a_clone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, my_images: Path, shown: list[Path]
) -> None:
    """Commands are processes, in a folder that holds what a clone holds."""
    clone = tmp_path / "simpletune"
    clone.mkdir()
    for name in ("simpletune", "configs"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=ignore)
    script = clone / "bin" / "simpletune"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m simpletune "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(clone))
    monkeypatch.chdir(clone)
    run_all(monkeypatch, my_images, shown, lambda command: subprocess.run(command, shell=True).returncode)
    assert "6 steps, int8 weights: loss" in Path("doctor.txt").read_text()


def test_every_command_of_the_notebook_is_parsed_and_its_configuration_read(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []
    names: dict[str, Any] = {}
    execute(CODE[0], names, lambda command: pytest.fail(command))
    for cell in CODE:
        lines = re.findall(r"^!(?:.*\\\n)*.*", "".join(cell["source"]), re.M)
        execute({**cell, "source": "\n".join(lines)}, dict(names), lambda command: commands.append(command) or 0)
    words = [shlex.split(command) for command in commands]
    assert {each[1] for each in words if each[0] == "simpletune"} == {
        "doctor", "train", "generate", "data", "estimate", "report",
    }  # fmt: skip
    for each in words:
        if each[:2] == ["python", "-m"]:
            assert each[2] == "benchmarks.first_hour" and first_hour.main([*each[3:], "--dry-run"]) == 0
        if each[0] != "simpletune":
            continue
        args = parse(each[1:])
        if getattr(args, "config", None) is not None:
            read_config(args.config, args.overrides, needs_data=False, needs_model=False)


def test_what_a_card_measured_is_packed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of doctor --bench under its own name, and the first hour's folder with its logs; nothing else."""
    (cell,) = (cell for cell in CODE if "card.zip" in "".join(cell["source"]) and "colab" not in tags(cell))
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / first_hour.folder_of("Tesla T4") / "logs"
    logs.mkdir(parents=True)
    mine = ["t4-15gib.json", str(logs / "doctor.log"), str(logs.parent / "stages.json")]
    for name in (*mine, "constraints.txt", "my.jpg", "benchmarks/results/canary.md"):
        (tmp_path / name).write_text("{}")
    execute(cell, {}, lambda command: pytest.fail(command))
    with ZipFile("card.zip") as archive:
        assert sorted(archive.namelist()) == sorted(os.path.relpath(tmp_path / name) for name in mine)
    assert "gpu-t4/stages.json" in capsys.readouterr().out


def test_the_notebook_is_clean_and_its_cells_are_marked() -> None:
    assert not any(cell["outputs"] or cell["execution_count"] for cell in CODE)
    assert set().union(*map(tags, CODE)) == SKIPPED | {MODEL}
    for cell in CODE:
        text = "".join(cell["source"])
        assert ("google.colab" in text) == ("colab" in tags(cell))
        assert ("notebook_login" in text) <= ("hub" in tags(cell))
        assert bool(re.search("^!(git|pip)", text, re.M)) == ("setup" in tags(cell))
    first, second = (cell for cell in CODE if MODEL in tags(cell))  # the first needs no token
    login = next(number for number, cell in enumerate(CODE) if "notebook_login" in "".join(cell["source"]))
    assert "sdxl" in "".join(first["source"]) and CODE.index(first) < login < CODE.index(second)
    assert any("-c constraints.txt" in "".join(cell["source"]) for cell in CODE)  # keeps the torch that is there


def test_pages_lead_to_the_notebook() -> None:
    for page in ("README.md", "docs/how-to/install.md", "docs/README.md"):
        assert re.search(r"\]\([\w./-]*tutorials/simpletune_colab\.ipynb\)", (ROOT / page).read_text()), page
