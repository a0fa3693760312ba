"""Read other trainers' files: JSON, TOML and plain YAML of limited size and depth; nothing that could run code."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import yaml

from simpletune.commands.importers.command_lines import read_command
from simpletune.system import strict_json
from simpletune.system.options import UserError
from simpletune.system.regular_files import NotRegular, TooLarge, read_regular
from simpletune.system.strict_json import JsonError

MOST = 2**20  # bytes of a file
COMMANDS = (".sh", ".bash", ".bat", ".cmd")  # suffixes of files with a command line
READ = (".json", ".toml", ".txt")  # suffixes of files that a configuration may name
VALUES = 100_000  # of a JSON file


def read_any(file: Path) -> object:
    if not file.exists():
        raise UserError(f"{file} does not exist. Give the configuration of another trainer")
    if file.is_dir():
        raise UserError(f"{file} is a folder. Name the configuration in it")
    try:
        text = read_regular(file, MOST).decode("utf-8-sig")
        if file.suffix in COMMANDS:
            return read_command(text) or {}
        if file.suffix in (".yaml", ".yml"):
            return _yaml(text)
        return tomllib.loads(text) if file.suffix == ".toml" else strict_json.parse(text, MOST, VALUES)
    except TooLarge as error:
        size = f"{error.size or MOST + 1:,} bytes" + ("" if error.size else " or more")
        raise UserError(f"{file} has {size}; a configuration has at most {MOST:,}. Name another file") from None
    except NotRegular:
        raise UserError(f"{file} is not a regular file. Name the configuration itself") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text. Give a .json or .toml file") from None
    except JsonError as error:
        raise UserError(f"{file}:{error.line}:{error.column}: not valid JSON ({error})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{file}: not valid YAML ({' '.join(str(error).split())})") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: not valid TOML ({error})") from None
    except RecursionError:
        raise UserError(f"{file} is nested too deeply. No trainer writes such a file: name the configuration") from None


def _yaml(text: str) -> object:
    """Parse YAML to the values of JSON, without tags, and without aliases, which can grow without bound."""
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader)):
        raise yaml.YAMLError("aliases are not read; write the values out")
    return json.loads(json.dumps(yaml.safe_load(text), default=str))


def read_named(folder: Path, named: object) -> object:
    """Read the file that a configuration names, if it is here; otherwise None."""
    beside = find_beside(folder, named) if isinstance(named, str) else None
    return None if beside is None else read_any(beside)


def find_beside(folder: Path, name: str) -> Path | None:
    """Find the file that a configuration names, relative to its folder, to the folder above (where trainers start), or
    to the current one; None if there is none."""
    if Path(name).suffix not in READ:
        return None
    places = (folder / name, folder.parent / name, Path(name), folder / Path(name).name)
    return next((place for place in places if place.is_file()), None)
