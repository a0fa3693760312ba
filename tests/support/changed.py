"""A pytest plugin (``./test.sh --changed [BASE]``): run the tests that a change since BASE can concern.

They are chosen by the last map of lines to tests (line_map.py), which may be older than BASE: lines are shifted by the
difference. What the map does not know runs whole: files of tests that are new or changed, or that import a changed
helper or benchmark; every file, where something changed that is no Python. A line that runs when its module is imported
(a constant, a default) concerns the tests of every module that imports it. What child processes run is in no map: the
whole suite, which the integration server runs, has the last word.
"""

from __future__ import annotations

import ast
import subprocess
import time
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path

import pytest
from line_map import ROOT, LineMap, last_map

HOW = "make map makes one"
EVERY_TEST = ("tests/conftest.py", "pyproject.toml")


def differing(old: str, new: str) -> Iterator[tuple[range, range]]:
    """Where two texts differ: line numbers of the old one and of the new one, either of which may be empty."""
    matcher = SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            yield range(a + 1, b + 1), range(c + 1, d + 1)


def changed_lines(old: str, new: str) -> set[int]:
    """The lines of the old text that a change concerns; of lines that were only added, those on both sides."""
    found: set[int] = set()
    for before, _ in differing(old, new):
        found.update(before or (before.start - 1, before.start))
    return found & set(range(1, len(old.splitlines()) + 1))


def shifted(lines: set[int], old: str, mapped: str) -> set[int]:
    """Lines of the old text as lines of the mapped one; where both differ, all that differ there."""
    found: set[int] = set()
    moved = last = 0
    for there, here in differing(mapped, old):
        found.update(line + moved for line in lines if last < line < here.start)
        if not lines.isdisjoint(here):
            found.update(there or (there.start - 1, there.start))
        moved, last = there.stop - here.stop, here.stop - 1
    found.update(line + moved for line in lines if line > last)
    return found & set(range(1, len(mapped.splitlines()) + 1))


def functions(code: str) -> list[range]:
    """The lines of each function's body, those of inner functions after their outer ones."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sorted(
        (range(node.body[0].lineno, (node.end_lineno or 0) + 1) for node in nodes),
        key=lambda lines: (lines.start, -lines.stop),
    )


def imported(code: str) -> set[str]:
    """The names of modules that a text imports, anywhere; of ``from a import b`` both ``a`` and ``a.b``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


def names_of(file: str) -> set[str]:
    """The names by which a Python file can be imported; a helper of tests by any ending of its path."""
    path = Path(file).with_suffix("")
    parts = path.parent.parts if path.name == "__init__" else path.parts
    starts = range(len(parts)) if parts[0] == "tests" else (0,)
    return {".".join(parts[start:]) for start in starts}


class Selection:
    """Which tests a change concerns.

    Args:
        root: the tree's.
        mapped: the map, or None: then every test.
        base: a commit; its tree is compared with the working tree.

    Attributes:
        why_all: the reason why every test is chosen, or None.
        changed: the files that differ.
        files: files of tests that run whole.
        tests: further tests.
    """

    def __init__(self, root: Path, mapped: LineMap | None, base: str):
        self.root, self.mapped, self.base = root, mapped, base
        self.files: set[str] = set()
        self.tests: set[str] = set()
        self.why_all: str | None = None
        self.changed = self._changed()
        if mapped is None:
            self.why_all = f"there is no map of lines to tests ({HOW})"
            return
        for file in self.changed:
            self._add(file, mapped)

    def holds(self, test: str) -> bool:
        """Whether a test runs: one that is chosen, or that the map does not know."""
        if self.why_all is not None or test in self.tests or test.partition("::")[0] in self.files:
            return True
        return self.mapped is None or test not in self.mapped.times

    def _git(self, *words: str) -> str:
        done = subprocess.run(["git", *words], cwd=self.root, capture_output=True, text=True)
        if done.returncode:
            raise pytest.UsageError(f"--changed {self.base}: {done.stderr.strip() or 'git fails'}")
        return done.stdout

    def _changed(self) -> list[str]:
        tracked = self._git("diff", "--name-only", "--no-renames", "-z", self.base, "--")
        new = self._git("ls-files", "--others", "--exclude-standard", "-z")
        return sorted({name for name in (tracked + new).split("\0") if name})

    def _before(self, file: str) -> str:
        """A file's text at the base; empty if it was not there."""
        done = subprocess.run(["git", "show", f"{self.base}:{file}"], cwd=self.root, capture_output=True, text=True)
        return done.stdout

    def _now(self, file: str) -> str:
        path = self.root / file
        return path.read_text() if path.is_file() else ""

    def _add(self, file: str, mapped: LineMap) -> None:
        if file in EVERY_TEST:
            self.why_all = f"{file} has changed"
        elif file.startswith("docs/") or file.endswith(".md"):
            self.files.update(f for f in self._tests if f.startswith("tests/docs/") or Path(file).name in self._now(f))
        elif not file.endswith(".py"):
            self.why_all = f"{file} has changed, which is no Python"
        elif file.startswith("simpletune/"):
            self._add_module(file, mapped)
        else:
            self._add_importers(file)

    def _add_module(self, file: str, mapped: LineMap) -> None:
        """The tests that run a changed line; of one that runs at import, those of all modules that import it."""
        before, source = self._before(file), mapped.source(file)
        if source is None:
            self._add_importers(file)
            return
        lines = shifted(changed_lines(before, self._now(file)), before, source)
        lines_of, bodies = mapped.lines_by_test(file), functions(source)
        at_import = lines - {line for body in bodies for line in body}
        for line in lines - at_import:
            ran = {test for test, own in lines_of.items() if line in own}
            body = max((body for body in bodies if line in body), key=lambda body: body.start)
            self.tests |= ran or {test for test, own in lines_of.items() if not own.isdisjoint(body)}
        if at_import:
            self.tests |= set(lines_of)
            for importer, imports in self._imports.items():
                if importer.startswith("simpletune/") and names_of(file) & imports:
                    self.tests |= set(mapped.lines_by_test(importer))
            self._add_importers(file)

    def _add_importers(self, file: str) -> None:
        """The files of tests among a file and those that import it, over any number of helpers; by their text."""
        waiting, seen = [file], {file}
        while waiting:
            names = names_of(one := waiting.pop())
            if one in self._tests:
                self.files.add(one)
            for importer, imports in self._imports.items():
                if importer not in seen and not importer.startswith("simpletune/") and names & imports:
                    seen.add(importer)
                    waiting.append(importer)

    @cached_property
    def _imports(self) -> dict[str, set[str]]:
        folders = ("simpletune", "tests", "benchmarks", "docs", "inference")
        files = [file for folder in folders for file in (self.root / folder).rglob("*.py")]
        return {file.relative_to(self.root).as_posix(): imported(file.read_text()) for file in files}

    @cached_property
    def _tests(self) -> frozenset[str]:
        return frozenset(file for file in self._imports if Path(file).name.startswith("test_"))

    def words(self, chosen: int, left_out: int) -> str:
        """What is run, and by which map."""
        files = f"{len(self.changed)} {'file' if len(self.changed) == 1 else 'files'}"
        head = f"changed since {self.base}: {files}; {chosen} tests run, {left_out} are left out"
        if self.why_all is not None:
            return f"{head}: {self.why_all}"
        assert self.mapped is not None
        hours = (time.time() - self.mapped.made) / 3600
        age = f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.0f} days"
        return f"{head}. The map is of {self.mapped.commit}, {age} old ({HOW})"


# What pytest calls


SELECTION = pytest.StashKey[Selection]()
COUNTS = pytest.StashKey[list[int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed-since", metavar="BASE", default="HEAD", help="a commit (default: HEAD)")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SELECTION] = Selection(ROOT, last_map(), config.getoption("--changed-since"))
    config.stash[COUNTS] = [0, 0]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the change does not concern, of the tests that the markers leave."""
    selection = config.stash[SELECTION]
    chosen = [item for item in items if selection.holds(item.nodeid)]
    left_out = [item for item in items if not selection.holds(item.nodeid)]
    config.stash[COUNTS][:] = [len(chosen), len(left_out)]
    items[:] = chosen
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Every worker has collected all tests and hands its counts on. That nothing is chosen is no failure."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["changed"] = session.config.stash[COUNTS]
    elif session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash[COUNTS][1]:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    config = node.config  # type: ignore[attr-defined]
    config.stash[COUNTS][:] = getattr(node, "workeroutput", {}).get("changed", config.stash[COUNTS])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and by which map."""
    terminalreporter.write_line(config.stash[SELECTION].words(*config.stash[COUNTS]))
