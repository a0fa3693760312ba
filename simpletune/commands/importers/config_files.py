"""Read other trainers' files: JSON, TOML, plain YAML and command lines, of limited size and depth and with a limited
number of values, which bounds the time as well; nothing that could run code."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import yaml

from simpletune.commands.importers.command_lines import read_command
from simpletune.commands.importers.shells import SHELLS, TooLong
from simpletune.commands.importers.translation import local_path
from simpletune.system import strict_json
from simpletune.system.options import Json, UserError
from simpletune.system.printable import printable
from simpletune.system.regular_files import NotRegular, TooLarge, read_regular
from simpletune.system.strict_json import MAX_DEPTH, JsonError

MOST = 2**20  # bytes of a file
READ = (".json", ".toml", ".txt")  # suffixes of files that a configuration may name
VALUES = 100_000  # of a JSON or TOML file
YAML_VALUES = 20_000  # whose parser takes about 30 microseconds for each
DIGITS = 80  # of a number; 64 bits take up to 66, in base 2
DEEP_KEY = re.compile(rf"""^\s*\[*(?:[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.){{{MAX_DEPTH},}}""", re.MULTILINE)
"""A dotted TOML key of ``MAX_DEPTH`` parts or more; tomllib reads one in quadratic time."""


class TooDeep(ValueError):
    """Report a text with more than ``MAX_DEPTH`` levels."""


def read_any(file: Path) -> object:
    """Read a file to values of JSON. Raises UserError if it cannot, with the place if the parser knows it."""
    try:
        content = read_regular(file, MOST)
    except FileNotFoundError:
        raise UserError(f"{file} does not exist. Give the configuration of another trainer") from None
    except TooLarge as error:
        size = f"{error.size or MOST + 1:,} bytes" + ("" if error.size else " or more")
        raise UserError(f"{file} has {size}; a configuration has at most {MOST:,}. Name another file") from None
    except (NotRegular, IsADirectoryError):
        if file.is_dir():
            raise UserError(f"{file} is a folder. Name the configuration in it") from None
        raise UserError(f"{file} is not a regular file. Name the configuration itself") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror or error})") from None
    except ValueError as error:  # a name that no file can have
        raise UserError(f"{printable(str(file))} cannot be read ({error}). Name another file") from None
    try:
        code = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"  # as PowerShell writes
        return _plain(parse(content.decode(code), file.suffix.lower()), iter(range(VALUES)))
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text. Save it as UTF-8") from None
    except JsonError as error:
        raise UserError(f"{file}:{error.line}:{error.column}: not valid JSON ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(file)
        what = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"{place}: not valid YAML ({what})") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: not valid TOML ({error})") from None
    except (RecursionError, TooDeep):
        raise UserError(
            f"{file} is nested too deeply (the limit is {MAX_DEPTH} levels). No trainer writes such a file: name the "
            "configuration"
        ) from None
    except TooLong as error:
        raise UserError(f"{file}: {error}") from None
    except ValueError as error:  # a date or a number that a parser converts without a check
        raise UserError(f"{file} has what cannot be read ({error}). Correct or remove it") from None


def parse(text: str, suffix: str) -> object:
    """Parse a text in the format that a file's suffix stands for. Raises the parser's own error if it cannot."""
    if suffix in SHELLS:
        return read_command(text, suffix) or {}
    if suffix in (".yaml", ".yml"):
        return PlainLoader(text).get_single_data()
    if suffix != ".toml":
        return strict_json.parse(text, MOST, VALUES)
    if DEEP_KEY.search(text):
        raise TooDeep
    return tomllib.loads(text)


class PlainLoader(yaml.SafeLoader):
    """Read YAML to the values of JSON, with dates as text; refuses tags, and aliases, which can grow without bound."""

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = self._count = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        event = self.peek_event()
        self._count += 1
        if isinstance(event, yaml.AliasEvent):
            _refuse("aliases are not read; write the values out", event)
        if getattr(event, "tag", None) is not None:
            _refuse(f"the tag {event.tag[:40]} is not read; write the value without it", event)
        if self._count > YAML_VALUES:
            _refuse(f"it holds more than {YAML_VALUES:,} values. Write fewer", event)
        if self._depth == MAX_DEPTH:
            raise TooDeep
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def plain_number(self, node: yaml.ScalarNode) -> int | float:
        """Convert a number; refuses what no conversion of Python takes, or only in quadratic time."""
        convert = self.construct_yaml_int if node.tag.endswith(":int") else self.construct_yaml_float
        try:
            if len(node.value) > DIGITS:
                raise ValueError
            value: int | float = convert(node)
        except ValueError:
            _refuse(f"{node.value[:40]} is not a number of 64 bits. Correct or quote it", node)
        return value


PlainLoader.add_constructor("tag:yaml.org,2002:int", PlainLoader.plain_number)
PlainLoader.add_constructor("tag:yaml.org,2002:float", PlainLoader.plain_number)
PlainLoader.add_constructor("tag:yaml.org,2002:timestamp", PlainLoader.construct_yaml_str)


def _refuse(problem: str, at: yaml.Event | yaml.Node) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, at.start_mark)


def _plain(value: object, left: Iterator[int], place: str = "", depth: int = 0) -> object:
    """Return a value as JSON has it, with text for dates and other keys; refuses numbers, depths and numbers of values
    (those ``left``) beyond JSON's."""
    if next(left, None) is None:
        raise ValueError(f"more than {VALUES:,} values")
    if isinstance(value, dict | list):
        if depth == MAX_DEPTH:
            raise TooDeep
        if isinstance(value, list):
            return [_plain(each, left, f"{place}[{index}]", depth + 1) for index, each in enumerate(value)]
        found: Json = {}
        for key, each in value.items():
            found[str(key)] = _plain(each, left, f"{place}.{key}".lstrip("."), depth + 1)
        return found
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place}: {value} is not a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{place}: a number that does not fit in 64 bits")
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def read_named(folder: Path, named: object) -> object:
    """Read the file that a configuration names, if it is here; otherwise None."""
    beside = find_beside(folder, named) if isinstance(named, str) else None
    return None if beside is None else read_any(beside)


def find_beside(folder: Path, name: str) -> Path | None:
    """Find the file that a configuration names, relative to its folder, to the folder above (where trainers start), or
    to the current one; None if there is none."""
    name = str(local_path(name))
    if Path(name).suffix not in READ:
        return None
    places = (folder / name, folder.parent / name, Path(name), folder / Path(name).name)
    with suppress(OSError):  # a name that is too long
        return next((place for place in places if place.is_file()), None)
    return None
