"""A pytest plugin (``make durations``): which tests and files take most processor time, even on a busy machine.

Counts set-up, call and tear-down, with child processes that have ended. Shared fixtures count where they are made,
shared processes where they end.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

SHOWN = 60
SECONDS: dict[str, float] = defaultdict(float)  # by test
FOUND = pytest.StashKey[dict[str, float]]()  # of the workers that have ended


def processor_seconds() -> float:
    """What this process and its ended children have used, in user and system mode."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def _counted(item: pytest.Item) -> Iterator[None]:
    before = processor_seconds()
    yield
    SECONDS[item.nodeid] += processor_seconds() - before


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _counted


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands its seconds to the process that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["processor_seconds"] = dict(SECONDS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker counted."""
    node.config.stash.setdefault(FOUND, {}).update(getattr(node, "workeroutput", {}).get("processor_seconds", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the tables."""
    tests = SECONDS | config.stash.get(FOUND, {})
    files: dict[str, float] = defaultdict(float)
    for name, seconds in tests.items():
        files[name.partition("::")[0]] += seconds
    for title, table in (("files", files), ("tests", tests)):
        terminalreporter.section(f"processor seconds of {title}, {sum(table.values()):.0f} in all")
        for name, seconds in sorted(table.items(), key=lambda row: -row[1])[:SHOWN]:
            terminalreporter.write_line(f"{seconds:7.1f}  {name}")
