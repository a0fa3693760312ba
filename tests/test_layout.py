"""The house rules that can be checked: imports run downward, files and functions stay small, one name for one thing."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "simpletune"
MAX_TOP_LEVEL, MAX_FOLDER = 12, 21
MAX_FILE, MAX_FUNCTION, MAX_NESTING, MAX_ARGUMENTS, MAX_ANY = 350, 60, 4, 6, 150


@functools.cache
def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree_of(file: Path) -> ast.Module:
    """A file's syntax, parsed once for all tests here."""
    return ast.parse(file.read_text())


@pytest.fixture(scope="module", autouse=True)
def trees_are_given_up() -> Iterator[None]:
    yield
    tree_of.cache_clear()


def is_for_type_checkers(node: ast.AST) -> bool:
    """``if TYPE_CHECKING:``"""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@functools.cache
def room_of(module: str) -> str:
    """The folder that a module lives in, or a top-level module itself: ``simpletune.data.plan`` -> ``data``."""
    file = PACKAGE.joinpath(*module.split(".")[1:])
    return module if file.is_dir() or len(module.split(".")) == 2 else module.rpartition(".")[0]


@functools.cache
def is_module(name: str) -> bool:
    return ROOT.joinpath(*name.split(".")).with_suffix(".py").exists()


def imports_of(file: Path, for_types: bool = False) -> Iterator[str]:
    """Modules of the package and the benchmarks that a file imports, late imports included.

    Args:
        for_types: also those for type checkers alone.
    """
    nodes = list(ast.walk(tree_of(file)))
    blocks = () if for_types else filter(is_for_type_checkers, nodes)
    free = {id(inner) for block in blocks for inner in ast.walk(block)}
    for node in nodes:
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] in ("simpletune", "benchmarks")
            and id(node) not in free
        ):
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield name if is_module(name) else str(node.module)


def test_no_cycle_between_folders() -> None:
    graph: dict[str, set[str]] = {}
    for file in modules():
        here = room_of(".".join(file.relative_to(ROOT).with_suffix("").parts))
        graph.setdefault(here, set()).update(room for room in map(room_of, imports_of(file)) if room != here)
    list(TopologicalSorter(graph).static_order())  # a CycleError names the folders


def test_no_circle_of_files() -> None:
    """Imports for type checkers alone count: what they name must be read to understand the file."""
    graph: dict[str, set[str]] = {}
    for file in (*modules(), *(ROOT / "benchmarks").glob("*.py")):
        here = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[here] = {name for name in imports_of(file, for_types=True) if name != here}
    list(TopologicalSorter(graph).static_order())  # a CycleError names the files


def test_rooms_are_small_and_say_what_they_hold() -> None:
    for folder in {file.parent for file in modules()}:
        assert len(list(folder.glob("*.py"))) <= (MAX_TOP_LEVEL if folder == PACKAGE else MAX_FOLDER), folder
        assert ast.get_docstring(tree_of(folder / "__init__.py")), folder


def functions(file: Path) -> list[tuple[str, int, int]]:
    """(name, lines, nesting) of every function."""
    return [
        (f"{file.stem}.{node.name}", (node.end_lineno or 0) - node.lineno + 1, nesting(node))
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef)
    ]


def nesting(node: ast.AST, depth: int = 0) -> int:
    blocks = (ast.If, ast.For, ast.While, ast.With, ast.Try)
    within = (child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.excepthandler)))
    return max((nesting(child, depth + isinstance(child, blocks)) for child in within), default=depth)


def test_files_and_functions_stay_small() -> None:
    files = sorted(((len(file.read_text().splitlines()), file.name) for file in modules()), reverse=True)
    worst = sorted((f for file in modules() for f in functions(file)), key=lambda f: -f[1])
    print(f"longest files: {files[:3]}; longest functions: {worst[:3]}")
    assert [file for file in files if file[0] > MAX_FILE] == []
    assert [f for f in worst if f[1] > MAX_FUNCTION] == []
    assert [f for f in worst if f[2] > MAX_NESTING] == []


def test_no_file_is_named_after_nothing() -> None:
    names = {file.stem for file in modules()}
    assert not names & {"utils", "util", "common", "helpers", "misc", "manager"}


def test_functions_take_few_arguments() -> None:
    many = [
        f"{file.stem}.{node.name}"
        for file in (*modules(), *(ROOT / "benchmarks").rglob("*.py"))
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef) and len(arguments(node)) > MAX_ARGUMENTS
    ]
    assert many == []


def arguments(node: ast.FunctionDef) -> list[str]:
    """A function's arguments; of those that PyTorch and Triton call with one argument a tensor, none."""
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    called_by_libraries = names[:1] == ["ctx"] or any("jit" in ast.unparse(each) for each in node.decorator_list)
    return [] if called_by_libraries else [name for name in names if name not in ("self", "cls")]


def test_any_is_rare() -> None:
    """It says that a type really is open: a JSON object, autograd's context."""
    folders = [*modules(), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "inference").glob("*.py")]
    used = sum(isinstance(node, ast.Name) and node.id == "Any" for file in folders for node in ast.walk(tree_of(file)))
    print(f"Any stands {used} times")
    assert used <= MAX_ANY
