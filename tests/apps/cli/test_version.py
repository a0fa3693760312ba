"""``simpletune --version``: versions and cards, by a made-up nvidia-smi, without torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

CODE = """
import atexit, sys
from simpletune.apps.cli.main import main
atexit.register(lambda: print("torch" in sys.modules))
main(["--version"])
"""


@pytest.mark.parametrize(
    ("body", "cards"),
    [
        (None, ["card none: no nvidia-smi"]),
        ("echo 'NVIDIA L4, 580.65.06'; echo 'Tesla T4, 580.65.06'",
         ["card NVIDIA L4, driver 580.65.06", "card Tesla T4, driver 580.65.06"]),
        ("echo NVML: Driver/library version mismatch; exit 18",
         ["card unknown: nvidia-smi says NVML: Driver/library version mismatch"]),
        ("exit 9", ["card unknown: nvidia-smi says nothing"]),
    ],
    ids=["no card", "two cards", "a broken driver", "no word"],
)  # fmt: skip
def test_the_version_names_torch_and_the_cards(
    body: str | None, cards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if body is not None:
        file = tmp_path / "nvidia-smi"
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    first, torch, *rest = done.stdout.splitlines()
    assert first.startswith("simpletune ") and torch == f"torch {version('torch')}"
    assert rest == [*cards, "False"]  # torch is not imported
