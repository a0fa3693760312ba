"""The house rules that can be checked: imports run downward, files and functions stay small, one name for one thing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "simpletune"
# Who may import whom: a module may import from its own layer and from those below (a higher number).
LAYERS = [
    {"__main__", "scripts"},
    {"verbs"},
    {"bench", "serve"},
    {
        "train",
        "generate",
        "explain",
        "generate_arguments",
        "compare",
        "compare_page",
        "studio",
        "push",
        "lora_tools",
    },
    {"lora_metadata"},
    {"setting_up", "tracing", "ledger"},
    {"estimate", "rescue", "finite"},
    {"levers"},
    {"space", "simulate", "simulate_stages", "step_memory", "reading", "problems"},
    {"stand_ins"},
    {"dataset"},
    {
        "validation",
        "summary",
        "checkpoint",
        "resuming",
        "runs",
        "trackers",
        "card",
        "step",
        "places",
        "results",
        "turns",
        "report",
    },
    {"feed", "prepare", "sampling", "loading", "attention"},
    {"config", "devices", "profiling", "flops", "joint_attention", "gelu_table"},
    {"demo", "data", "models", "adapters", "lora_files", "quant", "optim", "memory", "ema"},
    {
        "flow",
        "options",
        "streams",
        "stages",
        "terminal",
        "sheets",
        "disk",
        "locks",
        "compiling",
        "importing",
        "measures",
        "cards",
        "templates",
        "environment",
        "launched",
        "speed",
    },
    {"failpoints", "stopping", "aside", "concealing"},
]
MAX_FILE, MAX_FUNCTION, MAX_NESTING = 320, 60, 4
LONGER = {"setting_up.set_up": "one call that fills the run's fields, one line each"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def top_name(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer_of(name: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if name in layer)


def imported(file: Path) -> set[str]:
    """Top names of the package that a file imports when it is imported; typing-only and late imports are free."""
    tree = ast.parse(file.read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("simpletune"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found - {"__version__"}


@pytest.mark.parametrize("file", modules(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_run_downward(file: Path) -> None:
    if file.name == "__init__.py" and file.parent == PACKAGE:
        return
    here = layer_of(top_name(file))
    upward = [name for name in imported(file) if layer_of(name) < here]
    assert not upward, f"{file.name} (layer {here}) imports {upward} from above"


def functions(file: Path) -> list[tuple[str, int, int]]:
    """(name, lines, nesting) of every function."""
    tree = ast.parse(file.read_text())
    return [
        (f"{file.stem}.{node.name}", (node.end_lineno or 0) - node.lineno + 1, nesting(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]


def nesting(node: ast.AST, depth: int = 0) -> int:
    blocks = (ast.If, ast.For, ast.While, ast.With, ast.Try)
    below = [nesting(child, depth + isinstance(child, blocks)) for child in ast.iter_child_nodes(node)]
    return max(below, default=depth)


def test_files_and_functions_stay_small() -> None:
    files = sorted(((len(file.read_text().splitlines()), file.name) for file in modules()), reverse=True)
    worst = sorted((f for file in modules() for f in functions(file)), key=lambda f: -f[1])
    print(f"longest files: {files[:3]}; longest functions: {worst[:3]}")
    assert [file for file in files if file[0] > MAX_FILE] == []
    assert [f for f in worst if f[1] > MAX_FUNCTION and f[0] not in LONGER] == []
    assert [f for f in worst if f[2] > MAX_NESTING] == []


def test_no_file_is_named_after_nothing() -> None:
    names = {file.stem for file in modules()}
    assert not names & {"utils", "util", "common", "helpers", "misc", "manager"}


def test_the_top_level_is_fixed() -> None:
    for name in ("simpletune", "configs", "profiles", "inference", "tests", "pyproject.toml", "train.sh"):
        assert (ROOT / name).exists()
