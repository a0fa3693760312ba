"""Apply ``key.path=value`` overrides to a configuration's JSON."""

from __future__ import annotations

import copy
import json
from itertools import takewhile

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from simpletune.config.error_text import did_you_mean, other_field
from simpletune.config.family_defaults import with_objective
from simpletune.config.schema import DEMO, TrainConfig
from simpletune.system import strict_json
from simpletune.system.options import Json, Option, Problem, item_of, member_for, option_classes, union_of
from simpletune.system.portable import join_words
from simpletune.system.strict_json import JsonError

BESIDE_THE_JOB = ("name", "about", "device", "checkpoint", "validation", "tracking", "profile", "output")
"""Sections whose overrides do not invalidate ``about``: they change only where a run writes and what it shows."""


def merge(data: Json, overrides: list[str]) -> tuple[Json, list[str], list[Problem]]:
    """Return the file's JSON with overrides applied, notices, and problems of those that cannot be applied."""
    merged, notices, problems = copy.deepcopy(data), [], []
    for at, override in enumerate(overrides):
        path, equals, text = override.partition("=")
        if not equals or not path:
            if at and _is_loose(overrides[at - 1]):
                continue  # said of the first of these words
            rest = list(takewhile(_is_loose, overrides[at:]))
            rule = "is not an override. Write key.path=value, as in train.steps=100"
            if at:
                whole = join_words([" ".join([overrides[at - 1], *rest])])
                rule += f". A value with spaces is quoted: {whole}"
            problems.append(Problem(" ".join(rest), rule))
            continue
        for place in _places(merged, path):
            notices += _override(merged, place, text, problems)
    if "about" in data and merged["about"] == data["about"]:
        others = [key for key in merged if key not in BESIDE_THE_JOB]
        if any(_describe(data, key) != _describe(merged, key) for key in others):
            del merged["about"]  # it describes another job
    return merged, notices, problems


def _is_loose(word: str) -> bool:
    """Return whether a word of the command line sets no field."""
    return not word.partition("=")[0] or "=" not in word


def _places(merged: Json, path: str) -> list[str]:
    """Return the paths that an override sets: with several sources, ``data.FIELD`` is the field of each."""
    section, _, rest = path.partition(".")
    data = merged.get(section)
    sources = data.get("sources") if section == "data" and isinstance(data, dict) else None
    if not isinstance(sources, list) or rest.partition(".")[0] in ("", "source", "sources"):
        return [path]
    return [f"data.sources.{index}.{rest}" for index in range(len(sources))]


def _describe(data: Json, section: str) -> object:
    """Return a section without the fields left to the user: path and prompt of the user's own data."""
    value = data.get(section)
    if section != "data" or not isinstance(value, dict) or str(value.get("path", "")).startswith(DEMO):
        return value
    return {key: value[key] for key in value if key not in ("path", "prompt")}


def _override(merged: Json, path: str, text: str, problems: list[Problem]) -> list[str]:
    """Set one value in place; a change of a union's tag drops the fields that the new member lacks."""
    option: type[Option] | None = TrainConfig
    section, parts = merged, path.split(".")
    if parts[0] == "objective":
        merged |= with_objective(merged)
    parent: FieldInfo | None = None  # the field of the last section
    steps = iter(parts[:-1])
    for part in steps:
        field = option.model_fields.get(part) if option else None
        child, item = section.get(part, {}), item_of(field)
        if item is not None and isinstance(child, list):
            number, most = next(steps, ""), len(child) - 1
            if not number.isdecimal() or int(number) > most:
                problems.append(Problem(path, f"{part} is a list. Name a field of one of its items 0 to {most}"))
                return []
            field, child = item, child[int(number)]
        if field is None or not option_classes(field.annotation) or not isinstance(child, dict):
            known = [each.alias or name for name, each in option.model_fields.items()] if option else []
            problems.append(Problem(path, f"{part} is not a section.{did_you_mean(part, known)}"))
            return []
        if item is None:
            section[part] = child
        parent, option, section = field, member_for(field, child), child
    leaf = parts[-1]
    field = option.model_fields.get(leaf) if option else None
    if field is None and option is not None:
        problems.append(Problem(path, f"unknown field.{other_field(path, option, TrainConfig)}"))
        return []
    section[leaf] = parse_value(field, text)
    union = union_of(parent) if parent is not None else None
    member = member_for(parent, section) if parent is not None and union is not None and union.tag == leaf else None
    if member is not None:
        had, has = option.model_fields if option else {}, member.model_fields
        dropped = []
        for key in list(section):
            if key not in has:
                dropped.append(key)
            elif key in had and (item_of(had[key]) is None) != (item_of(has[key]) is None):
                if section[key]:  # adapter.layers, whose entries are texts in one method and objects in the others
                    dropped.append(f"the entries of {key}")
            else:
                continue
            del section[key]
        if dropped:
            return [f"{path}={text}: dropped {', '.join(dropped)}, which {text} does not have"]
    return []


def as_overrides(fields: Json) -> list[str]:
    """Return values by path as overrides, for a command line."""
    return [
        f"{path}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for path, value in fields.items()
    ]


def parse_value(field: FieldInfo | None, text: str) -> object:
    """Parse an override by the field's type: ``name=123`` is text, ``train.steps=123`` is a number."""
    try:
        as_json = strict_json.parse(text)
    except JsonError:
        return text
    if field is None or field.annotation is None or option_classes(field.annotation):
        return as_json
    adapter: TypeAdapter[object] = TypeAdapter(field.annotation)
    for candidate in (None, text, as_json) if as_json is None else (text, as_json):
        try:
            adapter.validate_json(json.dumps(candidate), strict=True)
        except ValidationError:
            continue
        return candidate
    return as_json
