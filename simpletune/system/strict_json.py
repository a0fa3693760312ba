"""Strict JSON (RFC 8259) for text that others wrote: each key once, finite numbers, a bounded depth."""

from __future__ import annotations

import json
from typing import NoReturn, TypeAlias

MAX_DEPTH = 64  # levels of lists and objects; more would reach Python's recursion limit in what walks the values
JsonValue: TypeAlias = "None | bool | int | float | str | list[JsonValue] | dict[str, JsonValue]"


class JsonError(ValueError):
    """Text that is not strict JSON.

    Args:
        message: what is wrong, and the remedy.
        line: where a syntax error stands, from 1; 0: not known.
        column: in that line, from 1; 0: not known.
    """

    def __init__(self, message: str, line: int = 0, column: int = 0):
        super().__init__(message)
        self.line, self.column = line, column


def parse(text: str | bytes) -> JsonValue:
    """Parse strict JSON.

    Args:
        text: as text, or as UTF-8.

    Returns:
        The value. A number too large for a float, such as 1e999, is infinite.

    Raises:
        JsonError: a syntax error, bytes that are not UTF-8, a duplicate key, NaN or Infinity, or more than
            ``MAX_DEPTH`` levels.
    """
    too_deep = f"it is nested too deeply. At most {MAX_DEPTH} levels are read"
    try:
        decoded = text if isinstance(text, str) else text.decode()
        value: JsonValue = json.loads(decoded, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, error.lineno, error.colno) from None
    except RecursionError:
        raise JsonError(too_deep) from None
    except UnicodeDecodeError as error:
        raise JsonError(f"it is not UTF-8 ({error})") from None
    except JsonError:
        raise
    except ValueError:  # Python refuses the conversion: it takes quadratic time
        raise JsonError("an integer has thousands of digits. Write a shorter one") from None
    if decoded.count("[") + decoded.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise JsonError(too_deep)
    return value


def _object(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f"the key {json.dumps(key[:60])} appears twice in one object. Keep one of them")
            seen.add(key)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not a JSON number. Write a finite number")


def _is_deeper(value: JsonValue, depth: int) -> bool:
    """Whether lists and objects are nested in more levels than ``depth``."""
    level: list[list[JsonValue] | dict[str, JsonValue]] = [value] if isinstance(value, list | dict) else []
    for _ in range(depth):
        children = (parent.values() if isinstance(parent, dict) else parent for parent in level if parent)
        level = [child for each in children for child in each if type(child) is list or type(child) is dict]
        if not level:
            return False
    return True
