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
    number,
    refuse,
    refuse_by_table,
    trainer_tables,
)
from simpletune.system.options import Json, UserError

TITLE, NAME = "LoRA_Easy_Training_Scripts (options of kohya's scripts)", "lora_easy_scripts"
LISTS = ("down_lr_weight", "up_lr_weight", "block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas")


def is_preset(settings: Json) -> bool:
    """Whether a section has the GUI's own name and division."""
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
    options = _options(given, own)
    method, named = _method(settings, options, own)
    refuse_by_table(options, trainer_tables(kohya.NAME))
    subsets = [dict(each) for each in settings.get("subsets") or []]
    for index, each in enumerate(subsets):
        if "name" in each:
            why = tables["no_effect_data"]["name"]
            own.lines.append(KeyOutcome("left out", f"subsets[{index}].name", each.pop("name"), why=why, same=True))
    content = {"general": _merged(settings, "dataset_args"), "datasets": [{"subsets": subsets}]} if subsets else None
    options |= {} if subsets else _merged(settings, "dataset_args")
    defaults = dict(tables["defaults"])
    if "max_train_steps" not in options:
        defaults["max_train_epochs"] = 1
    general, sources = kohya.translate(options, folder, data, content, defaults)
    names = {"network_module": (method, named), "lr_warmup_steps": ("warmup_ratio", given.get("warmup_ratio"))}
    for part in (general, *sources):
        for index, line in enumerate(part.lines):
            line = part.lines[index] = replace(line, key=line.key.removeprefix("datasets[0]."))
            if line.key in names and line.key not in given:
                key, value = names[line.key]
                part.lines[index] = replace(line, key=key, value=value, default=key not in ("warmup_ratio", method))
    general.lines += own.lines
    return general, sources


def _options(given: Json, own: Translation) -> Json:
    """Return the scripts' options, as the backend writes them."""
    tables, options = trainer_tables(NAME), dict(given)
    for key, value in options.items():
        if isinstance(value, str):
            options[key] = {"true": True, "false": False}.get(
                value.lower(), value.replace("${replace}", str(own.settings.get("easy_name", "")))
            )
    for key in ("network_args", "optimizer_args"):
        if isinstance(options.get(key), dict):
            options[key] = [
                f"{name}={','.join(map(str, value)) if name in LISTS and isinstance(value, list) else value}"
                for name, value in options[key].items()
                if value != ""
            ]
    kind = str(options.get("lr_scheduler_type", "")).rpartition(".")[2]
    if kind in tables["schedules"]:
        options["lr_scheduler"] = tables["schedules"][kind]
        own.lines.append(KeyOutcome("taken", "lr_scheduler_type", options.pop("lr_scheduler_type"), "schedule.name",
                                    options["lr_scheduler"]))  # fmt: skip
        arguments = options.pop("lr_scheduler_args", {})
        for name, value in arguments.items() if isinstance(arguments, dict) else ():
            why = tables["schedule_arguments"].get(name, "unknown to simpletune import")
            own.lines.append(KeyOutcome("left out", f"lr_scheduler_args.{name}", value, why=why))
        if kind.startswith("Rex") and number(options.get("lr_scheduler_num_cycles", 1)) > 1:
            cycles = options.pop("lr_scheduler_num_cycles")
            own.lines.append(KeyOutcome("left out", "lr_scheduler_num_cycles", cycles, why="REX falls once here"))
    if "warmup_ratio" in options:
        options["lr_warmup_steps"] = options.pop("warmup_ratio")
    return options


def _method(settings: Json, options: Json, own: Translation) -> tuple[str, object]:
    """Set network_module as the backend does; return the key that decided on it and its value."""
    section = settings.get("train_mode")
    mode = section.get("train_mode", "lora") if isinstance(section, dict) else "lora"
    network = {str(each).partition("=")[0]: str(each).partition("=")[2] for each in options.get("network_args") or ()}
    if mode == "textual_inversion":
        if not options.get("token_string"):
            raise UserError("train_mode is textual_inversion, but token_string names no token. Set it")
        return "train_mode", mode
    if mode != "lora":
        refuse("train_mode", mode)
    for key in ("token_string", "init_word", "num_vectors_per_token"):  # the backend starts no textual inversion
        if key in options:
            own.lines.append(KeyOutcome("left out", key, options.pop(key), why="train_mode is lora", same=True))
    for key, module in (("algo", "lycoris.kohya"), ("unit", "networks.dylora")):
        if key in network:
            options.setdefault("network_module", module)
            return f"network_args.{key}", network[key]
    options.setdefault("network_module", "networks.lora")
    return "train_mode", mode
