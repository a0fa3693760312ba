"""A configuration's fields in a form: from the option classes, with their docstrings as help; and a user's changes to a
base configuration, with every value's source.

A form posts all of its fields. A field counts as changed if it differs from what the form was shown with, or was
changed before. So a new base (another card, another file) replaces the values that the user has not touched, and keeps
the user's.
"""

from __future__ import annotations

import copy
import json
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from simpletune.commands.init import Question
from simpletune.config.family_defaults import with_family
from simpletune.config.load import complete, with_default_tags
from simpletune.config.overrides import BESIDE_THE_JOB, merge, parse_value
from simpletune.config.schema import TrainConfig
from simpletune.system.options import (
    Json,
    Option,
    documented_fields,
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
DEEPEST = 4  # nesting depth of structures
MOST_ITEMS = 64  # of a list whose items are shown as fields
YOU, DEFAULT = "set by you", "default"
TITLES = {
    "name": "Name of the run",
    "data.path": "Folder with pictures",
    "data.resolution": "Resolution, px",
    "concept.directions": "Number of directions",
    "concept.directions.0": "Prompts",
    "concept.directions.0.target": "What changes",
    "concept.directions.0.positive": "Strength 1 moves it towards",
    "concept.directions.0.negative": "Strength -1 moves it towards",
    "concept.resolutions": "Sides of the drawings, px",
    "adapter.method": "Method",
    "model.pretrained": "Base: Hub name, folder or file",
    "objective.name": "The base was trained by",
    "optimizer.lr": "Learning rate",
    "ema": "EMA",
    "lora_plus_ratio": "LoRA+ ratio",
}
"""Of fields whose path alone does not say it, and of those in view."""


@dataclass
class _Item:
    path: str  # dotted, as in overrides

    @property
    def id(self) -> str:
        """What element IDs are made of."""
        return self.path.replace(".", "-") or "general"

    @property
    def title(self) -> str:
        """What people call it."""
        first, number = re.sub(r"\.\d+(?=\.|$)", ".0", self.path), re.search(r"\.([1-9]\d*)(?=\.|$)", self.path)
        title = TITLES.get(first) or self.path.rpartition(".")[2].replace("_", " ").capitalize() or "General"
        return f"{title} ({int(number[1]) + 1})" if number else title


@dataclass
class FormField(_Item):
    """One field of the form."""

    text: str  # its value, or what the user typed; empty for null
    help: str  # its docstring
    kind: Kind  # how it is entered: ``lines``: one text per line; ``json``: values without a simpler form
    choices: tuple[str, ...] = ()  # the values of a ``choice``, and suggested words for a ``text``
    structure: bool = False  # other fields depend on it
    info: FieldInfo | None = None  # its option's field; None: it switches an optional section
    items: list[Json] | None = None  # of a list, of which it sets the length
    source: str = DEFAULT  # where its value comes from, once a user's changes are applied

    def parse(self, text: str) -> object:
        """Parse a text as JSON; returns invalid text unchanged, so that validation reports it."""
        if self.info is None:
            return {} if text == ON else None
        if self.items is not None:
            length = int(text) if text in map(str, range(1, MOST_ITEMS + 1)) else len(self.items)
            return [*self.items, *(_blank_item(self.info) for _ in range(length - len(self.items)))][:length]
        arms = _arms(self.info.annotation)
        if self.kind == "lines" and not text.lstrip().startswith("["):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines or (None if types.NoneType in arms else [])
        if text in ("", '""') and types.NoneType in arms:
            return None if text == "" or str not in arms else ""
        return parse_value(self.info, text)


@dataclass
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
    skip = "data" if data.get("data") is None and data.get("concept") is not None else ""  # a slider's has no pictures
    items = list(_items(TrainConfig, data, "", skip))
    general = FieldGroup("", "The run's name and device.", [item for item in items if isinstance(item, FormField)])
    return [general, *(item for item in items if isinstance(item, FieldGroup))]


def _items(option: type[Option], data: Json, prefix: str, skip: str = "") -> Iterator[FormField | FieldGroup]:
    for name, info in documented_fields(option).items():
        key = info.alias or name
        if key in HIDDEN or key == skip:
            continue
        path, value = f"{prefix}{key}", data.get(key, _default(info))
        if option_classes(info.annotation):
            yield _section(info, path, value)
        elif (item := item_of(info)) is not None and (members := _members(info, item, value)) is not None:
            if info.is_required():
                lengths = tuple(str(number) for number in range(1, min(len(members) + 1, MOST_ITEMS) + 1))
                text = str(len(members) or "")
                yield FormField(path, text, _help(info), "choice", lengths, True, info, members)
            for number, member in enumerate(members):
                found = _items(option_classes(item.annotation)[0], member, f"{path}.{number}.")
                yield FieldGroup(f"{path}.{number}", _help(info), list(found))
        elif item is not None:
            yield FormField(path, json.dumps(value, indent=1, ensure_ascii=False), _help(info), "json", info=info)
        else:
            kind, choices = _kind(info)
            if kind != "choice" or len(choices) > 1:  # a single choice needs no field
                yield FormField(path, format_value(value, kind), _help(info), kind, choices, path == PROFILE, info)


def _members(info: FieldInfo, item: FieldInfo, value: object) -> list[Json] | None:
    """Return the items of a list whose items are of one class, to be shown as fields, also if it is required and still
    missing; None for another list, and for one of several that may be empty."""
    if len(option_classes(item.annotation)) != 1:
        return None
    found = value if isinstance(value, list) else [] if info.is_required() and not value else None
    if found is None or not (info.is_required() or len(found) == 1) or not all(isinstance(one, dict) for one in found):
        return None
    return found


def _blank_item(info: FieldInfo) -> Json:
    """Return a new item of a list, with nothing in the fields that it must have."""
    item = item_of(info)
    assert item is not None
    fields = documented_fields(option_classes(item.annotation)[0])
    return {name: "" for name, each in fields.items() if each.is_required()}


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


# A user's changes


@dataclass(frozen=True)
class StartingConfig:
    """A configuration to start from."""

    data: Json
    label: str  # its source as the form says it at a value
    origin: str  # the shipped configuration or the file that it was made from, for the command line
    reasons: Mapping[str, str] = field(default_factory=dict)  # why a field has its value, by path
    notes: tuple[str, ...] = ()  # for the user
    made_by: tuple[str, ...] = ()  # the command that writes ``origin``, without the file's name; empty if it exists
    image_notes: tuple[str, ...] = ()  # what is said of the pictures
    questions: tuple[Question, ...] = ()  # guesses about the pictures that the user must confirm or correct


@dataclass(frozen=True)
class EditedForm:
    """A configuration in the form."""

    data: Json  # to validate and to save: the base with the user's changes
    sections: list[FieldGroup]
    fields: Mapping[str, FormField]  # those of all sections by path, with texts and sources
    mine: Mapping[str, str]  # the user's texts by path


def changes(posted: Mapping[str, str], shown: Mapping[str, str], mine: Mapping[str, str]) -> dict[str, str]:
    """Return the user's texts by path: those that differ from what the form was shown with, and those that already were
    the user's, also of fields that are not shown now."""
    posted = {path: text.replace("\r\n", "\n") for path, text in posted.items()}
    touched = {path: text for path, text in posted.items() if path in mine or text != shown.get(path, text)}
    return {**mine, **touched}


def apply_edits(base: StartingConfig, mine: Mapping[str, str]) -> EditedForm:
    """Apply a user's texts by path, starting with those that determine which fields exist; ignores paths without a
    field."""
    data, kept = copy.deepcopy(base.data), {}
    for _ in range(DEEPEST):
        fields = _fields_by_path(sections_of(complete(data)))
        todo = [each for each in fields.values() if each.structure and mine.get(each.path, each.text) != each.text]
        for each in todo:
            text = kept[each.path] = mine[each.path]
            if each.info is None or each.items is not None or each.path == PROFILE:
                set_at(data, each.path, each.parse(text))
            else:  # a tag, as an override sets it, which drops the fields that the new member lacks
                merged, _, problems = merge(data, [f"{each.path}={text}"])
                data = data if problems else merged
        if not todo:
            break
    fields = _fields_by_path(sections_of(complete(data)))
    kept = {path: text for path, text in kept.items() if path in fields}
    for each in fields.values():
        if not each.structure and mine.get(each.path, each.text) != each.text:
            kept[each.path] = mine[each.path]
            set_at(data, each.path, each.parse(mine[each.path]))
    changed = {path.partition(".")[0] for path in overrides(base.data, data)}
    if changed - set(BESIDE_THE_JOB) and data.get("about") == base.data.get("about"):
        data.pop("about", None)  # the changes have made the description untrue
    sections = sections_of(complete(data))
    fields = _fields_by_path(sections)
    _name_sources(fields, base, data, kept)
    for path, text in kept.items():
        if path in fields:
            fields[path].text = text  # the user's own, which may not be a valid value yet
    return EditedForm(data, sections, fields, kept)


def set_at(data: Json, path: str, value: object) -> None:
    """Set a value in place, creating missing sections; a number is an item of a list."""
    *parents, leaf = path.split(".")
    for name in parents:
        if isinstance(data, list):
            data = data[int(name)]
            continue
        if not isinstance(data.get(name), dict | list):
            data[name] = {}
        data = data[name]
    data[leaf] = value


def get_at(data: object, path: str) -> object:
    """Return the value at a path; None if it is missing."""
    for name in path.split("."):
        if isinstance(data, list):
            data = data[int(name)] if name.isdigit() and int(name) < len(data) else None
        else:
            data = data.get(name) if isinstance(data, dict) else None
    return data


def overrides(base: Json, data: Json) -> dict[str, object]:
    """Return the values of ``data`` that differ from ``base``, by path."""
    found: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, dict) and isinstance(base.get(key, {}), dict):
            found |= {f"{key}.{path}": inner for path, inner in overrides(base.get(key, {}), value).items()}
        elif key not in base or base[key] != value:
            found[key] = value
    return found


def _fields_by_path(sections: list[FieldGroup]) -> dict[str, FormField]:
    return {each.path: each for section in sections for each in section.fields()}


def _name_sources(fields: Mapping[str, FormField], base: StartingConfig, data: Json, mine: Mapping[str, str]) -> None:
    """Name the source of every field's value."""
    own, family = with_default_tags(TrainConfig, data), with_default_tags(TrainConfig, with_family(data))
    whole, profile = complete(data), get_at(data, PROFILE)
    for path, each in fields.items():
        given, value = get_at(base.data, path), get_at(whole, path)
        if path in mine:
            each.source = YOU
        elif given is not None and get_at(own, path) == given:
            each.source = base.label
        elif value is not None and get_at(family, path) != value:
            each.source = f"from the memory profile {profile}"
