"""What every option of a configuration has in common, and how unions of options are read.

An option is a frozen, strict Pydantic model. A union of options is told apart by a tag (``adapter.method``); the member
owns its fields, its defaults, their documentation, and builds its own component. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

Json = dict[str, Any]
"""A JSON object."""


class Option(BaseModel):
    """Base of all options: frozen, strict, finite, unknown fields refused; the string under a field documents it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, defer_build=True
    )


SHOWN = 16  # problems on a screen


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    Args:
        path: where it stands, dotted, without union tags (``adapter.rank``); empty for the file as a whole.
        message: value, rule and remedy in one or two sentences.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class UserError(Exception):
    """A mistake the user can mend: printed without a traceback.

    Args:
        message: what is wrong, the rule, and the remedy.
        code: the exit code of the command line (2 for configuration and input).
    """

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


class ConfigError(UserError):
    """All problems of a configuration at once."""

    def __init__(self, problems: list[Problem], source: str = "configuration"):
        self.problems = problems
        head = f"{source}: {plural(len(problems), 'problem')}"
        lines = first_lines([str(problem) for problem in problems], SHOWN)
        super().__init__("\n".join([head, *(f"  {line}" for line in lines)]), code=2)


def plural(count: int, one: str, many: str = "") -> str:
    """A count with its word: ``1 picture``, ``2 pictures``.

    Args:
        count: how many.
        one: the word for one.
        many: the word for several, where an s is not enough.
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def shortened(names: Sequence[str], most: int = 8) -> str:
    """Names in one line, at most so many of them: ``a, b, c and 5 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    """At most so many lines, and one that counts the rest: ``and 5 more``."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


@dataclass(frozen=True)
class Union_:
    """A discriminated union as found in an annotation: its tag's field name and its members by tag value."""

    tag: str
    members: dict[str, type[Option]]
    default: str


def strip_annotated(annotation: object) -> object:
    """``Annotated[X, ...]`` to ``X``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def option_classes(annotation: object) -> list[type[Option]]:
    """The option classes an annotation names (one, or a union's members); empty for plain values."""
    annotation = strip_annotated(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Option):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType):
        members = [strip_annotated(member) for member in get_args(annotation)]
        return [member for member in members if isinstance(member, type) and issubclass(member, Option)]
    return []


def tag_values(option: type[Option], field: str) -> tuple[str, ...]:
    """The values of a ``Literal`` tag field."""
    return get_args(option.model_fields[field].annotation)


def union_of(field: FieldInfo) -> Union_ | None:
    """The discriminated union behind a field, or None. The first member is the default."""
    if not isinstance(field.discriminator, str):
        return None
    classes = option_classes(field.annotation)
    members = {value: option for option in classes for value in tag_values(option, field.discriminator)}
    return Union_(field.discriminator, members, next(iter(members)))


def member_for(field: FieldInfo, value: object) -> type[Option] | None:
    """The option class that a JSON value selects at a field: the union's member by its tag, or the only class."""
    union = union_of(field)
    if union is None:
        classes = option_classes(field.annotation)
        return classes[0] if len(classes) == 1 else None
    tag = value.get(union.tag, union.default) if isinstance(value, dict) else union.default
    return union.members.get(tag) if isinstance(tag, str) else None
