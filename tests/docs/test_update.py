"""update.sh in a clone of a made-up repository, and in a folder that is none; set-up and the package are stand-ins."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP = 'simpletune_setup() { echo "set-up of ${1##*/} for $2"; }\n'
PYTHON = '#!/bin/sh\n[ "$3" = --version ] && echo "simpletune $(cat simpletune/version)"\n'
OLD = "# Changelog\n\n## Unreleased\n\n- Old news.\n"
NEWS = ["- **Cards** are named: all of\n  them.", "- A long line that goes on after\n  its end", "- Short."]


def git(folder: Path, *words: str) -> str:
    names = ["-c", "user.name=x", "-c", "user.email=x@y"]
    done = subprocess.run(["git", "-C", folder, *names, *words], capture_output=True, text=True, check=True)
    return done.stdout


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def newer(folder: Path) -> None:
    """Make a folder hold the next version."""
    write(folder, {"simpletune/version": "2", "CHANGELOG.md": OLD.replace("- Old", "\n".join([*NEWS, "- Old"]))})
    (folder / "simpletune" / "gone.py").unlink()
    if (folder / ".git").exists():
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "next")
        git(folder, "push", "-q")


def update(folder: Path, *words: str, status: int = 0) -> str:
    done = subprocess.run([folder / "update.sh", *words], capture_output=True, text=True, cwd=folder.parent)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the first version, of a developer who pushes."""
    folder = tmp_path / "source"
    files = {"simpletune/setup.sh": SETUP, "simpletune/version": "1", "simpletune/gone.py": "", "pyproject.toml": "",
             "CHANGELOG.md": OLD, "configs/shipped.json": "{}", ".gitignore": ".venv\nruns\n"}  # fmt: skip
    write(folder, files)
    shutil.copy(ROOT / "update.sh", folder)
    return folder


def use(folder: Path) -> Path:
    """Add what a user's folder has: an environment, a run, a configuration."""
    write(folder, {".venv/bin/python": PYTHON, ".venv/.simpletune-installed-dev": "stamp"})
    write(folder, {"configs/mine.json": "mine", "runs/dog/summary.json": "{}"})
    (folder / ".venv/bin/python").chmod(0o755)
    return folder


@pytest.fixture
def clone(source: Path, tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "--bare", "-b", "main", "remote.git")
    git(source, "init", "-q", "-b", "main")
    git(source, "add", "-A")
    git(source, "commit", "-qm", "first")
    git(source, "remote", "add", "origin", str(tmp_path / "remote.git"))
    git(source, "push", "-qu", "origin", "main")
    git(tmp_path, "clone", "-q", "remote.git", "clone")
    return use(tmp_path / "clone")


@pytest.fixture
def plain(source: Path, tmp_path: Path) -> Path:
    """A folder that came as a zip file."""
    return use(Path(shutil.copytree(source, tmp_path / "plain")))


def test_a_clone_is_pulled_its_environment_renewed_and_the_news_told(clone: Path, source: Path) -> None:
    assert "nothing new" in update(clone)
    newer(source)
    said = update(clone)
    for words in ("before: simpletune 1", "after: simpletune 2", "set-up of clone for dev"):
        assert words in said
    assert "  - **Cards** are named\n  - A long line that goes on after ...\n  - Short\nset-up" in said
    assert not (clone / ".venv/.simpletune-installed-dev").exists()  # so that set-up installs the new version
    assert (clone / "runs/dog/summary.json").exists() and not (clone / "simpletune/gone.py").exists()
    assert "nothing new" in update(clone)


def unchanged(clone: Path, *words: str) -> str:
    before = git(clone, "rev-parse", "HEAD")
    said = update(clone, *words, status=2)
    assert git(clone, "rev-parse", "HEAD") == before
    assert "set-up" not in said and (clone / ".venv/.simpletune-installed-dev").exists()
    return said


def test_local_changes_commits_and_files_in_the_way_stop_it(clone: Path, source: Path) -> None:
    write(source, {"notes.txt": "theirs"})
    newer(source)
    (clone / "CHANGELOG.md").write_text("mine")
    said = unchanged(clone)
    assert "        CHANGELOG.md\n" in said and "git stash" in said
    git(clone, "restore", ".")
    write(clone, {"notes.txt": "mine"})
    assert "notes.txt" in unchanged(clone) and (clone / "notes.txt").read_text() == "mine"
    (clone / "notes.txt").unlink()
    git(clone, "commit", "-qm", "mine", "--allow-empty")
    assert "git rebase origin/main" in unchanged(clone)
    git(clone, "switch", "-qc", "topic")
    assert "the branch topic follows no other" in unchanged(clone)


def test_without_a_network_nothing_changes(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "remote.git").rename(tmp_path / "away.git")
    said = unchanged(clone)
    assert f"{tmp_path}/remote.git could not be reached" in said and "Check the network" in said


@pytest.fixture
def running(clone: Path) -> Iterator[Path]:
    """A run that holds its lock."""
    file = clone / "runs" / ".dog.lock"
    file.write_text("4711\n")
    with file.open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield clone


def test_a_run_that_runs_is_named_and_stops_it_unless_forced(running: Path, source: Path) -> None:
    newer(source)
    said = unchanged(running)
    assert "the run dog (process 4711)" in said and "--resume auto" in said
    assert "after: simpletune 2" in update(running, "--force")


def test_a_page_that_is_open_stops_it(clone: Path, source: Path) -> None:
    newer(source)
    python = str(clone / ".venv/bin/python")  # as the process names itself
    write(clone, {"simpletune/__main__.py": "import time\ntime.sleep(60)\n"})
    page = subprocess.Popen([python, "-m", "simpletune", "web"], executable=sys.executable, cwd=clone)
    try:
        assert f"simpletune web (process {page.pid})" in unchanged(clone)
    finally:
        page.kill()
        page.wait()


def test_a_folder_that_is_no_clone_takes_a_newer_copy(plain: Path, source: Path) -> None:
    assert "Download and unpack" in update(plain, status=2)
    newer(source)
    write(source, {"configs/shipped.json": '{"new": 1}', "runs/other/x": "", ".venv/broken": ""})
    write(source, {"configs/more/moved.json": "new", "configs/more/other.json": "new"})
    write(plain, {"configs/moved.json": "edited", "configs/more/other.json": "edited"})
    said = update(plain, "source")  # relative to the caller's folder
    assert "before: simpletune 1" in said and "after: simpletune 2" in said and "  - Short\n" in said
    assert not (plain / "simpletune/gone.py").exists() and not (plain / "runs/other").exists()
    assert (plain / "configs/mine.json").read_text() == "mine" and (plain / "runs/dog").exists()
    assert (plain / "configs/shipped.json.old").read_text() == "{}" and not (plain / ".venv/broken").exists()
    folder = plain / "configs"
    held = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*.json*")}
    assert held.items() >= {"moved.json.old": "edited", "more/moved.json": "new", "more/other.json": "new"}.items()
    assert held["more/other.json.old"] == "edited" and "moved.json" not in held
    assert not (plain / ".update.new").exists()


def test_a_copy_that_is_none_or_cannot_be_read_changes_nothing(plain: Path, source: Path, tmp_path: Path) -> None:
    assert "is no copy of simpletune" in update(plain, str(tmp_path), status=2)
    assert "nowhere is not a folder" in update(plain, "nowhere", status=2)
    newer(source)
    (source / "held").write_text("")
    tar = shutil.which("tar")
    held = 'case "$*" in *-cf*) echo "tar: ./held: Cannot open" >&2; exit 2;; esac'
    write(tmp_path, {"bin/tar": f'#!/bin/sh\n{tar} "$@" || exit\n{held}\n'})  # as where a virus scanner holds a file
    (tmp_path / "bin/tar").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        said = update(plain, str(source), status=2)
    assert "./held: Cannot open" in said and "virus scanner" in said
    assert (plain / "simpletune/version").read_text() == "1" and not (plain / ".update.new").exists()
