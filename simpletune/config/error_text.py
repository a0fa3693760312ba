"""Pydantic's validation errors in this project's words: path without union tags, value, rule, remedy."""

from __future__ import annotations

import difflib
import json
from collections import defaultdict
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from simpletune.config.schema import TrainConfig
from simpletune.options import Json, Option, Problem, member_for, union_of

RENAMED = {"boundaries": "offload_checkpoint_inputs"}  # options that were called otherwise before the first release
NEEDS = {
    "bool_type": "true or false, without quotes",
    "int_type": "a whole number, without quotes",
    "int_from_float": "a whole number",
    "float_type": "a number, without quotes",
    "string_type": "text in quotes",
    "list_type": "a list [...]",
    "tuple_type": "a list [...]",
    "dict_type": "an object {{...}}",
    "model_type": "an object {{...}}",
    "model_attributes_type": "an object {{...}}",
    "none_required": "null",
    "finite_number": "a finite number",
    "greater_than": "a number greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_too_short": "text that is not empty",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


def problems_of(error: ValidationError, data: Json) -> list[Problem]:
    """All problems of one validation; several complaints about one value become one.

    Args:
        error: from validating ``data`` as a TrainConfig.
        data: the JSON that was validated.
    """
    by_path: dict[str, list[ErrorDetails]] = defaultdict(list)
    fields: dict[str, tuple[type[Option], FieldInfo | None]] = {}
    for item in error.errors(include_url=False):
        path, owner, field = locate(item["loc"], data)
        if item["type"] == "union_tag_invalid":
            path = f"{path}.{_plain(item['ctx']['discriminator'])}"
        by_path[path].append(item)
        fields[path] = (owner, field)
    return [Problem(path, _message(path, items, *fields[path])) for path, items in by_path.items()]


def locate(loc: tuple[int | str, ...], data: object) -> tuple[str, type[Option], FieldInfo | None]:
    """Pydantic's location as a dotted path of JSON keys, with the option that owns its last key."""
    owner: type[Option] = TrainConfig
    option: type[Option] | None = TrainConfig
    path: list[str] = []
    field: FieldInfo | None = None
    names = {f.alias or n: n for n, f in TrainConfig.model_fields.items()}
    rest = list(loc)
    while rest:
        key = rest.pop(0)
        if option is not None:
            owner, field = option, option.model_fields.get(names.get(str(key), str(key)))
            path.append(str(key))
            data = data.get(key) if isinstance(data, Mapping) else None
            if field is None:
                break
            union, option = union_of(field), member_for(field, data)
            if union is not None and rest and rest[0] in union.members:
                option = union.members[str(rest.pop(0))]
        elif isinstance(key, int):
            path.append(str(key))
    return ".".join(path), owner, field


def _message(path: str, items: list[ErrorDetails], owner: type[Option], field: FieldInfo | None) -> str:
    """Value, rule and remedy for one path."""
    kinds = {item["type"] for item in items}
    item, leaf = items[0], path.rsplit(".", 1)[-1]
    if "extra_forbidden" in kinds:
        return f"unknown field.{did_you_mean(leaf, [f.alias or n for n, f in owner.model_fields.items()])}"
    if "missing" in kinds:
        described = f": {first_sentence(field)}" if field is not None else ""
        return f"is required{described}. Add it"
    if "union_tag_invalid" in kinds:
        tags = [tag.strip(" '") for tag in item["ctx"]["expected_tags"].split(",")]
        return f"{_show(item['ctx']['tag'])} is not known.{did_you_mean(str(item['ctx']['tag']), tags)}"
    if "string_pattern_mismatch" in kinds:
        rule = "Use letters, digits, '.', '_' and '-', at most 100, no dot or dash first"
        return f"{_show(item['input'])} does not fit. {rule}"
    if kinds == {"value_error"}:
        return str(item["ctx"]["error"])
    needs = list(dict.fromkeys(_need(each) for each in items))
    value = item["input"]
    return f"{_show(value)} does not fit. It must be {' or '.join(needs)}.{_remedy(value, kinds, needs)}"


def _need(item: ErrorDetails) -> str:
    """What one complaint asks for."""
    if item["type"] == "literal_error":
        return f"one of {item['ctx']['expected'].replace(' or ', ', ')}".replace("'", "")
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    if item["type"] in NEEDS:
        return NEEDS[item["type"]].format(**item.get("ctx", {}))
    return item["msg"][0].lower() + item["msg"][1:]


def _remedy(value: object, kinds: set[str], needs: list[str]) -> str:
    """The value as it should be written, where that can be told."""
    if not isinstance(value, str):
        return ""
    if "literal_error" in kinds:
        options = [word.strip() for need in needs if need.startswith("one of ") for word in need[7:].split(",")]
        near = difflib.get_close_matches(value, options, n=1)
        if near:
            return f" Did you mean {near[0]}?"
    try:
        meant = json.loads(value)
    except ValueError:
        return ""
    numeric = kinds & {"int_type", "float_type"} and isinstance(meant, int | float) and not isinstance(meant, bool)
    if numeric or ("bool_type" in kinds and isinstance(meant, bool)):
        return f" Write {value} instead of {_show(value)}"
    return ""


def did_you_mean(word: str, known: list[str]) -> str:
    """`` Did you mean X?``, or what is known."""
    if RENAMED.get(word) in known:
        return f" Did you mean {RENAMED[word]}?"
    near = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {near[0]}?" if near else f" Known: {', '.join(known)}"


def _show(value: object) -> str:
    """A JSON value as it stands in the file, cut short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(name: str) -> str:
    return name.strip("'")


def first_sentence(field: FieldInfo) -> str:
    """The first sentence of a field's documentation."""
    text = " ".join((field.description or "").split())
    sentence = text.split(". ")[0].rstrip(".")
    return sentence[0].lower() + sentence[1:] if sentence else ""
