"""Write the pages of docs/reference that say what the code says: commands, configuration, other trainers' keys.

    python docs/generate.py            write them (make docs does so, too)
    python docs/generate.py --check    exit 1 if a page is stale

Commands come from argparse, fields from the configuration's schema, keys from the importers' data files. What no code
says stands above the line MARK of each page, and is kept.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from simpletune.apps.cli import main as command_line
from simpletune.commands.importers.importing import TOOLS
from simpletune.commands.importers.translation import trainer_tables
from simpletune.config.load import shipped_files, shipped_names
from simpletune.config.schema import TrainConfig

REFERENCE = Path(__file__).resolve().parent / "reference"
MARK = "<!-- Below this line, docs/generate.py writes this page. -->"
Schema = dict[str, Any]


def cell(text: object) -> str:
    """A text as a cell of a Markdown table."""
    return re.sub(r"\s+", " ", str(text)).strip().replace("|", "\\|")


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(map(cell, row)) + " |"
    yield ""


def commands() -> Iterator[str]:
    """Each verb with its arguments, in the groups of ``simpletune --help``; those of ``lora`` after it."""
    top = command_line.parser().verbs()
    assert top is not None
    for group, names in command_line.VERB_GROUPS.items():
        yield f"## {group[0].upper()}{group[1:]}"
        yield ""
        for name in names:
            verb = top.choices[name]
            yield from command(name, verb)
            for inner, parser in () if (own := verb.verbs()) is None else own.choices.items():
                yield from command(f"{name} {inner}", parser)


def command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """One verb with its arguments."""
    yield f"### {name}"
    yield ""
    yield f"{cell(parser.description)}."
    yield ""
    if rows := list(arguments(parser)):
        yield from table(("argument", "what it does"), rows)


def arguments(verb: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """The arguments of a verb, as its help shows them."""
    formatter = verb._get_formatter()
    for action in verb._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)) or action.help == argparse.SUPPRESS:
            continue
        name = action.metavar or action.dest if not action.option_strings else action.dest.upper()
        values = formatter._format_args(action, str(name)) if action.nargs != 0 else ""
        words = " ".join(filter(None, (", ".join(action.option_strings), values)))
        yield f"`{words}`", formatter._expand_help(action) if action.help else ""


class Fields:
    """The configuration's fields, from its JSON schema; each of its classes once."""

    def __init__(self, schema: Schema):
        self.schema, self.classes = schema, schema["$defs"]
        self.headings: dict[str, str] = {}  # of a class, where its fields are

    def lines(self) -> Iterator[str]:
        top = {name: field for name, field in self.schema["properties"].items() if not self._members(field)}
        yield "## Top level"
        yield ""
        yield from self._table(top, "")
        for name, field in self.schema["properties"].items():
            if members := self._members(field):
                yield f"## {name}"
                yield ""
                yield cell(field.get("description", ""))
                yield ""
                yield from self._classes(name, field, members)

    def _classes(self, path: str, field: Schema, members: list[str]) -> Iterator[str]:
        """The fields of the classes that a field may hold, then of those within them."""
        places = (field, field.get("items", {}), *field.get("anyOf", ()))
        tag = next((each["discriminator"]["propertyName"] for each in places if "discriminator" in each), None)
        inner: list[tuple[str, Schema, list[str]]] = []
        before: dict[str, Schema] = {}  # the fields of members above, by heading
        for name in members:
            properties = self.classes[name]["properties"]
            if name in self.headings:
                yield f"Fields as under [{self.headings[name]}](#{anchor(self.headings[name])})."
                yield ""
                continue
            heading = f"{path}: {properties[tag].get('const', name)}" if tag else path
            self.headings[name] = heading
            if tag or "." in path:
                yield f"### {heading}"
                yield ""
            about = properties[tag].get("description") if tag else self.classes[name].get("description")
            if about and (tag or "." in path):
                yield cell(about)
                yield ""
            own = {key: value for key, value in properties.items() if key != tag}
            for earlier, fields in before.items():
                if same := [key for key in own if own[key] == fields.get(key)]:
                    names = ", ".join(f"`{path}.{key}`" for key in same)
                    yield f"As under [{earlier}](#{anchor(earlier)}): {names}."
                    yield ""
                own = {key: value for key, value in own.items() if key not in same}
            before[heading] = own
            yield from self._table(own, path + ".")
            inner += [
                (f"{path}.{key}", each, found) for key, each in properties.items() if (found := self._members(each))
            ]
        for deeper in inner:
            if any(name not in self.headings for name in deeper[2]):
                yield from self._classes(*deeper)

    def _members(self, field: Schema) -> list[str]:
        """The classes that a field may hold, itself or in a list."""
        unions = (field, *field.get("anyOf", ()))
        found = [one["$ref"] for each in unions for one in (each, *each.get("oneOf", ())) if "$ref" in one]
        for each in (field.get("items", {}), *(one.get("items", {}) for one in field.get("anyOf", ()))):
            found += [one["$ref"] for one in (each, *each.get("oneOf", ())) if "$ref" in one]
        return [name.rpartition("/")[2] for name in found]

    def _table(self, fields: Schema, prefix: str) -> Iterator[str]:
        rows = []
        for name, field in fields.items():
            default = f"`{json.dumps(field['default'])}`" if "default" in field else "required"
            if len(default) > 60 or self._members(field):
                default = "" if "default" in field else "required"
            rows.append((f"`{prefix}{name}`", self._values(field), default, field.get("description", "")))
        if rows:
            yield from table(("field", "values", "default", "what it does"), rows)

    def _values(self, field: Schema) -> str:
        """The values that a field takes, in words."""
        if "const" in field:
            return f"`{field['const']}`"
        if "enum" in field:
            return ", ".join(f"`{value}`" for value in field["enum"])
        if "anyOf" in field:
            return " or ".join(self._values(each) for each in field["anyOf"])
        if self._members(field):
            return "a list of sections" if field.get("type") == "array" else "a section"
        kind = field.get("type", "anything")
        if kind == "array":
            return f"a list: {self._values(field.get('items', {}))}"
        bounds: list[str] = [
            f"{sign} {field[key]:g}"
            for key, sign in (
                ("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"),
                ("multipleOf", "a multiple of"),
            )
            if key in field
        ]  # fmt: skip
        words = {"integer": "whole number", "string": "text", "boolean": "`true`, `false`", "null": "`null`"}
        return f"{words.get(kind, kind)} {', '.join(bounds)}".strip()


def anchor(heading: str) -> str:
    """A heading's anchor, as repository pages and the site make it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def configuration() -> Iterator[str]:
    """The configurations that the package includes, and every field."""
    yield "## Configurations that come with simpletune"
    yield ""
    files, names = shipped_files(), shipped_names()
    rows = {name: (f"`{name}`", json.loads(file.read_text())["about"]) for name, file in files.items()}
    yield from table(("name", "what it is"), (rows.pop(name) for name in names))
    yield "### More of them"
    yield ""
    yield "Lists leave these out: each differs from another in a field or two, or is for studies, benchmarks and tests."
    yield ""
    yield from table(("name", "what it is"), rows.values())
    yield from Fields(TrainConfig.model_json_schema(by_alias=True)).lines()


def import_keys() -> Iterator[str]:
    """What becomes of each key of the other trainers' files."""
    for title, trainer in TOOLS.items():
        tables = trainer_tables(trainer.NAME)
        for part, name in (("", "options"), ("_data", "data sets")):
            yield f"## {title}: {name}"
            yield ""
            yield cell(tables[f"file{part}"])
            yield ""
            rows = [(f"`{key}`", text) for key, text in sorted(tables[f"here{part}"].items())]
            parts = ("_data", "_image", "_captions") if part else ("", "_part", "_text", "_network", "_lycoris")
            gone = {key: text for end in parts for key, text in tables.get(f"left_out{end}", {}).items()}
            idle = {key: text for end in parts for key, text in tables.get(f"no_effect{end}", {}).items()}
            rows += [(f"`{key}`", f"left out: {text}") for key, text in sorted(gone.items())]
            for key, text in sorted(idle.items()):  # one reason, or one for some values each
                of_values = [f"`{value}`: {why}" for value, why in text.items()] if isinstance(text, dict) else [text]
                rows.append((f"`{key}`", f"not needed: {'; '.join(of_values)}"))
            yield from table(("key", "here"), together(rows))


def together(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Rows of keys that become the same, as one row where the first of them stands."""
    keys: dict[str, list[str]] = {}
    for key, text in rows:
        keys.setdefault(text, []).append(key)
    for text, same in keys.items():
        yield ", ".join(same), text


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "commands.md": commands,
    "configuration.md": configuration,
    "import-keys.md": import_keys,
}


def page(name: str) -> str:
    """A page as it should be: what stands above its mark, then what the code says."""
    above, mark, _ = (REFERENCE / name).read_text().partition(MARK)
    if not mark:
        raise SystemExit(f"{REFERENCE / name} has no line {MARK}")
    return f"{above}{MARK}\n\n" + "\n".join(PAGES[name]()).rstrip() + "\n"


def main() -> None:
    stale = [name for name in PAGES if (REFERENCE / name).read_text() != page(name)]
    if sys.argv[1:] == ["--check"]:
        sys.exit(f"stale: {', '.join(stale)}. Run make docs" if stale else 0)
    for name in stale:
        (REFERENCE / name).write_text(page(name))


if __name__ == "__main__":
    main()
