"""Which fast test runs which line of the package: found by one run of the suite, kept in .mutants/.

    make map        or: python tests/support/line_map.py

``make mutants`` and ``./test.sh --changed`` read the map. It lacks what child processes run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from coverage.numbits import numbits_to_nums

ROOT = Path(__file__).resolve().parents[2]
STORE = ".mutants"  # in the tree that is mapped
MAPPED = ("simpletune", "tests", "benchmarks")  # whose sources are kept beside the map
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class LineMap:
    """A map that was made.

    Args:
        folder: with ``coverage`` (a database), ``times.json`` (seconds by test), ``commit`` and ``sources/``.
    """

    folder: Path

    @cached_property
    def times(self) -> dict[str, float]:
        """Seconds of each test that passed."""
        found: dict[str, float] = json.loads((self.folder / "times.json").read_text())
        return found

    @cached_property
    def data(self) -> sqlite3.Connection:
        return sqlite3.connect(self.folder / "coverage")

    @property
    def commit(self) -> str:
        """What git calls the tree that was mapped."""
        return (self.folder / "commit").read_text().strip()

    @property
    def made(self) -> float:
        """When it was made, in seconds since 1970."""
        return (self.folder / "times.json").stat().st_mtime

    def source(self, file: str) -> str | None:
        """The text of a file, named from the tree's root, as it was mapped; None if it was not there."""
        place = self.folder / "sources" / file
        return place.read_text() if place.is_file() else None

    def lines_by_test(self, file: str) -> dict[str, set[int]]:
        """The lines of a module of the package that each test runs. Lines that only its import runs are in none."""
        rows = self.data.execute(
            "SELECT context.context, line_bits.numbits FROM line_bits JOIN file ON file.id = line_bits.file_id "
            "JOIN context ON context.id = line_bits.context_id WHERE file.path LIKE ?",
            (f"%{file}",),
        )
        found: dict[str, set[int]] = {}
        for context, bits in rows:
            test = context.partition("|")[0]
            if test in self.times:
                found.setdefault(test, set()).update(numbits_to_nums(bits))
        return found


def source_state(root: Path = ROOT) -> str:
    """A name for the state of the package and its tests."""
    found = hashlib.sha256()
    for folder in ("simpletune", "tests"):
        for file in sorted((root / folder).rglob("*.py")):
            found.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return found.hexdigest()[:16]


def last_map(root: Path = ROOT) -> LineMap | None:
    """The newest map of a tree, or None."""
    maps = [LineMap(times.parent) for times in (root / STORE).glob("*/times.json")]
    return max((each for each in maps if (each.folder / "commit").exists()), key=lambda each: each.made, default=None)


def current_map(root: Path = ROOT) -> LineMap:
    """The map of the tree as it is; makes it if there is none, by one run of the fast suite.

    Raises:
        SystemExit: the suite did not run.
    """
    folder = root / STORE / source_state(root)
    if not (folder / "times.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in MAPPED:
            shutil.copytree(root / name, folder / "sources" / name, ignore=_no_python)
        described = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        commit = subprocess.run(described, cwd=root, capture_output=True, text=True).stdout
        (folder / "commit").write_text(commit or "a tree without git")
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
        command += ["--cov=simpletune", "--cov-context=test", "--cov-report=", f"--junitxml={report}"]
        done = subprocess.run(command, cwd=root, env=ENVIRONMENT | {"COVERAGE_FILE": str(folder / "coverage")})
        if done.returncode not in (0, 1):  # 1: some failed, which measuring slows down; they count as unknown
            raise SystemExit(f"the tests were not run: exit status {done.returncode}")
        (folder / "times.json").write_text(json.dumps(dict(passed(report))))
    return LineMap(folder)


def _no_python(folder: str, names: list[str]) -> set[str]:
    """What is not copied: caches, and files that are no Python."""
    there = Path(folder)
    return {name for name in names if name == "__pycache__" or ((there / name).is_file() and not name.endswith(".py"))}


def passed(report: Path) -> Iterator[tuple[str, float]]:
    """The tests that passed by pytest's report in XML, and their seconds."""
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").replace(".", "/") + ".py"
        if case.find("failure") is None and case.find("error") is None:
            yield f"{module}::{case.get('name')}", float(case.get("time", 0))


if __name__ == "__main__":
    made = current_map()
    print(f"{len(made.times)} tests of {made.commit} are mapped in {made.folder}")
