"""The Dockerfile, as far as it can be checked without an engine: what it copies is there, and is enough to run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copies() -> list[tuple[list[str], str]]:
    """(sources, destination) of every COPY."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    words = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    return [(each[:-1], each[-1]) for each in words]


def test_every_copied_file_exists_and_passes_the_dockerignore_and_the_first_are_enough_to_install() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [source.rstrip("/") for group, _ in copies() for source in group]
    assert len(sources) >= 8
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(
            source == entry or source.startswith(f"{entry}/") or entry.startswith(f"{source}/") for entry in allowed
        )
    project = (ROOT / "pyproject.toml").read_text()
    first = {Path(source).name for group, _ in copies()[:2] for source in group}
    assert {"pyproject.toml", "setup.sh", "__init__.py"} <= first
    licence = re.search(r'license-files = \["(\w+)"\]', project)
    assert licence is not None and licence[1] in first
    assert "readme" not in project


def test_the_image_has_all_that_the_command_line_needs(tmp_path: Path) -> None:
    """Its /simpletune is made as the COPY lines say."""
    folder = tmp_path / "simpletune"
    for sources, destination in copies():
        target = folder / destination
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, target)
    assert 'CMD ["./train.sh"]' in (ROOT / "Dockerfile").read_text()
    assert (folder / "train.sh").stat().st_mode & 0o100
    inference = {file.name for file in (folder / "inference").iterdir()}
    assert {"base_inference.py", "lora_inference.py", "full_model_inference.py", "compare.py"} <= inference
    enter = f"import sys; sys.path.insert(0, {str(folder)!r}); from simpletune.apps.cli.main import main"
    for command in (["check", "configs/demo.json"], ["--help"]):
        words = [sys.executable, "-I", "-c", f"{enter}; sys.exit(main({command!r}))"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
