"""Translate the configuration of kohya_ss, a GUI for kohya's scripts, whose fields become the scripts' options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from simpletune.commands.importers import kohya
from simpletune.commands.importers.command_lines import read_flags, split_words
from simpletune.commands.importers.translation import (
    Translation,
    boolean,
    is_off,
    number,
    refuse,
    refuse_by_table,
    row_of,
    trainer_tables,
)
from simpletune.system.options import Json, UserError

TITLE, NAME = "kohya_ss", "kohya_ss"


flatten = kohya.flatten  # the GUI's own config.toml has sections


def translate(settings: Json, folder: Path, data: Path | None) -> tuple[Translation, list[Translation]]:
    """Translate the fields by way of the scripts' options; lines name the fields."""
    tables, fields = trainer_tables(NAME), flatten(settings)
    unused = _unused(fields)
    used = {key: value for key, value in fields.items() if key not in unused and value not in (None, "")}
    script = _script(used)
    options, names = _options(used)
    refuse_by_table(options, trainer_tables(kohya.NAME))
    rows = [line for line in str(used.get("sample_prompts", "")).splitlines() if line.strip()]
    general, sources = kohya.translate(options | script, folder, data, _images(used))
    if rows:
        general.settings["sample_prompts"] = used["sample_prompts"]
        kohya.take_prompts(general, [kohya.prompt_row(line) for line in rows])
    told: set[str] = set()
    for part in (general, *sources):
        for index, line in enumerate(part.lines):
            key = line.key.removeprefix("network_args.")
            key = names.get(key, names.get(key.rpartition(".")[2], key))
            if key in fields and not line.default:
                part.lines[index] = replace(line, key=key, value=fields[key])
                told.add(key)
        part.lines = [line for line in part.lines if line.key != "script"]
    own = Translation(fields)
    own.told(*told, *(line.key.partition(".")[0] for line in general.lines if "." in line.key))
    if own.has("additional_parameters"):
        own.keep("additional_parameters", "its options are listed here")
    for why in dict.fromkeys(unused.values()):
        own.unused(why, *(key for key in unused if unused[key] == why))
    networks, kind = tables["networks"], used.get("LoRA_type", "the whole model")
    own.unused(f"{kind} does not read it", *networks["arguments"], *networks["blocks"], *networks["plus"])
    own.leave_others(tables)
    general.lines += own.lines
    return general, sources


def _unused(fields: Json) -> dict[str, str]:
    """Return the fields that the GUI does not use, and why: those of SD3, of SDXL and of one kind of noise count only
    if they are chosen."""
    tables = trainer_tables(NAME)
    unused = dict.fromkeys(tables["other_models"], "of models that are refused")
    if is_off(fields.get("sd3_checkbox")):
        unused |= dict.fromkeys(tables["sd3"], "sd3_checkbox is off")
    if is_off(fields.get("sdxl")) and is_off(fields.get("sdxl_checkbox")):
        unused |= dict.fromkeys(tables["sdxl"], "sdxl is off")
    if "noise_offset_type" in fields:
        kind = fields["noise_offset_type"]
        noise = "noise_offset" if kind == "Multires" else "multires_noise_"
        others = {key for key in fields if key.startswith(noise)} - {"noise_offset_type"}
        unused |= dict.fromkeys(others, f"noise_offset_type is {kind}")
    if is_off(fields.get("unet_lr")) and is_off(fields.get("text_encoder_lr")):
        unused |= dict.fromkeys(("unet_lr", "text_encoder_lr"), "learning_rate counts")
    elif is_off(fields.get("unet_lr")) and "unet_lr" in fields:
        refuse("text_encoder_lr", fields["text_encoder_lr"], "the text encoders alone")
    return {key: why for key, why in unused.items() if key in fields}


def _script(used: Json) -> Json:
    """Return the script of the whole model if the fields are those of its tab."""
    tables = trainer_tables(NAME)
    if used.get("LoRA_type") or used.get("token_string"):
        return {}
    if any(key in used for key in tables["of_full"]) and not any(key in used for key in tables["of_networks"]):
        return {"script": "train_db.py"}
    raise UserError(
        'LoRA_type names no network. Add "LoRA_type": "Standard" for a LoRA, or "LoRA_type": "LyCORIS/Native '
        'Fine-Tuning" for fine-tuning the whole model'
    )


def _options(used: Json) -> tuple[Json, dict[str, str]]:
    """Return the scripts' options, and the fields that they come from."""
    tables = trainer_tables(NAME)
    networks = tables["networks"]
    own = {**tables["left_out"], **tables["no_effect"]}
    drop = {*(key for key in used if row_of(key, own) is not None), "sample_prompts", "LoRA_type", "LyCORIS_preset"}
    drop |= {*networks["arguments"], *networks["blocks"], "max_train_epochs", "max_train_steps", "epoch"}
    drop |= {"lr_warmup", "lr_warmup_steps", "sdxl_checkbox", "sd3_checkbox"}
    names = {tables["rename"].get(key, key): key for key in used if key not in drop}
    found = {option: used[key] for option, key in names.items()}
    found |= read_flags(split_words(str(found.pop("additional_parameters", ""))))
    if isinstance(found.get("optimizer_args"), str):
        found["optimizer_args"] = split_words(found["optimizer_args"])
    for key in ("sdxl", "sdxl_checkbox"):
        if not is_off(used.get(key)):
            found["sdxl"], names["sdxl"] = used[key], key
    given = [key for key in ("max_train_epochs", "max_train_steps") if not is_off(used.get(key))]
    for key in given or [key for key in ("epoch",) if key in used]:
        option = "max_train_epochs" if key == "epoch" else key
        found[option], names[option] = used[key], key
    if not is_off(used.get("lr_warmup_steps")):
        found["lr_warmup_steps"] = used["lr_warmup_steps"]
    elif not is_off(used.get("lr_warmup")):
        found["lr_warmup_steps"], names["lr_warmup_steps"] = number(used["lr_warmup"]) / 100, "lr_warmup"
    kind = str(used.get("LoRA_type", ""))
    if kind:
        module, algo = networks["of"][kind]
        found["network_module"] = (
            "networks.lora_sd3" if module == "networks.lora" and not is_off(used.get("sd3_checkbox")) else module
        )
        names["network_module"] = names["algo"] = "LoRA_type"
        passed = networks["arguments"] if kind != "Standard" else ["rank_dropout", "module_dropout"]
        passed = passed + (networks["blocks"] if module == "networks.lora" else [])
        # A block's "0" is a rate, not a switch.
        arguments = {
            n: used[n] for n in passed if (used.get(n) if n in networks["blocks"] else not is_off(used.get(n)))
        }
        if module.startswith("lycoris") and used.get("LyCORIS_preset"):
            arguments["preset"] = used["LyCORIS_preset"]  # which decides whether convolutions train
            names["preset"] = "LyCORIS_preset"
        if module.startswith("lycoris"):  # 0: no convolutions; without a number the rank is theirs
            arguments |= {name: str(used[name]) for name in ("conv_dim", "conv_alpha") if name in used}
        found["network_args"] = [f"{name}={value}" for name, value in ({"algo": algo} | arguments).items() if value]
        for name in [name for name in networks["plus"] if name in found]:
            value = found.pop(name)
            found["network_args"] += [f"{name}={value}"] if not is_off(value) else []
    return found, names


def _images(used: Json) -> Json | None:
    """Return the data set of the GUI's fine-tuning: one folder without the names of kohya's folders."""
    if "image_folder" not in used:
        return None
    whole = {}
    if boolean(used.get("create_buckets", True)):
        whole["enable_bucket"] = True
    return {"datasets": [{**whole, "subsets": [{"image_dir": used["image_folder"]}]}]}
