"""Printed commands can be pasted, wherever the program is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from simpletune.system.shell import to_paste


def program(folder: Path) -> Path:
    folder.mkdir(parents=True)
    file = folder / "simpletune"
    file.touch(0o755)
    return file


def test_a_program_that_is_not_on_path_is_named_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = program(tmp_path / ".venv" / "bin"), program(tmp_path / "bin")
    monkeypatch.setattr(sys, "executable", str(ours.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert to_paste("simpletune", "check", Path("my dog.json")) == ".venv/bin/simpletune check 'my dog.json'"
    assert to_paste("tensorboard", "--logdir", "profiles") == "tensorboard --logdir profiles"  # is not there
    monkeypatch.setenv("PATH", str(other.parent))  # another installation's
    assert to_paste("simpletune", "doctor") == ".venv/bin/simpletune doctor"
    monkeypatch.chdir(other.parent)
    assert to_paste("simpletune", "doctor") == f"{ours} doctor"
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "simpletune").symlink_to(ours)
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert to_paste("simpletune", "doctor") == "simpletune doctor"
