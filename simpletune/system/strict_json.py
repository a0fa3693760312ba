"""Parse untrusted JSON strictly (RFC 8259): unique keys, 64-bit numbers, bounded length, depth and size."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NoReturn, TypeAlias

from simpletune.system.regular_files import NotRegular, TooLarge, read_regular

MAX_DEPTH = 64  # levels of lists and objects; more could exceed Python's recursion limit in later code
MAX_BYTES = 2**20  # of a text, about a hundred times what a person writes
MAX_VALUES = 10_000  # in all lists and objects of a text, because each may cause a problem to report
LONGEST_INTEGER = 20  # characters of -2^63; longer ones are refused before conversion, which takes quadratic time
SHOWN = 40  # characters of a number in a message
JsonValue: TypeAlias = "None | bool | int | float | str | list[JsonValue] | dict[str, JsonValue]"


class JsonError(ValueError):
    """The error of text that is not strict JSON; line and column count from 1, and are 0 if unknown."""

    def __init__(self, message: str, line: int = 0, column: int = 0):
        super().__init__(message)
        self.line, self.column = line, column


def parse(text: str | bytes, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES) -> JsonValue:
    """Parse strict JSON: a text, or UTF-8 bytes. Raises JsonError for a syntax error, bytes that are not UTF-8, a
    duplicate key, NaN, Infinity or a number beyond 64 bits, more than ``MAX_DEPTH`` levels, or too many bytes or
    values."""
    too_deep = f"it is nested too deeply. Use at most {MAX_DEPTH} levels"
    if len(text) > max_bytes:
        raise JsonError(_too_long(len(text), max_bytes))
    try:
        decoded = text if isinstance(text, str) else text.decode()
        value: JsonValue = json.loads(
            decoded, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_int=_integer, parse_float=_float
        )
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, error.lineno, error.colno) from None
    except RecursionError:
        raise JsonError(too_deep) from None
    except UnicodeDecodeError as error:
        raise JsonError(f"it is not UTF-8 ({error})") from None
    opened = decoded.count("[") + decoded.count("{")
    if opened > MAX_DEPTH or opened + decoded.count(",") >= max_values:
        _require_few(value, max_values, too_deep)
    return value


def read(file: Path, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES) -> JsonValue:
    """Parse a file of strict JSON, ignoring a byte order mark; refuse pipes and devices, which may never end. Raises
    OSError if the file cannot be read, and JsonError as ``parse`` does or if it is not a regular file."""
    try:
        content = read_regular(file, max_bytes)
    except NotRegular:
        raise JsonError("it is not a regular file") from None
    except TooLarge as error:
        raise JsonError(_too_long(error.size or max_bytes + 1, max_bytes)) from None
    return parse(content.removeprefix(b"\xef\xbb\xbf"), max_bytes, max_values)


def _too_long(size: int, max_bytes: int) -> str:
    return f"it has {size:,} bytes. Use at most {max_bytes:,}"


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


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER or not -(2**63) <= int(digits) < 2**63:
        raise JsonError(f"{_cut(digits)} does not fit in 64 bits. Write an integer from -2^63 to 2^63 - 1")
    return int(digits)


def _float(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise JsonError(f"{_cut(digits)} does not fit in 64 bits. Write a number below 1.8e308")
    return value


def _cut(digits: str) -> str:
    return digits if len(digits) <= SHOWN else f"{digits[: SHOWN - 3]}... ({len(digits):,} digits)"


def _require_few(value: JsonValue, max_values: int, too_deep: str) -> None:
    """Check the depth and the number of values."""
    level: list[list[JsonValue] | dict[str, JsonValue]] = [value] if isinstance(value, list | dict) else []
    count = 1
    for _ in range(MAX_DEPTH):
        count += sum(map(len, level))
        if count > max_values:
            raise JsonError(f"it holds more than {max_values:,} values. Write fewer")
        children = (parent.values() if isinstance(parent, dict) else parent for parent in level if parent)
        level = [child for each in children for child in each if type(child) is list or type(child) is dict]
        if not level:
            return
    raise JsonError(too_deep)
