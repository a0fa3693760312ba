"""Translate a preset of LoRA_Easy_Training_Scripts, a GUI whose sections hold options of kohya's scripts.

What it does to the options before the scripts see them is in ``utils/validation.py`` of its backend.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from simpletune.commands.importers import kohya
from simpletune.commands.importers.translation import (
    KeyOutcome,
    Translation,
    leaves,
    number,
    refuse,
    refuse_by_table,
    trainer_tables,
)
from simpletune.system.options import Json, UserError

TITLE, NAME = "LoRA_Easy_Training_Scripts (options of kohya's scripts)", "lora_easy_scripts"
LISTS = ("down_lr_weight", "up_lr_weight", "block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas")

MODULES = {"algo": "lycoris.kohya", "unit": "networks.dylora"}  # by an argument of the network


def is_preset(settings: Json) -> bool:
    """Return whether a section has the GUI's own name and division."""
    sections = (settings.get(name) for name in trainer_tables(NAME)["sections"])
    return any(isinstance(each, dict) and {"args", "dataset_args"} & each.keys() for each in sections)


def flatten(settings: Json) -> Json:
    """Return the options of all sections."""
    return _merged(settings, "args")


def _merged(settings: Json, part: str) -> Json:
    found: Json = {}
    for section in settings.values():
        if isinstance(section, dict) and isinstance(section.get(part), dict):
            found |= section[part]
    return found


def translate(settings: Json, folder: Path, data: Path | None) -> tuple[Translation, list[Translation]]:
    """Translate the options by way of the scripts'; lines name the GUI's keys."""
    tables, given = trainer_tables(NAME), flatten(settings)
    for section, model in tables["models"].items():
        if isinstance(settings.get(section), dict) and settings[section].get("args"):
            refuse(section, ", ".join(settings[section]["args"]), model)
    own = Translation({key: given.pop(key) for key in [*tables["left_out"], *tables["no_effect"]] if key in given})
    own.leave_others(tables)
    own.lines += _beside_options(settings)
    options = _options(given, own)
    method = _method(settings, options, own)
    refuse_by_table(options, trainer_tables(kohya.NAME))
    subsets = [dict(each) for each in settings.get("subsets") or []]
    for index, each in enumerate(subsets):
        if "name" in each:
            why = tables["no_effect_data"]["name"]
            own.lines.append(KeyOutcome("left out", f"subsets[{index}].name", each.pop("name"), why=why, same=True))
    shared = _merged(settings, "dataset_args")
    if not subsets:
        options |= shared
    else:
        _leave_if_set(options, "dataset_config", own, "the preset's own subsets count")
    if subsets and data is not None:
        for key, each in {"subsets": subsets, **shared}.items():
            for name, value in leaves(each, key):
                own.lines.append(KeyOutcome("left out", name, value, why="--data names another file", same=True))
    content = {"general": shared, "datasets": [{"subsets": subsets}]} if subsets else None
    defaults = dict(tables["defaults"])
    if "max_train_steps" not in options:
        defaults["max_train_epochs"] = 1
    general, sources = kohya.translate(options, folder, data, content, defaults)
    replaced = {"network_module": method} if "network_module" not in given else {}
    replaced |= {
        scripts: KeyOutcome("taken", gui, given[gui])
        for scripts, gui in (("lr_warmup_steps", "warmup_ratio"), ("lr_scheduler", "lr_scheduler_type"))
        if gui in given and gui not in options
    }
    for part in (general, *sources):
        for index, line in enumerate(part.lines):
            own_name = line.key.removeprefix("datasets[0].").removeprefix("general.")
            key = own_name if data is None else line.key
            line = part.lines[index] = replace(line, key=key)
            if key in replaced:
                said = replaced[key]
                part.lines[index] = replace(line, key=said.key, value=said.value, default=said.default)
    if not method.default and all(line.key != method.key for line in general.lines):
        own.lines.append(method)
    general.lines += own.lines
    return general, sources


def _beside_options(settings: Json) -> list[KeyOutcome]:
    """Return lines for keys of sections that are no options, apart from ``train_mode`` and ``subsets``."""
    rest: Json = {}
    for name, section in settings.items():
        if not isinstance(section, dict):
            rest |= {name: section} if name != "subsets" else {}
            continue
        known = {part for part in ("args", "dataset_args") if isinstance(section.get(part), dict)}
        known |= {"train_mode"} if name == "train_mode" else set()
        rest |= {f"{name}.{key}": value for key, value in section.items() if key not in known}
    return [KeyOutcome("unknown", name, value) for key, each in rest.items() for name, value in leaves(each, key)]


def _leave_if_set(options: Json, key: str, own: Translation, why: str) -> None:
    if key in options:
        own.lines.append(KeyOutcome("left out", key, options.pop(key), why=why, same=True))


def _options(given: Json, own: Translation) -> Json:
    """Return the scripts' options, as the backend writes them."""
    tables, options = trainer_tables(NAME), dict(given)
    for key, value in options.items():
        if isinstance(value, str):
            options[key] = {"true": True, "false": False}.get(
                value.lower(), value.replace("${replace}", str(own.settings.get("easy_name", "")))
            )
    kind = str(options.get("lr_scheduler_type", "")).rpartition(".")[2]
    if kind in tables["schedules"]:
        _leave_if_set(options, "lr_scheduler", own, "lr_scheduler_type counts")
        options["lr_scheduler"] = tables["schedules"][kind]
        del options["lr_scheduler_type"]
        if kind.startswith("Rex") and number(options.get("lr_scheduler_num_cycles", 1)) > 1:
            cycles = options.pop("lr_scheduler_num_cycles")
            own.lines.append(KeyOutcome("left out", "lr_scheduler_num_cycles", cycles, why="REX falls once here"))
    if "lr_scheduler_args" in options:
        reasons = tables["schedule_arguments"] if kind in tables["schedules"] else {}
        for name, value in leaves(options.pop("lr_scheduler_args"), "lr_scheduler_args"):
            why = reasons.get(name.partition(".")[2]) if reasons else "not supported"
            own.lines.append(KeyOutcome("left out" if why else "unknown", name, value, why=why or ""))
    for key in ("network_args", "optimizer_args"):
        if isinstance(options.get(key), dict):
            empty = [name for name, value in options[key].items() if value == ""]
            own.lines += [KeyOutcome("left out", f"{key}.{name}", "") for name in empty]
            options[key] = [
                f"{name}={','.join(map(str, value)) if name in LISTS and isinstance(value, list) else value}"
                for name, value in options[key].items()
                if value != ""
            ]
    if "warmup_ratio" in options:
        _leave_if_set(options, "lr_warmup_steps", own, "warmup_ratio counts")
        options["lr_warmup_steps"] = options.pop("warmup_ratio")
    return options


def _method(settings: Json, options: Json, own: Translation) -> KeyOutcome:
    """Set network_module as the backend does; return the line of the key that decided on it."""
    section = settings.get("train_mode")
    stated = isinstance(section, dict) and "train_mode" in section
    mode = settings["train_mode"]["train_mode"] if stated else "lora"
    network = {str(each).partition("=")[0]: str(each).partition("=")[2] for each in options.get("network_args") or ()}
    if mode == "textual_inversion":
        if not options.get("token_string"):
            raise UserError("train_mode is textual_inversion, but token_string names no token. Set it")
        return KeyOutcome("taken", "train_mode", mode, why="see token_string")
    if mode != "lora":
        refuse("train_mode", mode)
    for key in ("token_string", "init_word", "num_vectors_per_token"):  # the backend starts no textual inversion
        _leave_if_set(options, key, own, "train_mode is lora")
    decided = KeyOutcome("taken", "train_mode", mode, default=not stated)
    key = next((key for key in MODULES if key in network), "")
    options.setdefault("network_module", MODULES.get(key, "networks.lora"))
    if not key:
        return decided
    if stated:
        own.lines.append(replace(decided, why=f"see network_args.{key}"))
    return KeyOutcome("taken", f"network_args.{key}", network[key])
