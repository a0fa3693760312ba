"""Define the base class of options, the errors for users, and the handling of discriminated unions.

An option is a frozen, strict Pydantic model. A tag such as ``adapter.method`` selects the member of a union; the member
owns its fields, defaults and documentation, and builds its component. Imports no torch.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

Json = dict[str, Any]
"""A JSON object."""


class Option(BaseModel):
    """Base of all options: frozen and strict, without unknown fields, NaN or infinity. The string below a field
    documents it (``documented_fields``)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return pydantic's JSON schema, with the fields' documentation."""
        found = handler(schema)
        properties = handler.resolve_ref_schema(found).get("properties", {})
        for name, field in documented_fields(cls).items():
            if field.description is not None:
                properties[field.alias or name].setdefault("description", field.description)
        return found


@functools.cache
def documented_fields(option: type[Option]) -> dict[str, FieldInfo]:
    """Return an option's fields, with their documentation as ``description``.

    Pydantic's own ``use_attribute_docstrings`` reads every class's source whenever it is imported, which is a third of
    the time of ``check``.
    """
    texts: dict[str, str] = {}
    for owner in reversed(option.__mro__[: option.__mro__.index(Option)]):
        texts = {name: text for name, text in texts.items() if name not in owner.__annotations__}  # declared again
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as said)):
                    texts[name] = inspect.cleandoc(said)
    for name, field in option.model_fields.items():
        field.description = field.description or texts.get(name)
    return option.model_fields


SHOWN = 16  # problems on a screen


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration."""

    path: str  # dotted, without union tags (``adapter.rank``); empty for the whole file
    message: str  # value, rule and remedy in one or two sentences

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class UserError(Exception):
    """A mistake that the user can fix: what is wrong, the rule, and the remedy; printed without a traceback.

    ``code`` is the exit code of the command line (2 for configuration and input).
    """

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


class ConfigError(UserError):
    """All problems of a configuration at once."""

    def __init__(self, problems: list[Problem], source: str = "configuration"):
        self.problems, self.source = problems, source
        head = f"{source}: {plural(len(problems), 'problem')}"
        lines = first_lines([str(problem) for problem in problems], SHOWN)
        super().__init__("\n".join([head, *(f"  {line}" for line in lines)]), code=2)


def plural(count: int, one: str, many: str = "") -> str:
    """Format a count with its noun: ``1 picture``, ``2 pictures``; ``many`` if it is not the singular plus s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def join_names(names: Sequence[str], most: int = 8) -> str:
    """Join at most ``most`` names in one line: ``a, b, c and 5 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return at most ``most`` lines, followed by a count of the rest: ``and 5 more``."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


@dataclass(frozen=True)
class DiscriminatedUnion:
    """The discriminated union of an annotation."""

    tag: str  # name of the tag's field
    members: dict[str, type[Option]]  # by tag value; the first is the default
    default: str


def strip_annotated(annotation: object) -> object:
    """Reduce ``Annotated[X, ...]`` to ``X``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def option_classes(annotation: object) -> list[type[Option]]:
    """List the option classes in an annotation: one class or a union's members; empty for plain values."""
    annotation = strip_annotated(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Option):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType):
        members = [strip_annotated(member) for member in get_args(annotation)]
        return [member for member in members if isinstance(member, type) and issubclass(member, Option)]
    return []


def tag_values(option: type[Option], field: str) -> tuple[str, ...]:
    """Return the values of a ``Literal`` tag field."""
    return get_args(option.model_fields[field].annotation)


def item_of(field: FieldInfo | None) -> FieldInfo | None:
    """Return a list's items as a field of their own; None if the field is not a list of options."""
    annotation = None if field is None else strip_annotated(field.annotation)
    if get_origin(annotation) is not list or not option_classes(get_args(annotation)[0]):
        return None
    return FieldInfo.from_annotation(get_args(annotation)[0])


def union_of(field: FieldInfo) -> DiscriminatedUnion | None:
    """Return the discriminated union of a field, or None."""
    if not isinstance(field.discriminator, str):
        return None
    return _union(cast(Hashable, field.annotation), field.discriminator)


@functools.cache
def _union(annotation: Hashable, tag: str) -> DiscriminatedUnion:
    # Cached, because checking one configuration needs unions about 40 times.
    classes = option_classes(annotation)
    members = {value: option for option in classes for value in tag_values(option, tag)}
    return DiscriminatedUnion(tag, members, next(iter(members)))


def member_for(field: FieldInfo, value: object) -> type[Option] | None:
    """Return the option class that a JSON value selects: the union's member by its tag, or the only class."""
    union = union_of(field)
    if union is None:
        classes = option_classes(field.annotation)
        return classes[0] if len(classes) == 1 else None
    tag = value.get(union.tag, default_tag(union, value)) if isinstance(value, dict) else union.default
    return union.members.get(tag) if isinstance(tag, str) else None


def default_tag(union: DiscriminatedUnion, value: Json) -> str:
    """Return the tag of a JSON object that names none: of the first member whose required fields it has, such as
    ``data.sources``; without any, the union's default."""
    for tag, member in union.members.items():
        if all(name in value for name, field in member.model_fields.items() if field.is_required()):
            return tag
    return union.default
