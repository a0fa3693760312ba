"""Record what becomes of each key of another trainer's configuration: taken, changed and why, or left out and what it
did."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

from simpletune.config.schema import TrainConfig, run_name
from simpletune.models.families import FAMILIES, family_by_name, family_of
from simpletune.models.shared.family import Family
from simpletune.models.shared.model_config import ModelConfig
from simpletune.system.devices import is_under_wsl
from simpletune.system.options import Json, UserError, union_of
from simpletune.system.package import ASSETS
from simpletune.system.printable import printable
from simpletune.system.shell import wsl_path

T = TypeVar("T")
Became = Literal["taken", "changed", "left out", "unknown"]
Listed = Literal["left out", "unknown", "changed", "taken", "not needed", "off"]
Scalar = str | int | float | bool
Kind = Callable[[object], object]
SHOWN = 60  # characters of a value
SECRET = re.compile(
    r"secrets?(\.|$)|password|credential|(access|hub|hf|face|api|auth|wandb)_?(token|key)", re.IGNORECASE
)
UNTRANSLATED = "not translated together with the other options"
OFF = ", 0 is off"  # ends the kind of value of an option
LARGEST = 1e30  # no setting is as large, and products of those below stay finite
DIGITS = 6  # significant digits of a computed number
TRAINS = (
    "simpletune trains SD 3, 3.5, XL, 1.5, 2, FLUX.2 klein 4B, Z-Image and Qwen-Image: LoRA, DoRA, LoHa, LoKr, OFT, "
    "embeddings and the whole denoiser"
)


class Unsupported(UserError):
    """Refuse a model or a method that simpletune does not train, and that nothing here may stand for."""


def refuse(key: str, value: object, what: str = "") -> NoReturn:
    """Refuse a configuration for a value of a key; ``what`` it stands for."""
    named = f"{key} {format_value(key, value)}" + (f" ({what})" if what else "")
    raise Unsupported(f"{named} is not supported: {TRAINS}. Nothing is written")


@dataclass(frozen=True)
class KeyOutcome:
    """Record of what became of one key."""

    became: Became
    key: str  # key of the other trainer, with its section
    value: object
    path: str = ""  # our field; empty if left out
    new: object = None  # its value
    why: str = ""  # the reason for a change, or what a left-out key did
    default: bool = False  # whether the value is the trainer's default, because the file does not set it
    same: bool = False  # whether a left-out key makes no difference to the result

    @property
    def off(self) -> bool:
        """Whether a left-out option was switched off there, too; of an unknown one 0 may be a setting."""
        if self.became == "unknown":
            return self.value is None or self.value is False or self.value in ("", [], {})
        return self.became == "left out" and is_off(self.value)

    @property
    def listed(self) -> Listed:
        """The list that it is printed in, if its key has no other line."""
        if self.became in ("taken", "changed"):
            return self.became
        return "off" if self.off else "not needed" if self.same else self.became

    def __str__(self) -> str:
        source = f"{self.key} {format_value(self.key, self.value)}" + (" (its default)" if self.default else "")
        target = f" -> {self.path} {format_value(self.path, self.new)}" if self.path else ""
        return f"{source}{target}{': ' if self.why else ''}{self.why}"


def format_value(key: str, value: object) -> str:
    """Format a value for a line of text, shortened; hides secrets."""
    if SECRET.search(key):
        return "(not shown)"
    text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


@dataclass(frozen=True)
class KeyRule:
    """Row of a table: what a key means here."""

    key: str  # the other trainer's key
    path: str  # our field
    kind: Kind  # converts its value
    values: Mapping[str, object] | None = None  # our values by theirs, in lower case; None: use the value itself
    # reasons by their value, for those whose meaning changes; ``*`` is a reason for all
    why: Mapping[str, str] = field(default_factory=dict)
    otherwise: tuple[object, str] | None = None  # our value for one that is not in ``values``, and the reason for it
    zero_is_off: bool = False  # whether 0 switches the option off, which null does here


class Translation:
    """Translation of another trainer's settings to ours, in progress.

    ``defaults``: the trainer's, where they differ from ours; ``section`` and ``place``: prefixes of its keys and of our
    paths in messages, such as ``datasets[0].`` and ``data.sources.0.``; ``outer``: whole names of keys whose values
    stand in another section. Empty values switch an option off. ``leave_others`` closes it: from then on every key of
    ``settings`` has a line, here or where ``told`` says.
    """

    def __init__(
        self,
        settings: Json,
        defaults: Mapping[str, object] | None = None,
        section: str = "",
        place: str = "",
        outer: Mapping[str, str] | None = None,
    ):
        given = {key: value for key, value in settings.items() if not is_empty(value)}
        self._empty = {key: value for key, value in settings.items() if is_empty(value)}
        self.settings: Json = {key: local_path(value) for key, value in given.items()}
        self.defaults = dict(defaults or {})
        self.section, self.place = section, place
        self.outer = dict(outer or {})
        self.config: Json = {}
        self._of_windows = {
            key: KeyOutcome("changed", self.name(key), value, why=f"{format_value(key, local)}, as WSL calls it")
            for key, value in given.items()
            if (local := self.settings[key]) != value
        }
        self.lines = [*self._of_windows.values()]
        self._read: set[str] = set()
        self._told: set[str] = set()  # keys with a line

    def has(self, key: str) -> bool:
        return key in self.settings

    def sets_empty(self, key: str) -> bool:
        """Return whether the file sets a key to nothing, as null does."""
        return key in self._empty

    def read(self, key: str, kind: Callable[[object], T]) -> T | None:
        """Return the value of a key, the trainer's default or None, and mark the key as understood.

        Leaves out a value of the wrong kind, with that as the reason.
        """
        self._read.add(key)
        raw = self.settings.get(key, self.defaults.get(key))
        if raw is None:
            return None
        try:
            return kind(raw)
        except (ValueError, TypeError, OverflowError):
            self.leave(key, f"expected: {kind.__name__.replace('_', ' ')}")
            return None

    def take(self, key: str, path: str, value: object, why: str = "") -> None:
        """Take a value for one of our fields: unchanged, or with the reason for a change."""
        self._add("changed" if why else "taken", key, self.place + path, value, why)
        self.set(path, value)

    def leave(self, key: str, why: str, same: bool = False) -> None:
        """Leave a key out: what it did, or why it cannot be kept; ``same``: the result does not change by it."""
        self._leave_whole(key, why, same)

    def keep(self, key: str, why: str) -> None:
        """Say of a key that no one field stands for what the result has from it."""
        self._add("taken", key, why=why)

    def note(self, key: str, why: str) -> None:
        """Say how a key differs that no field stands for."""
        self._add("changed", key, why=why)

    def _add(
        self, became: Became, key: str, path: str = "", new: object = None, why: str = "", same: bool = False
    ) -> None:
        raw = self.settings.get(key, self.defaults.get(key))
        self._told.add(key)
        self.lines.append(KeyOutcome(became, self.name(key), raw, path, new, why, not self.has(key), same))

    def name(self, key: str) -> str:
        """Return a key with its section."""
        return self.outer.get(key, self.section + key)

    def set(self, path: str, value: object) -> None:
        """Set one of our fields without recording a line."""
        *sections, leaf = path.split(".")
        section = self.config
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = value

    def get(self, path: str, default: object = None) -> object:
        """Return one of our fields, as set so far."""
        section: object = self.config
        for name in path.split("."):
            section = section.get(name) if isinstance(section, dict) else None
        return default if section is None else section

    @property
    def family(self) -> Family:
        """The model's family, as set so far, with the base that is set so far."""
        name = self.get("model.family", FAMILIES[0].family)
        family = next((each for each in FAMILIES if each.family == name), FAMILIES[0])
        base = self.get("model.pretrained")
        return family if base is None else family.model_copy(update={"pretrained": base})

    @property
    def objective(self) -> str:
        """The ``name`` of the run's objective, as set so far; by default the family's."""
        return str(self.get("objective.name", self.family.objectives[0]))

    def by_table(self, rows: Iterable[KeyRule]) -> None:
        """Translate those keys of a table that the file or the trainer's defaults set."""
        for row in rows:
            if row.key in self._read or (not self.has(row.key) and row.key not in self.defaults):
                continue
            value = self.read(row.key, row.kind)
            if value is None:
                continue
            name = str(value).lower()
            if (lacking := self._lacks(row.path)) is not None:
                self.leave(row.key, lacking)
            elif row.zero_is_off and value == 0:
                self.take(row.key, row.path, None)
            elif row.values is None or name in row.values:
                new = value if row.values is None else row.values[name]
                self.take(row.key, row.path, new, row.why.get(name, row.why.get("*", "")))
            elif row.otherwise is not None:
                self.take(row.key, row.path, *row.otherwise)
            else:
                self.leave(row.key, f"simpletune has nothing like it, only {', '.join(row.values)}")

    def _lacks(self, path: str) -> str | None:
        """Return why the chosen adapter or objective has no such field; None if it has."""
        section, _, leaf = path.partition(".")
        union = None if section not in ("adapter", "objective") else union_of(TrainConfig.model_fields[section])
        if union is None or self.place:
            return None
        chosen = self.get("adapter.method", union.default) if section == "adapter" else self.objective
        known = leaf.partition(".")[0] in union.members[str(chosen)].model_fields
        return None if known else f"{section}.{union.tag} {chosen} has no such option"

    def leave_others(self, tables: Json, part: str = "") -> None:
        """Give each remaining key its line: why it makes no difference, or what the result lacks by it, from
        ``no_effect`` and ``left_out``, where a pattern may end in ``*``; what it needs to count, from ``unused``, if it
        was read; else that it is unknown. ``part``: ending of the tables' names. Keys of a section have a line each."""
        idle, gone, unused = (tables.get(f"{name}{part}", {}) for name in ("no_effect", "left_out", "unused"))
        for key, value in self._empty.items():
            if key not in self._told | self.settings.keys():
                self.lines.append(KeyOutcome("left out", self.name(key), value))
        for key in [key for key in self.settings if key not in self._told]:
            value, same_row, row = self.settings[key], row_of(key, idle), row_of(key, gone)
            same = None if same_row is None or _is_nearer(row, same_row) else idle[same_row]
            if isinstance(same, dict):  # reasons that hold for one value each
                same = same.get(str(value).lower())
            if same is None and key in self._read and (unused_row := row_of(key, unused)) is not None:
                same = unused[unused_row]
            if same is not None:
                self._leave_whole(key, same, True)
            elif row is not None or key in self._read:
                self._leave_whole(key, UNTRANSLATED if row is None else gone[row])
            else:
                self._leave_whole(key, "", unknown=True)

    def _leave_whole(self, key: str, why: str, same: bool = False, unknown: bool = False) -> None:
        """Leave out a key, or each key of the section that is its value."""
        became: Became = "unknown" if unknown else "left out"
        self._read.add(key)
        self._told.add(key)
        raw = self.settings.get(key, self.defaults.get(key))
        if (path := self._of_windows.pop(key, None)) is not None:  # the result has no such path
            self.lines.remove(path)
            raw = path.value
        for name, value in leaves(raw, self.name(key)):
            self.lines.append(KeyOutcome(became, name, value, why=why, default=not self.has(key), same=same))

    def part(self, key: str, name: str, value: object) -> str:
        """Register one of several values inside a key as a separate key: ``optimizer_args.weight_decay``."""
        own = f"{key}.{name}"
        self.settings[own] = value
        self._read.add(own)
        self._told.add(key)
        return own

    def told(self, *keys: str) -> None:
        """Mark keys whose lines stand in another translation."""
        self._read.update(keys)
        self._told.update(keys)

    def unused(self, why: str, *keys: str) -> None:
        """Say of those of the keys that the file sets, and that have no line, why they make no difference."""
        for key in keys:
            if self.has(key) and key not in self._told:
                self.leave(key, why, same=True)


def is_empty(value: object) -> bool:
    return value is None or value in ("", [], {})


def leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Return a value's keys, nested ones with their sections, and values; a plain value has one."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from leaves(each, f"{name}.{key}")
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for index, each in enumerate(value):
            yield from leaves(each, f"{name}[{index}]")
    else:
        yield name, value


def row_of(key: str, table: Mapping[str, object]) -> str | None:
    """Find a key's row: its own, or that of the longest pattern that ends in ``*``."""
    if key in table:
        return key
    patterns = [name for name in table if name.endswith("*") and key.startswith(name[:-1])]
    return max(patterns, key=len, default=None)


def _is_nearer(row: str | None, other: str) -> bool:
    """Return whether a row names a key more closely than the other one."""
    return row is not None and other.endswith("*") and (not row.endswith("*") or len(row) > len(other))


def local_path(value: object) -> object:
    """Return a path of Windows as it is called under WSL, if this is WSL; anything else unchanged."""
    if not is_under_wsl():
        return value
    if isinstance(value, list):
        return [local_path(each) for each in value]
    if isinstance(value, str) and (on_drive := wsl_path(value)) is not None:
        return on_drive
    return value.replace("\\", "/") if isinstance(value, str) and value.startswith((".\\", "..\\")) else value


def is_off(value: object) -> bool:
    """Return whether an option with this value is switched off: empty, false, 0, or a word for them."""
    return not value or str(value).strip().lower() in ("false", "no", "none", "off", "0", "0.0")


def refuse_by_table(settings: Json, tables: Json) -> None:
    """Refuse models and methods that simpletune does not train: values that ``supported`` lacks, and those whose text
    matches a pattern in ``refused``."""
    refused = tables.get("refused", {})
    for key, values in tables.get("supported", {}).items():
        if key in settings and not is_off(settings[key]) and settings[key] not in values:
            known = (what for pattern, what in refused.get(key, {}).items() if re.search(pattern, str(settings[key])))
            refuse(key, settings[key], next(known, ""))
    for key, patterns in refused.items():
        for pattern, what in patterns.items():
            if not is_off(settings.get(key)) and re.search(pattern, str(settings[key])):
                refuse(key, settings[key], what)


def refuse_references(general: Translation, key: str, value: object) -> None:
    """Refuse reference pictures of a model that edits by them: what it learned would be another task."""
    if general.family.words.edits and not is_off(value):
        refuse(key, value, "reference pictures, which are not trained on; without them it is another task")


def boolean(value: object) -> bool:
    """Parse true and false as written in JSON, TOML, or on a command line."""
    word = str(value).strip().lower()
    if word in ("true", "1", "yes", "on", "i_know_what_i_am_doing"):
        return True
    if word in ("false", "0", "no", "off", "none"):
        return False
    raise ValueError(f"{format_value('', value)} is not true or false")


def number(value: object) -> float:
    """Parse a number, also from text: ``"1e-5"``."""
    try:
        found = value if isinstance(value, int | float) else float(str(value))
    except ValueError:
        found = math.nan
    if isinstance(value, bool) or not -LARGEST < found < LARGEST:  # nor is NaN
        raise ValueError(f"{format_value('', value)} is not a number that an option takes")
    return found


def whole_number(value: object) -> int:
    """Parse a whole number, also from text: ``"1000"``, ``"1e3"``."""
    found = number(value)
    if found != int(found):
        raise ValueError(f"{format_value('', value)} is not a whole number")
    return int(found)


def as_text(value: object) -> str:
    """Return a text, or a number as text."""
    if not isinstance(value, Scalar):
        raise ValueError
    return str(value)


def as_text_list(value: object) -> list[str]:
    return [as_text(value)]


def as_run_name(value: object) -> str:
    return run_name(as_text(value))


KINDS: dict[str, Kind] = {
    "text": as_text, "texts": as_text_list, "number": number, "whole number": whole_number, "boolean": boolean,
    "name": as_run_name,
}  # fmt: skip


@functools.cache
def trainer_tables(trainer: str) -> Json:
    """Read ``assets/import/TRAINER.toml``; its options become lists of ``KeyRule``."""
    found = tomllib.loads((ASSETS / "import" / f"{trainer}.toml").read_text(encoding="utf-8"))
    values, why, otherwise = (found.get(name, {}) for name in ("values", "why", "otherwise"))
    for name in found.keys() & {"options", "options_data", "lora"}:
        found[name] = [
            KeyRule(
                key,
                path,
                KINDS[kind.removesuffix(OFF)],
                values.get(key),
                why.get(key, {}),
                otherwise.get(key),
                kind.endswith(OFF),
            )
            for key, (path, kind) in found[name].items()
        ]
    return {"scripts": ()} | found


def round_digits(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def pairs(value: object) -> dict[str, str]:
    """Parse ``["a=1", "b=2"]`` or ``"a=1,b=2"`` to a dictionary; values may contain commas."""
    parts = value if isinstance(value, list) else re.split(r"[,\s]+(?=[^,\s=]+=)", str(value))
    found = {}
    for part in parts:
        name, equals, content = str(part).partition("=")
        if not equals:
            raise ValueError
        found[name.strip().lstrip("-")] = content.strip().strip("'\"")
    return found


UNKNOWN = "no option or name indicates another one"


def take_family_of_base(found: Translation, key: str, folder: Path, otherwise: str, why: str = UNKNOWN) -> bool:
    """Translate the family of the base that ``key`` names: by its files, by its name, or ``otherwise`` and why. Whether
    files or name tell."""
    base = found.settings.get(key)
    base = base if isinstance(base, str) else ""
    local = folder / base
    if base and (family := family_of(str(local) if os.path.exists(local) else base)) is not None:
        found.take(key, "model.family", family.family)
    elif base and (family := family_by_name(base)) is not None:
        found.take(key, "model.family", family.family, "by its name")
    else:
        found.take(key, "model.family", otherwise, why)
        return False
    return True


def blocks_of(general: Translation) -> int:
    """Count the blocks of the base."""
    return len(general.family.architecture.units_among(general.family.architecture.shapes_of(known_config(general))))


def known_config(general: Translation) -> ModelConfig:
    """Return the configuration of the base's denoiser, or of its family's own base if only a download could tell."""
    with suppress(UserError, OSError):  # it is not on this machine
        if (config := general.family.files.denoiser_config(fetch=False)) is not None:
            return config
    config = type(general.family).model_validate({}).files.denoiser_config(fetch=False)
    assert config is not None, "every family's own base ships its configurations"
    return config


def side_of_area(width: float, height: float, step: int) -> int:
    """Return the side of a square with this area, to the nearest multiple of ``step``, at least one."""
    return max(step, int((width * height) ** 0.5 / step + 0.5) * step)
