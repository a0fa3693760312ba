"""Find every call of a program that orders the device's work, and remove one from the running program.

A call counts if its last name is one of ``ORDERING``: it records an event, waits for one, or waits for the device.
Names of a program's own wrappers can be added, and attributes that hold events, which count as elements of a list that
is passed on to be waited for. When removed, either gives None, and a call's arguments are not evaluated.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ORDERING = frozenset({"record", "record_event", "record_stream", "wait_event", "wait_stream", "synchronize"})


@dataclass(frozen=True)
class Call:
    """A call in a source file.

    Args:
        module: the module's name.
        function: the qualified name of the function that makes it.
        line: where it begins.
        column: where it begins in that line.
        text: the call.
        name: the last name of what is called, or of the event.
    """

    module: str
    function: str
    line: int
    column: int
    text: str
    name: str


class _Finder(ast.NodeVisitor):
    def __init__(self, module: str, names: Collection[str], events: Collection[str]):
        self.module, self.names, self.events, self.found = module, names, events, list[Call]()
        self._path: list[str] = []

    def _enter(self, node: Any, inner: str) -> None:
        self._path.append(node.name + inner)
        self.generic_visit(node)
        self._path.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node, "")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._enter(node, ".<locals>")

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in self.names and self._path:
            self._add(node, name)
        self.generic_visit(node)

    def visit_List(self, node: ast.List) -> None:
        for element in node.elts:
            if isinstance(element, ast.Attribute) and element.attr in self.events:
                self._add(element, element.attr)
        self.generic_visit(node)

    def _add(self, node: ast.expr, name: str) -> None:
        where = ".".join(self._path).removesuffix(".<locals>")
        self.found.append(Call(self.module, where, node.lineno, node.col_offset, ast.unparse(node), name))


def calls_of(folder: Path, names: Collection[str] = ORDERING, events: Collection[str] = ()) -> list[Call]:
    """Every such call of a package's source, by module and line."""
    found, word = [], re.compile(rf"\b(?:{'|'.join([*names, *events])})\b")
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text()
        if word.search(text) is None:
            continue
        module = ".".join(file.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
        finder = _Finder(module, names, events)
        finder.visit(ast.parse(text))
        found += finder.found
    return sorted(found, key=lambda call: (call.module, call.line, call.column))


class _Remover(ast.NodeTransformer):
    def __init__(self, call: Call):
        self.call, self.removed = call, False

    def visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, (ast.Call, ast.Attribute)):
            return self.generic_visit(node)
        if (node.lineno, node.col_offset) == (self.call.line, self.call.column) and ast.unparse(node) == self.call.text:
            self.removed = True
            return ast.copy_location(ast.Constant(None), node)
        return self.generic_visit(node)


def _code_of(code: CodeType, name: str) -> CodeType:
    """The code object of a qualified name."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for found in inner:
        if found.co_qualname == name:
            return found
    for found in inner:
        if name.startswith(f"{found.co_qualname}."):
            return _code_of(found, name)
    raise LookupError(f"no function {name}")


@contextmanager
def without(call: Call) -> Iterator[None]:
    """The program without one call. Functions that exist already lose it, too; a generator in progress does not."""
    outer = call.function.partition(".<locals>")[0]
    module = importlib.import_module(call.module)
    file = inspect.getsourcefile(module)
    assert file is not None
    remover = _Remover(call)
    tree = remover.visit(ast.parse(Path(file).read_text()))
    assert remover.removed, f"{call} is not in {file}"
    code = _code_of(compile(ast.fix_missing_locations(tree), file, "exec"), outer)
    function: Any = module
    for part in outer.split("."):
        function = inspect.getattr_static(function, part)
    function = getattr(function, "__func__", function)
    function = getattr(function, "fget", None) or inspect.unwrap(function)
    assert isinstance(function, FunctionType)
    before, function.__code__ = function.__code__, code.replace(co_freevars=function.__code__.co_freevars)
    try:
        yield
    finally:
        function.__code__ = before
