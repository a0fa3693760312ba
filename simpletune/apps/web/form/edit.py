"""Apply a user's changes to a base configuration, and name every value's source.

A form posts all of its fields. A field counts as changed if it differs from what the form was shown with, or was
changed before. So a new base (another card, another file) replaces the values that the user has not touched, and keeps
the user's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from simpletune.apps.web.form.fields import PROFILE, FieldGroup, FormField, sections_of
from simpletune.config.family_defaults import with_family
from simpletune.config.load import complete, with_default_tags
from simpletune.config.overrides import BESIDE_THE_JOB, merge
from simpletune.config.schema import TrainConfig
from simpletune.system.options import Json

DEEPEST = 4  # nesting depth of structures
YOU, DEFAULT = "you", "default"


@dataclass(frozen=True)
class StartingConfig:
    """A configuration to start from."""

    data: Json
    label: str  # its source as the form shows it at a value: ``preset``, ``file NAME``, ``run NAME``
    origin: str  # the shipped configuration or the file that it was made from, for the command line
    reasons: Mapping[str, str] = field(default_factory=dict)  # why a field has its value, by path
    notes: tuple[str, ...] = ()  # for the user
    made_by: tuple[str, ...] = ()  # the command that writes ``origin``, without the file's name; empty if it exists


@dataclass(frozen=True)
class EditedForm:
    """A configuration in the form."""

    data: Json  # to validate and to save: the base with the user's changes
    sections: list[FieldGroup]  # all fields with their texts
    mine: Mapping[str, str]  # the user's texts by path
    sources: Mapping[str, str]  # where the value at each path comes from

    def fields(self) -> dict[str, FormField]:
        """Return the fields by path."""
        return {each.path: each for section in self.sections for each in section.fields()}


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
        todo = [each for each in _fields(data) if each.structure and mine.get(each.path, each.text) != each.text]
        for each in todo:
            text = kept[each.path] = mine[each.path]
            if each.info is None or each.path == PROFILE:
                set_at(data, each.path, each.parse(text))
            else:  # a tag, as an override sets it, which drops the fields that the new member lacks
                merged, _, problems = merge(data, [f"{each.path}={text}"])
                data = data if problems else merged
        if not todo:
            break
    frame = _fields(data)
    kept = {path: text for path, text in kept.items() if path in {each.path for each in frame}}
    for each in frame:
        if not each.structure and mine.get(each.path, each.text) != each.text:
            kept[each.path] = mine[each.path]
            set_at(data, each.path, each.parse(mine[each.path]))
    changed = {path.partition(".")[0] for path in overrides(base.data, data)}
    if changed - set(BESIDE_THE_JOB) and data.get("about") == base.data.get("about"):
        data.pop("about", None)  # the changes have made the description untrue
    sections = [_with_texts(section, kept) for section in sections_of(complete(data))]
    return EditedForm(data, sections, kept, _sources(base, data, sections, kept))


def set_at(data: Json, path: str, value: object) -> None:
    """Set a value in place, creating missing sections."""
    *parents, leaf = path.split(".")
    for name in parents:
        if not isinstance(data.get(name), dict):
            data[name] = {}
        data = data[name]
    data[leaf] = value


def get_at(data: object, path: str) -> object:
    """Return the value at a path; None if it is missing."""
    for name in path.split("."):
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


def _fields(data: Json) -> list[FormField]:
    return [each for section in sections_of(complete(data)) for each in section.fields()]


def _with_texts(section: FieldGroup, mine: Mapping[str, str]) -> FieldGroup:
    """Show the user's own texts, which may not be valid values yet."""
    items = [
        _with_texts(each, mine) if isinstance(each, FieldGroup) else replace(each, text=mine.get(each.path, each.text))
        for each in section.items
    ]
    return replace(section, items=items)


def _sources(base: StartingConfig, data: Json, sections: list[FieldGroup], mine: Mapping[str, str]) -> dict[str, str]:
    """Name the source of every field's value."""
    own, family = with_default_tags(TrainConfig, data), with_default_tags(TrainConfig, with_family(data))
    whole, profile = complete(data), get_at(data, PROFILE)

    def source(path: str) -> str:
        value = get_at(whole, path)
        if path in mine:
            return YOU
        if get_at(base.data, path) is not None and get_at(own, path) == get_at(base.data, path):
            return base.label
        return f"profile {profile}" if value is not None and get_at(family, path) != value else DEFAULT

    return {each.path: source(each.path) for section in sections for each in section.fields()}
