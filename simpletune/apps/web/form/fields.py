"""List a configuration's fields for a form, from the option classes, with their docstrings as help."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from simpletune.config.overrides import parse_value
from simpletune.config.schema import TrainConfig
from simpletune.system.options import (
    Json,
    Option,
    documented,
    item_of,
    member_for,
    option_classes,
    strip_annotated,
    union_of,
)

Kind = Literal["choice", "text", "lines", "json"]
HIDDEN = ("$schema", "version", "about")
ON = "on"  # for an optional section
PROFILE = "memory.profile"  # sets other fields, so it counts as structure


@dataclass(frozen=True)
class _Item:
    path: str  # dotted, as in overrides

    @property
    def id(self) -> str:
        """What element IDs are made of."""
        return self.path.replace(".", "-") or "general"

    @property
    def label(self) -> str:
        """Its name in words."""
        return self.path.rpartition(".")[2].replace("_", " ") or "general"


@dataclass(frozen=True)
class FormField(_Item):
    """One field of the form."""

    text: str  # its value; empty for null
    help: str  # its docstring
    kind: Kind  # how it is entered: ``lines``: one text per line; ``json``: values without a simpler form
    choices: tuple[str, ...] = ()  # the values of a ``choice``, and suggested words for a ``text``
    structure: bool = False  # other fields depend on it
    info: FieldInfo | None = None  # its option's field; None: it switches an optional section

    def parse(self, text: str) -> object:
        """Parse a text as JSON; returns invalid text unchanged, so that validation reports it."""
        if self.info is None:
            return {} if text == ON else None
        arms = _arms(self.info.annotation)
        if self.kind == "lines" and not text.lstrip().startswith("["):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines or (None if types.NoneType in arms else [])
        if text == "" and types.NoneType in arms:
            return None
        return parse_value(self.info, text)


@dataclass(frozen=True)
class FieldGroup(_Item):
    """A section of fields and nested sections."""

    help: str
    items: list[FormField | FieldGroup] = field(default_factory=list)

    def fields(self) -> Iterator[FormField]:
        """Yield the fields, including those of nested sections."""
        for item in self.items:
            if isinstance(item, FieldGroup):
                yield from item.fields()
            else:
                yield item


def sections_of(data: Json) -> list[FieldGroup]:
    """List a configuration's sections, starting with the one for fields outside of sections. ``data`` is completed with
    profile and tags; its values may be invalid."""
    items = list(_items(TrainConfig, data, ""))
    general = FieldGroup("", "The run's name and device.", [item for item in items if isinstance(item, FormField)])
    return [general, *(item for item in items if isinstance(item, FieldGroup))]


def _items(option: type[Option], data: Json, prefix: str, skip: str = "") -> Iterator[FormField | FieldGroup]:
    for name, info in documented(option).items():
        key = info.alias or name
        if key in HIDDEN or key == skip:
            continue
        path, value = f"{prefix}{key}", data.get(key, _default(info))
        if option_classes(info.annotation):
            yield _section(info, path, value)
        elif item_of(info) is not None:
            yield FormField(path, json.dumps(value, indent=1, ensure_ascii=False), _help(info), "json", info=info)
        else:
            kind, choices = _kind(info)
            if kind != "choice" or len(choices) > 1:  # a single choice needs no field
                yield FormField(path, format_value(value, kind), _help(info), kind, choices, path == PROFILE, info)


def _section(info: FieldInfo, path: str, value: object) -> FieldGroup:
    section = FieldGroup(path, _help(info))
    data = value if isinstance(value, dict) else {}
    union, member = union_of(info), member_for(info, data)
    if union is not None:
        tag = str(data.get(union.tag, union.default))
        tag_info = next(iter(union.members.values())).model_fields[union.tag]
        about = " ".join(((member.__doc__ if member is not None else "") or "").split())
        section.items.append(
            FormField(f"{path}.{union.tag}", tag, about, "choice", tuple(union.members), True, tag_info)
        )
    elif types.NoneType in _arms(info.annotation):
        section.items.append(
            FormField(path, ON if isinstance(value, dict) else "", _help(info), "choice", ("", ON), True)
        )
        if not isinstance(value, dict):
            return section
    if member is not None:
        section.items.extend(_items(member, data, f"{path}.", union.tag if union else ""))
    return section


def format_value(value: object, kind: Kind = "text") -> str:
    """Format a JSON value for a form."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if kind == "lines" and isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return "\n".join(value)
    return json.dumps(value, ensure_ascii=False)


def _kind(info: FieldInfo) -> tuple[Kind, tuple[str, ...]]:
    arms = _arms(info.annotation)
    words = tuple(format_value(value) for arm in arms if get_origin(arm) is Literal for value in get_args(arm))
    rest = [arm for arm in arms if get_origin(arm) is not Literal and arm is not types.NoneType]
    empty = ("",) if types.NoneType in arms else ()
    if rest == [bool]:
        return "choice", (*empty, "true", "false")
    if words and not rest:
        return "choice", (*empty, *words)
    if len(rest) == 1 and get_origin(rest[0]) is list and not words and strip_annotated(get_args(rest[0])[0]) is str:
        return "lines", ()
    return "text", words


def _arms(annotation: object) -> list[object]:
    """Return the types that a field may have."""
    annotation = strip_annotated(annotation)
    if get_origin(annotation) not in (Union, types.UnionType):
        return [annotation]
    return [arm for each in get_args(annotation) for arm in _arms(each)]


def _default(info: FieldInfo) -> object:
    if info.is_required():
        return ""
    value = info.get_default(call_default_factory=True)
    if isinstance(value, Option):
        return value.model_dump(mode="json", by_alias=True)
    return list(value) if isinstance(value, tuple) else value


def _help(info: FieldInfo) -> str:
    return " ".join((info.description or "").split())
