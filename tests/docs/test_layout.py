"""The twelve rooms: imports point down their list, no files form a circle, every package says what it answers."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from imports import Import, imports_in, imports_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "simpletune"
ROOMS = "apps commands training estimate runs stages config adapters data models engine system".split()


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package and of the benchmarks by its dotted name; a package under its own name."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files)
    return dict(zip(names, files, strict=True))


def targets_of(name: str, nodes: Iterable[Import], among: Collection[str]) -> Iterator[str]:
    """Modules that a module's import statements name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            assert not node.level, f"{name}: a relative import"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        for target in found:
            while target and target not in among:
                target = target.rpartition(".")[0]
            if target and target != name:
                yield target


def room_of(name: str) -> str | None:
    """``simpletune.data.plan`` -> ``data``; None for the package itself and ``__main__``."""
    room = [*name.split("."), ""][1]
    return room if room in ROOMS else None


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports that point up the list of rooms."""
    return [
        f"{name} imports {target}"
        for name, targets in graph.items()
        for target in targets
        if (here := room_of(name)) and (there := room_of(target)) and ROOMS.index(there) < ROOMS.index(here)
    ]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle of files that import one another, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@functools.cache
def graph() -> dict[str, set[str]]:
    """What each module imports, late and for type checkers, too."""
    return {name: set(targets_of(name, imports_of(file), modules())) for name, file in modules().items()}


def test_imports_are_those_that_python_reads() -> None:
    text = (
        '"""import nothing at all\n\nfrom here on"""\nimport a, b.c as d  # (e)\nfrom f import (  # g(\n    h,\n)\n'
        "if k:\n    from . import l\n\n\ndef m():\n    import n.o, \\\n        p\n    from q.r import *\nimported = s\n"
    )
    tree = ast.parse(text)
    expected = [ast.dump(node) for node in ast.walk(tree) if isinstance(node, Import)]
    assert sorted(map(ast.dump, imports_in(text))) == sorted(expected) and len(expected) == 5
    assert [*map(ast.dump, imports_in(text, indented=False))] == expected[:2]


def test_the_package_has_these_rooms_and_nothing_beside_them() -> None:
    folders = {folder.name for folder in PACKAGE.iterdir() if any(folder.glob("**/*.py")) and folder.is_dir()}
    assert folders == set(ROOMS)
    assert {file.name for file in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_imports_point_down_the_list_of_rooms() -> None:
    assert upward({name: targets for name, targets in graph().items() if name.startswith("simpletune.")}) == []


def test_no_circle_of_files() -> None:
    assert circle(graph()) == []


def with_packages(name: str, targets: set[str]) -> set[str]:
    """Imported modules, and the packages that they are in: Python runs a package's ``__init__`` first."""
    packages = {target.rsplit(".", count)[0] for target in targets for count in range(1, target.count(".") + 1)}
    return targets | {package for package in packages if not f"{name}.".startswith(f"{package}.")}


def test_any_module_can_be_imported_first() -> None:
    first = {
        name: set(targets_of(name, imports_of(file, indented=False), modules())) for name, file in modules().items()
    }
    assert circle({name: with_packages(name, targets) for name, targets in first.items()}) == []
    assert circle({"p": {"p.a"}, "p.a": with_packages("p.a", {"q"}), "q": with_packages("q", {"p.b"}), "p.b": set()})


def test_an_upward_import_and_a_circle_are_noticed() -> None:
    texts = {
        "simpletune.engine.a": "def late():\n    from simpletune.data import b",
        "simpletune.data": "",
        "simpletune.data.b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import simpletune.engine.a",
    }
    made = {name: set(targets_of(name, imports_in(text), texts)) for name, text in texts.items()}
    assert upward(made) == ["simpletune.engine.a imports simpletune.data.b"]
    assert set(circle(made)) == {"simpletune.engine.a", "simpletune.data.b"}


def test_every_package_says_what_it_answers() -> None:
    silent = [file for file in PACKAGE.rglob("__init__.py") if not ast.get_docstring(ast.parse(file.read_text()))]
    assert silent == []


def test_tests_lie_where_the_package_has_what_they_test() -> None:
    tests = ROOT / "tests"
    beside = {"benchmarks", "docs", "gpu", "reference", "releases", "support", "trainings"}
    folders = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")}
    assert {folder.parts[0] for folder in folders} <= {*ROOMS, *beside}
    rooms = [folder for folder in folders if folder.parts[0] in ROOMS]
    assert [str(folder) for folder in rooms if not (PACKAGE / folder).is_dir()] == []
    names = [file.name for file in tests.rglob("test_*.py")]
    assert len(names) == len(set(names)), "pytest imports test modules by their bare names"


def test_no_file_is_named_after_nothing() -> None:
    names = {file.stem for file in modules().values()}
    assert not names & {"utils", "util", "common", "helpers", "misc", "manager"}
