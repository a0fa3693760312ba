"""List a run's configuration: each value, its default, and whether the two differ."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from simpletune.config.family_defaults import family_defaults
from simpletune.config.schema import TrainConfig
from simpletune.system.options import Json, Option, documented_fields, item_of, union_of


@dataclass(frozen=True)
class Setting:
    """One value of a configuration, as text."""

    path: str  # dotted
    value: str
    default: str  # empty if there is none
    changed: bool
    says: str  # the field's documentation


def settings_of(config: TrainConfig | None, raw: Json) -> list[Setting]:
    """List every field of a configuration, in the order of its definition; if this version cannot read it (None), the
    raw values, without defaults."""
    if config is None:
        return [Setting(path, _text(value), "", False, "") for path, value in _leaves(raw)]
    usual = {
        f"{section}.{name}": _text(value)
        for section, fields in family_defaults(config.model).items()
        for name, value in fields.items()
    }
    usual |= {
        f"data.sources.{index}.{name}": _text(value)
        for index in range(len(config.sources))
        for name, value in family_defaults(config.model)["data"].items()
    }
    rows = (row for row in _rows(config, None, "") if row.path not in ("$schema", "version"))
    return [
        replace(row, default=usual[row.path], changed=row.value != usual[row.path]) if row.path in usual else row
        for row in rows
    ]


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Return the values inside JSON objects, with their dotted paths."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{key}" if path else key)


def _rows(option: Option, usual: Option | None, prefix: str, tag: str = "") -> list[Setting]:
    """List the fields of one option; ``usual`` is the default of the field that contains it, ``tag`` its union's."""
    found: list[Setting] = []
    for name, field in documented_fields(type(option)).items():
        value, path = getattr(option, name), prefix + (field.alias or name)
        inherits = usual is not None and (type(usual) is type(option) or name == tag)
        default = getattr(usual, name) if inherits else field.get_default(call_default_factory=True)
        if isinstance(value, Option):
            union = union_of(field)
            below = default if isinstance(default, Option) else None
            found += _rows(value, below, f"{path}.", union.tag if union else "")
            continue
        if isinstance(value, list) and (item := item_of(field)) is not None:
            tag = union.tag if (union := union_of(item)) else ""
            for number, each in enumerate(value):
                found += _rows(each, None, f"{path}.{number}.", tag)
            continue
        known = inherits or not field.is_required()
        shown = _text(default) if known else ""
        found.append(Setting(path, _text(value), shown, not known or value != default, field.description or ""))
    return found


def without_parents(path: str) -> str:
    """Shorten an absolute path to its last name, because pages are shared."""
    return f"…/{os.path.basename(path.rstrip('/'))}" if os.path.isabs(path) else path


def _text(value: object) -> str:
    if isinstance(value, str):
        return without_parents(value)
    if isinstance(value, Option):
        value = value.model_dump(mode="json")
    return json.dumps(value, ensure_ascii=False, default=str)
