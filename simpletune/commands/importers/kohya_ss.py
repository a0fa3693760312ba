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
    trainer_tables,
)
from simpletune.system.options import Json

TITLE, NAME = "kohya_ss", "kohya_ss"


flatten = kohya.flatten  # the GUI's own config.toml has sections


def translate(settings: Json, folder: Path, data: Path | None) -> tuple[Translation, list[Translation]]:
    """Translate the fields by way of the scripts' options; lines name the fields."""
    tables = trainer_tables(NAME)
    used = _used(flatten(settings))
    own = Translation({key: value for key, value in used.items() if key in tables["left_out"] | tables["no_effect"]})
    options = _options(used)
    refuse_by_table(options, trainer_tables(kohya.NAME))
    rows = [line for line in str(used.get("sample_prompts", "")).splitlines() if line.strip()]
    general, sources = kohya.translate(options, folder, data, _images(used))
    own.leave_others(tables)
    general.lines += own.lines
    if rows:
        general.settings["sample_prompts"] = used["sample_prompts"]
        kohya.take_prompts(general, [kohya.prompt_row(line) for line in rows])
    names = {ours: theirs for theirs, ours in tables["rename"].items() if theirs in used}
    for part in (general, *sources):
        for index, line in enumerate(part.lines):
            key = line.key.removeprefix(part.section).removeprefix("network_args.")
            key = "LoRA_type" if key == "network_module" and "LoRA_type" in used else names.get(key, key)
            if key in used and not line.default:
                part.lines[index] = replace(line, key=key, value=used[key])
    return general, sources


def _used(settings: Json) -> Json:
    """Return the fields that the GUI uses: those of SD3, of SDXL and of one kind of noise only if they are chosen."""
    tables, unused = trainer_tables(NAME), set(trainer_tables(NAME)["other_models"])
    if is_off(settings.get("sd3_checkbox")):
        unused |= set(tables["sd3"])
    if is_off(settings.get("sdxl")) and is_off(settings.get("sdxl_checkbox")):
        unused |= set(tables["sdxl"])
    noise = "noise_offset" if settings.get("noise_offset_type", "Original") == "Multires" else "multires_noise_"
    unused |= {key for key in settings if key.startswith(noise)} if "noise_offset_type" in settings else set()
    if is_off(settings.get("unet_lr")) and is_off(settings.get("text_encoder_lr")):
        unused |= {"unet_lr", "text_encoder_lr"}
    elif is_off(settings.get("unet_lr")) and "unet_lr" in settings:
        refuse("text_encoder_lr", settings["text_encoder_lr"], "the text encoders alone")
    return {key: value for key, value in settings.items() if key not in unused and value not in (None, "")}


def _options(used: Json) -> Json:
    """Return the scripts' options."""
    tables = trainer_tables(NAME)
    networks = tables["networks"]
    drop = {*tables["left_out"], *tables["no_effect"], "sample_prompts", "LoRA_type"}
    drop |= {*networks["arguments"], *networks["blocks"]}
    found = {tables["rename"].get(key, key): value for key, value in used.items() if key not in drop}
    found |= read_flags(split_words(str(found.pop("additional_parameters", ""))))
    if isinstance(found.get("optimizer_args"), str):
        found["optimizer_args"] = split_words(found["optimizer_args"])
    given = [key for key in ("max_train_epochs", "max_train_steps") if not is_off(used.get(key))]
    for key in ("max_train_epochs", "max_train_steps"):
        found.pop(key, None)
    if given or "epoch" in used:
        found["max_train_epochs" if not given else given[0]] = used[given[0] if given else "epoch"]
    steps = used.get("lr_warmup_steps")
    found["lr_warmup_steps"] = number(used.get("lr_warmup", 0)) / 100 if is_off(steps) else steps
    kind = str(used.get("LoRA_type", ""))
    if kind:
        module, algo = networks["of"][kind]
        found["network_module"] = (
            "networks.lora_sd3" if module == "networks.lora" and "sd3_checkbox" in used else module
        )
        passed = networks["arguments"] if kind != "Standard" else []
        passed = passed + (networks["blocks"] if module == "networks.lora" else [])
        # A block's "0" is a rate, not a switch.
        arguments = {
            n: used[n] for n in passed if (used.get(n) if n in networks["blocks"] else not is_off(used.get(n)))
        }
        if module.startswith("lycoris") and used.get("LyCORIS_preset"):
            arguments["preset"] = used["LyCORIS_preset"]  # which decides whether convolutions train
        if module.startswith("lycoris"):  # 0: no convolutions; without a number the rank is theirs
            arguments |= {name: str(used[name]) for name in ("conv_dim", "conv_alpha") if name in used}
        found["network_args"] = [f"{name}={value}" for name, value in ({"algo": algo} | arguments).items() if value]
        found["network_args"] += [f"{name}={found.pop(name)}" for name in ("loraplus_lr_ratio",) if name in found]
    return found


def _images(used: Json) -> Json | None:
    """Return the data set of the GUI's fine-tuning: one folder without the names of kohya's folders."""
    if "image_folder" not in used:
        return None
    subset = {"image_dir": used["image_folder"], "num_repeats": used.get("dataset_repeats", 1)}
    size = [side.strip() for side in str(used.get("max_resolution", "512,512")).split(",")]
    whole = {"resolution": size, "batch_size": used.get("train_batch_size", 1)}
    if boolean(used.get("create_buckets", True)):
        whole["enable_bucket"] = True
    return {"datasets": [{**whole, "subsets": [subset]}]}
