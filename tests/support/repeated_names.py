"""Print the public classes and functions that several modules define: one word for two things, or one thing twice?

Run by ``make quality``; it only informs.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "simpletune"


def repeated(package: Path, kind: type[ast.ClassDef] | type[ast.FunctionDef]) -> dict[str, list[str]]:
    """The modules that define a name at their top level, by name, where there are several."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in package.rglob("*.py"):
        module = ".".join(file.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, kind) and not node.name.startswith("_"):
                found[node.name].add(module)
    return {name: sorted(modules) for name, modules in sorted(found.items()) if len(modules) > 1}


if __name__ == "__main__":
    for words, kind in (("classes", ast.ClassDef), ("functions", ast.FunctionDef)):
        names = repeated(PACKAGE, kind)
        print(f"{len(names)} public {words} that several modules define:")
        for name, modules in names.items():
            print(f"  {name}: {', '.join(modules)}")
