"""No field of the configuration is without a reader: whatever one sets, some code outside the checks asks for it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from benchmarks.field_values import schema_fields
from simpletune.config.schema import TrainConfig

PACKAGE = Path(__file__).resolve().parents[2] / "simpletune"
CHECKS = ("problems", "rules")  # methods that only refuse
WITHOUT = {  # fields that change neither the plan, nor the loss, nor a file, and why
    "schema_": "names the JSON schema, for editors",
    "about": "words for people, which check prints",
}
BY_NAME = {  # read by a name that code builds
    "d0": "an argument of the optimizer", "d_coef": "an argument of the optimizer",
    "r": "an argument of the optimizer", "weight_lr_power": "an argument of the optimizer",
    "transformer": "the denoiser, whose name the family has", "unet": "the denoiser, whose name the family has",
}  # fmt: skip


def readers() -> dict[str, set[str]]:
    """The functions that load an attribute, by its name; without those that check a configuration."""
    found = defaultdict[str, set[str]](set)

    def visit(node: ast.AST, place: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.strip("_").endswith(CHECKS):
                return
            place = f"{place.partition('#')[0]}#{node.name}"
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found[node.attr].add(place)
        for child in ast.iter_child_nodes(node):
            visit(child, place)

    for file in PACKAGE.rglob("*.py"):
        if file.name not in ("check.py", "error_text.py"):
            visit(ast.parse(file.read_text(encoding="utf-8")), file.relative_to(PACKAGE).as_posix())
    return found


def test_every_field_is_read_outside_the_checks() -> None:
    known, found = set(schema_fields(TrainConfig)), readers()
    names = {name for _, name in known}
    assert len(names) > 200
    unread = sorted(f"{owner}.{name}" for owner, name in known if not found[name])
    assert {each.partition(".")[2] for each in unread} <= WITHOUT.keys() | BY_NAME.keys(), unread
    assert WITHOUT.keys() | BY_NAME.keys() <= names
