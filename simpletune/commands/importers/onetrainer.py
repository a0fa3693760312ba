"""Translate OneTrainer's configuration: its concepts become sources, and its samples validation prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from simpletune.commands.importers.common_options import (
    VARIANTS,
    leave_refiners_out,
    take_alpha,
    take_arguments,
    take_convolutions,
    take_embedding,
    take_optimizer,
    take_samples,
    take_schedule,
    take_start,
    take_text_lora,
    take_warmup,
)
from simpletune.commands.importers.config_files import read_any, read_named
from simpletune.commands.importers.translation import (
    KeyRule,
    Translation,
    as_text,
    blocks_of,
    boolean,
    is_off,
    number,
    round_digits,
    side_of_area,
    trainer_tables,
    whole_number,
)
from simpletune.config.schema import run_name
from simpletune.models.lora_registry import is_convolution
from simpletune.system.options import Json, UserError

TITLE, NAME = "OneTrainer", "onetrainer"
MOST_VARIANTS = 64
OWN = ("optimizer_defaults",)  # of today's version
OF_LORA = ("lora_", "lokr_", "oft_", "peft_type", "layer_filter", "dropout_probability", "bundle_")
RANDOM = {
    "brightness": ("random_brightness_max_strength", "brightness", 1, 1),
    "contrast": ("random_contrast_max_strength", "contrast", 1, 1),
    "saturation": ("random_saturation_max_strength", "saturation", 1, 1),
    "hue": ("random_hue_max_strength", "hue", 180, 180),
    "rotate": ("random_rotate_max_angle", "rotation", 1, 45),
}
"""What ``enable_random_*`` switches on: the key of its range, the field, the factor, the largest range."""


def flatten(settings: Json) -> Json:
    """Return the options, which have no sections."""
    return settings


def translate(settings: Json, folder: Path, data: Path | None) -> tuple[Translation, list[Translation]]:
    """Translate options, concepts and samples, which may be in the same file or in others."""
    given = settings
    settings, names = _current(settings)
    general = _options(settings)
    concepts = settings.get("concepts")
    if data is not None:
        concepts = read_any(data)
        general.unused("--data names another file", "concepts", "concept_file_name")
    elif concepts is not None:
        general.told("concepts")
        general.unused("the concepts are in this file", "concept_file_name")
    else:
        concepts = _named(general, folder, "concept_file_name", "the file is not here. Give it with --data")
    if concepts is not None and not (isinstance(concepts, list) and all(isinstance(each, dict) for each in concepts)):
        raise UserError("--data: OneTrainer's concepts are a list of objects (concepts.json)")
    sources = _concepts(concepts or [], general)
    samples = settings.get("samples")
    if samples is None:
        why = "the file is not here. Set validation.prompts"
        samples = _named(general, folder, "sample_definition_file_name", why)
    general.unused("the samples are in this file", "sample_definition_file_name")
    if isinstance(samples, list):
        _samples(samples, general)
    general.leave_others(trainer_tables(NAME))
    general.lines = [
        replace(line, key=names[line.key], value=given[names[line.key]]) if line.key in names else line
        for line in general.lines
    ]
    return general, sources


def _current(settings: Json) -> tuple[Json, dict[str, str]]:
    """Return the settings of an older version under the keys of today, and the old names by today's."""
    found, names, tables = dict(settings), {}, trainer_tables(NAME)
    moved = {key: new for key, new in tables["older"].items() if key in found}
    if isinstance(settings.get("optimizer"), str):
        moved |= {key: key.replace("_", ".", 1) for key in found if key.startswith("optimizer_") and key not in OWN}
        moved["optimizer"] = "optimizer.optimizer"
    offloaded = found.get("gradient_checkpointing") == "CPU_OFFLOADED"
    for part in ("unet", "transformer"):
        if "gradient_checkpointing" in found:
            on = found["gradient_checkpointing"] not in ("OFF", False)
            found[part] = _part_of(found, part) | {"gradient_checkpointing": on}
            names[f"{part}.gradient_checkpointing"] = "gradient_checkpointing"
        for old, new in (("enable_activation_offloading", "activation_offloading"),
                         ("layer_offload_fraction", "offload_fraction")):  # fmt: skip
            if old in found and offloaded:
                found[part] = _part_of(found, part) | {new: found[old]}
                names[f"{part}.{new}"] = old
        if _part_of(found, part).get("weight_dtype", "NONE") == "NONE" and "weight_dtype" in found:
            found[part] = _part_of(found, part) | {"weight_dtype": found["weight_dtype"]}
            names[f"{part}.weight_dtype"] = "weight_dtype"
    if offloaded:
        moved |= dict.fromkeys(("enable_activation_offloading", "layer_offload_fraction"), "")
    moved |= dict.fromkeys(("gradient_checkpointing",), "")
    for key, new in moved.items():
        section, _, leaf = new.rpartition(".")
        value = found.pop(key, None)
        if section:
            found[section] = _part_of(found, section) | {leaf: value}
        elif new:
            found[new] = value
        names[new] = key
    if "timestep_distribution" not in found and not is_off(found.get("noising_weight")):
        found["timestep_distribution"] = "SIGMOID"
        names["timestep_distribution"] = "noising_weight"
    if not is_off(found.pop("min_snr_gamma", None)):
        found |= {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": settings["min_snr_gamma"]}
        names |= dict.fromkeys(("loss_weight_fn", "loss_weight_strength"), "min_snr_gamma")
    return found, names


def _part_of(settings: Json, name: str) -> Json:
    part = settings.get(name)
    return part if isinstance(part, dict) else {}


def _named(general: Translation, folder: Path, key: str, absent: str) -> object:
    """Read the file that a key names, and say whether it is here."""
    content = read_named(folder, general.settings.get(key))
    if content is not None:
        general.keep(key, "its content is listed here")
    elif general.has(key):
        general.leave(key, absent)
    return content


def _options(settings: Json) -> Translation:
    tables = trainer_tables(NAME)
    found = Translation(settings, tables["defaults"])
    _model(found)
    method = _adapter(found)
    if "text_length" in type(found.family).model_fields and found.family.family != "klein":
        found.by_table([KeyRule("text_encoder_sequence_length", "model.text_length", whole_number)])
    take_start(found, "lora_model_name")
    found.by_table(tables["options"])
    _part(found, found.family.denoiser, method)
    _autoencoder(found)
    _optimizer(found)
    _text(found, method)
    found.by_table([KeyRule("epochs", "train.epochs", whole_number)])
    take_warmup(found, "learning_rate_warmup_steps")
    if not found.sets_empty("clip_grad_norm"):
        found.by_table([KeyRule("clip_grad_norm", "train.clip_norm", number)])
    if found.settings.get("clip_grad_norm", 1.0) == 0 or found.sets_empty("clip_grad_norm"):
        found.set("train.clip_norm", None)
    _objective(found)
    average, decay = found.read("ema", as_text) or "OFF", found.read("ema_decay", number)
    if average != "OFF":
        found.take("ema", "ema.decay", decay or 0.999, "the average stays on the device")
        if decay:
            found.keep("ema_decay", "see ema")
    if not found.read("validation", boolean):
        found.unused("validation is off", "validate_after", "validate_after_unit")
    if average == "OFF":
        found.unused("ema is OFF", "ema_update_step_interval")
    _places(found)
    return found


def _model(found: Translation) -> None:
    name, families = found.read("model_type", as_text) or "", trainer_tables(NAME)["families"]
    found.take("model_type", "model.family", families[name])


def _adapter(found: Translation) -> str:
    tables = trainer_tables(NAME)
    kind, peft = found.read("training_method", as_text), found.read("peft_type", as_text) or "LORA"
    if kind is None:
        raise UserError(
            'training_method names no method. Add "training_method": "LORA", or "training_method": "FINE_TUNE" for '
            "fine-tuning the whole model"
        )
    if kind in ("FINE_TUNE", "EMBEDDING"):
        why = "only the embedding trains" if kind == "EMBEDDING" else ""
        method = "none" if kind == "EMBEDDING" else "full"
        found.take("training_method", "adapter.method", method, why)
        found.unused(f"training_method is {kind}", *(key for key in found.settings if key.startswith(OF_LORA)))
        return method
    found.keep("training_method", "see peft_type")
    method = tables["methods"][peft]
    if method == "lora" and found.read("lora_decompose", boolean):
        method = "dora"
        found.take("lora_decompose", "adapter.method", "dora")
        found.unused("see lora_decompose", "peft_type")
    else:
        found.take("peft_type", "adapter.method", method)
    _rank(found, method)
    found.by_table(
        [
            KeyRule(
                "lora_weight_dtype",
                "adapter.dtype",
                as_text,
                {"float_32": "fp32", "bfloat_16": "bf16"},
                otherwise=("fp32", "an update trains in fp32 or bf16"),
            )
        ]
    )
    names, preset = found.read("layer_filter", as_text), found.read("layer_filter_preset", as_text) or "full"
    if preset in tables["targets"]:
        found.take("layer_filter_preset", "adapter.targets", tables["targets"][preset])
    elif names:
        found.take(
            "layer_filter",
            "adapter.targets",
            [part.strip() for part in names.split(",") if part.strip()],
            "endings of layer names; OneTrainer matches any part of them",
        )
    elif preset == "custom":
        found.take("layer_filter_preset", "adapter.targets", "all_linear", "without a filter, all layers train")
    if "(?!.*refiner)" in (names or "") and found.get("model.family") == "zimage":
        leave_refiners_out(found, "layer_filter", "its filter")
    chosen = found.get("adapter.targets")
    if preset == "full" or isinstance(chosen, list) and any(map(is_convolution, chosen)):
        rank = found.read("lokr_dim" if method == "lokr" else "lora_rank", whole_number)
        rank = 1024 if method == "lokr" and found.read("lokr_full_matrix", boolean) else rank
        if method != "oft":
            key = "layer_filter_preset" if preset == "full" else "layer_filter"
            take_convolutions(found, key, rank, found.read("lora_alpha", number), found.family, "")
    return method


def _rank(found: Translation, method: str) -> None:
    rank, alpha = found.read("lora_rank", whole_number), found.read("lora_alpha", number)
    if method in ("lora", "dora") and rank is not None and alpha is not None:
        found.take("lora_rank", "adapter.rank", rank)
        take_alpha(found, "lora_alpha", alpha, rank)
        found.by_table([KeyRule("dropout_probability", "adapter.dropout", number)])
    elif method == "loha":
        found.take("lora_rank", "adapter.rank", rank)
        found.leave("lora_alpha", "it equals the rank here; scale optimizer.lr instead")
    elif method == "lokr":
        whole = found.read("lokr_full_matrix", boolean)
        found.by_table(
            [
                KeyRule("lokr_decompose_factor", "adapter.factor", whole_number),
                KeyRule("lokr_decompose_both", "adapter.decompose_both", boolean),
            ]
        )
        if whole:
            found.take("lokr_full_matrix", "adapter.rank", None)
        else:
            found.by_table([KeyRule("lokr_dim", "adapter.rank", whole_number)])
    else:
        found.by_table([KeyRule("oft_block_size", "adapter.block_size", whole_number)])


def as_object(value: object) -> Json:
    if not isinstance(value, dict):
        raise ValueError
    return value


def as_objects(value: object) -> list[Json]:
    if not isinstance(value, list):
        raise ValueError
    return [as_object(each) for each in value]


def _part(found: Translation, name: str, method: str) -> None:
    """Translate the trained part: its weights, checkpointing and offload."""
    tables, own = trainer_tables(NAME), found.read(name, as_object) or {}
    part = Translation(own, {"weight_dtype": "FLOAT_32"}, f"{name}.")
    kind = part.read("weight_dtype", as_text) or ""
    weights = tables["weights"].get(kind)
    if weights is None:
        part.leave(
            "weight_dtype",
            f"simpletune has {', '.join(dict.fromkeys(tables['weights'].values()))}. Set precision.weights",
        )
    else:
        part.take("weight_dtype", "precision.weights", weights, tables["weights_why"].get(kind, ""))
    if method == "full" and weights == "bf16" and found.get("precision.compute") == "fp16":
        found.lines = [line for line in found.lines if line.path != "precision.compute"]  # changed, not taken
        found.take("train_dtype", "precision.compute", "bf16", "as the weights: those that train in bf16 need it")
    if kind in ("INT_W8A8", "FLOAT_W8A8"):
        part.take("weight_dtype", "precision.products", "int8")
    if str(own.get("model_name")).startswith(("http:", "https:")):
        part.leave("model_name", f"an address. Download the file and set model.{name}")
    elif part.has("model_name"):
        part.by_table([KeyRule("model_name", f"model.{name}", as_text)])
    part.by_table(
        [
            KeyRule("gradient_checkpointing", "memory.checkpointing", boolean, {"true": "all", "false": "none"}),
            KeyRule("activation_offloading", "memory.offload_checkpoint_inputs", boolean),
            KeyRule("learning_rate", "optimizer.lr", number),
        ]
    )
    share = part.read("offload_fraction", number)
    if share:
        blocks = blocks_of(found)
        part.take(
            "offload_fraction",
            "memory.resident_blocks",
            round(blocks * (1 - share)),
            f"the number of {blocks} blocks that stay on the device",
        )
    for key in part.settings:
        if key == "train" and method != "none" and boolean(part.settings[key]) is False:
            part.leave(key, f"only the {name} trains here")
    part.leave_others(tables, "_part")
    found.told(name)
    found.lines += part.lines
    _merge(found.config, part.config)


def _autoencoder(found: Translation) -> None:
    """Translate the autoencoder, of which only another one's name counts."""
    part = Translation(found.read("vae", as_object) or {}, {}, "vae.")
    part.by_table([KeyRule("model_name", "model.vae", as_text)])
    part.leave_others({"no_effect": {"*": "the autoencoder stays frozen"}})
    found.told("vae")
    found.lines += part.lines
    _merge(found.config, part.config)


def _text(found: Translation, method: str) -> None:
    """Translate what trains on the text side: the embedding, or CLIP beside a LoRA."""
    rate = found.read("embedding_learning_rate", number)
    more = found.read("additional_embeddings", as_objects) or []
    training = [each for each in more if each.get("train", True)]
    own = found.read("embedding", as_object) or {} if method == "none" else {}
    if method == "none" or (training and method in ("lora", "dora")):
        defaults = {"placeholder": "<embedding>", "initial_embedding_text": "*", "token_count": 1}
        section = "embedding." if method == "none" else f"additional_embeddings[{more.index(training[0])}]."
        part = Translation(own if method == "none" else training.pop(0), defaults, section)
        keys = {"token": "placeholder", "initial": "initial_embedding_text", "vectors": "token_count"}
        take_embedding(part, keys, rate, alone=method == "none")
        if part.read("is_output_embedding", boolean):
            part.take("is_output_embedding", "text.embeddings.place", "output")
        part.leave_others(trainer_tables(NAME), "_embedding")
        found.told("embedding" if method == "none" else "additional_embeddings")
        keep = found.read("preserve_embedding_norm", boolean) or False
        part.set("text.embeddings.keep_norm", keep)
        for key, taken in (("preserve_embedding_norm", keep), ("embedding_learning_rate", rate)):
            if taken and found.has(key):
                name = {"preserve_embedding_norm": "keep_norm"}.get(key, "learning_rate")
                found.take(key, f"text.embeddings.{name}", taken)
        found.lines += part.lines
        _merge(found.config, part.config)
    for index, each in enumerate(more):
        section = f"additional_embeddings[{index}]."
        if not any(line.key.startswith(section) for line in found.lines):
            part = Translation(each, section=section)
            same = not each.get("train", True)
            why = "it does not train" if same else "one embedding trains, beside a LoRA or alone"
            part.leave_others({"no_effect" if same else "left_out": {"*": why}})
            found.lines += part.lines
            found.told("additional_embeddings")
    clip = dict(zip(("text_encoder", "text_encoder_2"), found.family.text.trainable, strict=False))
    trained = [name for key, name in clip.items() if boolean((found.read(key, as_object) or {}).get("train", False))]
    for key in ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4"):
        part = Translation(found.read(key, as_object) or {}, {}, f"{key}.")
        trains = part.read("train", boolean)
        if method == "none" and trains:
            part.leave("train", "the embedding trains alone")
        elif not trains:
            part.unused("it does not train", "learning_rate", "train_embedding")
        elif key not in clip:
            part.leave("train", "text.lora trains CLIP alone")
        elif found.get("text.lora") is not None:
            part.note("train", "trains with the learning rate of the first")
        else:
            part.config["adapter"], part.config["optimizer"] = found.get("adapter"), found.get("optimizer")
            encoders = trained if len(trained) < len(clip) else None
            take_text_lora(part, "train", part.read("learning_rate", number), "attention_and_mlp", encoders)
            if (lora := part.get("text.lora")) is not None:
                found.set("text.lora", lora)
                if part.has("learning_rate"):
                    part.take("learning_rate", "text.lora.learning_rate", part.get("text.lora.learning_rate"))
        part.leave_others(trainer_tables(NAME), "_text")
        found.told(key)
        found.lines += part.lines


def _merge(into: Json, more: Json) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _optimizer(found: Translation) -> None:
    given: Any = found.read("optimizer", lambda value: value) or {"optimizer": "ADAMW"}
    own = {"optimizer": given} if isinstance(given, str) else dict(given)
    name = str(own.pop("optimizer", "ADAMW"))
    take_optimizer(found, "optimizer" if isinstance(given, str) else found.part("optimizer", "optimizer", name), name)
    if (fused := own.pop("fused_back_pass", None)) is not None:
        key = found.part("optimizer", "fused_back_pass", fused)
        if boolean(fused) and found.get("adapter.method") == "full":
            found.take(key, "memory.optimizer_in_backward", True)
            found.take(key, "train.clip", "per_parameter", "gradients never exist all at once")
        else:
            found.leave(key, "an adapter's gradients are small")
    if (rounding := own.pop("stochastic_rounding", None)) is not None:
        key = found.part("optimizer", "stochastic_rounding", rounding)
        if found.get("optimizer.name") != "adamw_bf16":
            found.take(key, "optimizer.rounding", "stochastic" if boolean(rounding) else "nearest")
        else:
            found.leave(key, "adamw_bf16 always rounds so", same=boolean(rounding))
    if (version := own.pop("__version", None)) is not None:
        found.leave(found.part("optimizer", "__version", version), "the version of the format", same=True)
    take_arguments(found, "optimizer", own)
    name = found.read("learning_rate_scheduler", as_text) or "CONSTANT"
    schedule = take_schedule(found, "learning_rate_scheduler", name)
    if schedule == "cosine_with_restarts":
        found.by_table([KeyRule("learning_rate_cycles", "schedule.cycles", whole_number)])
    least = found.read("learning_rate_min_factor", number)
    if least and schedule == "polynomial":
        found.take("learning_rate_min_factor", "schedule.end", least)
    elif least and schedule == "linear":
        found.take("learning_rate_min_factor", "schedule.end", least, "a polynomial of power 1 is linear and ends")
        found.take("learning_rate_scheduler", "schedule.name", "polynomial", "linear, with an end")
    elif least:
        found.leave("learning_rate_min_factor", f"schedule {schedule} ends at zero")


def _objective(found: Translation) -> None:
    if found.objective != "flow":
        title = found.family.words.title
        if found.read("loss_weight_fn", as_text) not in (None, "CONSTANT", "MIN_SNR_GAMMA"):
            found.leave("loss_weight_fn", "only min_snr_gamma exists")
        if found.read("timestep_distribution", as_text) not in (None, "UNIFORM"):
            found.leave("timestep_distribution", f"{title}'s timesteps are uniform here")
        for key in ("noising_weight", "noising_bias"):
            if found.has(key):
                found.leave(key, "it shapes timestep_distribution")
        if found.read("timestep_shift", number) not in (None, 1):
            found.leave("timestep_shift", f"{title}'s timesteps are not shifted here")
        if found.has("dynamic_timestep_shifting"):
            found.leave("dynamic_timestep_shifting", f"OneTrainer does not read it for {title}", same=True)
        found.unused(f"{title} has no T5", "text_encoder_3_sequence_length")
        _prediction(found)
        if found.read("loss_weight_fn", as_text) == "MIN_SNR_GAMMA":
            strength = found.read("loss_weight_strength", number)
            found.take("loss_weight_fn", "objective.min_snr_gamma", strength or 5.0)
            if found.has("loss_weight_strength"):
                found.keep("loss_weight_strength", "see loss_weight_fn")
        for key, path in (("min_noising_strength", "min_timestep"), ("max_noising_strength", "max_timestep")):
            value = found.read(key, number)
            if value is not None:
                found.take(key, f"objective.{path}", min(999, round(1000 * value)), "a timestep here")
        return
    for key, path in (("min_noising_strength", "min_sigma"), ("max_noising_strength", "max_sigma")):
        found.by_table([KeyRule(key, f"objective.{path}", number)])
    _density(found)
    shift, dynamic = found.read("timestep_shift", number), found.read("dynamic_timestep_shifting", boolean)
    if dynamic:
        found.take("dynamic_timestep_shifting", "objective.shift", "auto")
    elif shift is not None:
        found.take("timestep_shift", "objective.shift", shift)
    strength = found.read("huber_strength", number)
    if strength:
        delta = found.read("huber_delta", number) or 1.0
        found.take(
            "huber_strength",
            "objective.huber",
            {"c": min(1.0, delta), "schedule": "constant"},
            "only the pseudo-Huber loss, instead of a mixture",
        )


def _prediction(found: Translation) -> None:
    """Translate what the model predicts, in the order of OneTrainer's set-up of a model."""
    if found.get("objective.zero_terminal_snr"):
        found.take(
            "rescale_noise_scheduler_to_zero_terminal_snr", "objective.prediction", "v", "OneTrainer trains v then"
        )
    elif found.get("adapter.method") == "full":
        for key, prediction in (("force_v_prediction", "v"), ("force_epsilon_prediction", "epsilon")):
            if found.get("objective.prediction") is None and found.read(key, boolean):
                found.take(key, "objective.prediction", prediction)


def _density(found: Translation) -> None:
    name = found.read("timestep_distribution", as_text) or "UNIFORM"
    weight, bias = found.read("noising_weight", number) or 0.0, found.read("noising_bias", number) or 0.0
    names = {
        "UNIFORM": "uniform",
        "LOGIT_NORMAL": "logit_normal",
        "COS_MAP": "cosmap",
        "HEAVY_TAIL": "mode",
        "BETA": "beta",
    }
    if name not in names:
        return found.take(
            "timestep_distribution",
            "objective.sigma",
            "logit_normal",
            f"simpletune has no {name}; the logit-normal density also favours the middle",
        )
    found.take("timestep_distribution", "objective.sigma", names[name])
    if name == "LOGIT_NORMAL":
        found.take("noising_bias", "objective.logit_mean", bias, "the mean")
        found.take("noising_weight", "objective.logit_std", weight + 1.0, "the standard deviation minus 1")
    elif name == "HEAVY_TAIL":
        found.take("noising_weight", "objective.mode_scale", weight)
    elif name == "BETA":
        for key in ("noising_weight", "noising_bias"):
            if found.has(key):
                found.leave(key, "objective.beta_alpha and beta_beta shape the density")
    found.unused(f"{name} does not read it", "noising_weight", "noising_bias")


def _places(found: Translation) -> None:
    result, place = found.read("output_model_destination", as_text), found.read("workspace_dir", as_text)
    if result is not None:
        name = PurePosixPath(result.replace("\\", "/"))
        found.take(
            "output_model_destination",
            "name",
            run_name(name.stem if name.suffix else name.name),
            "a run has its own folder in output.runs",
        )
    if place is not None:
        found.take("workspace_dir", "output.runs", place, "a run gets its own folder in it")
    for key, path, what in (
        ("sample_after", "validation.every", "pictures"),
        ("backup_after", "checkpoint.every", "checkpoints"),
    ):
        value, unit = found.read(key, whole_number), found.read(f"{key}_unit", as_text)
        if value and unit == "STEP":
            found.take(key, path, value)
            found.keep(f"{key}_unit", f"see {key}")
        elif value and unit in ("NEVER", None):
            found.unused(f"{key}_unit is {unit or 'not set'}", key)
        elif value:
            found.leave(key, f"in {(unit or 'other unit').lower()}s; here {what} are set in steps: set {path}")
    if found.read("rolling_backup", boolean):
        found.by_table([KeyRule("rolling_backup_count", "checkpoint.keep_last", whole_number)])
    else:
        found.unused("without rolling_backup every backup is kept", "rolling_backup_count")


def _concepts(concepts: list[Json], general: Translation) -> list[Translation]:
    found: list[Translation] = []
    for index, concept in enumerate(concepts):
        section = f"concepts[{index}]."
        kind = str(concept.get("type", "STANDARD"))
        whole = Translation({"type": kind} | concept, section=section)
        if concept.get("enabled") is False:
            whole.leave_others({"no_effect": {"*": "the concept was not used"}})
        elif kind == "VALIDATION" or concept.get("validation_concept"):
            why = "a concept for the validation loss. validation.split holds pictures out instead"
            whole.leave("type", why)
            whole.leave_others({"left_out": {"*": why}})
        else:
            source = Translation(concept, {"balancing": 1.0}, section, f"data.sources.{len(found)}.")
            _concept(source, general, kind)
            found.append(source)
            continue
        general.lines += whole.lines
    if not found:
        source = Translation({}, {}, "", "data.sources.0.")
        source.set("path", "")
        _image(source, general)
        _masks(source, general)
        found.append(source)
    if general.settings.get("aspect_ratio_bucketing") is not None:
        general.keep("aspect_ratio_bucketing", "see data.aspect")
    general.unused("every concept has its own", "resolution")
    return found


def _concept(source: Translation, general: Translation, kind: str) -> None:
    source.set("path", "")
    source.by_table(
        [
            KeyRule("path", "path", as_text),
            KeyRule("loss_weight", "weight", number),
        ]
    )
    variants = source.read("image_variations", whole_number)
    if variants is not None:
        why = f"at most {MOST_VARIANTS}" if variants > MOST_VARIANTS else ""
        source.take("image_variations", "variants", min(variants, MOST_VARIANTS), why)
    if kind == "PRIOR_PREDICTION":
        source.take("type", "regularization", True)
        general.set("prior", {"method": "base_prediction"})
    count, strategy = source.read("balancing", number) or 1.0, source.read("balancing_strategy", as_text) or "REPEATS"
    if strategy == "SAMPLES":
        why = "a number of samples per epoch; here every picture has its repeats"
        source.leave("balancing", why)
        source.leave("balancing_strategy", why)
    elif count >= 1 and count == int(count):
        source.take("balancing", "repeats", int(count))
    else:
        source.take("balancing", "repeats", max(1, round(count)), "whole numbers, at least 1")
    _prompts(source)
    _image(source, general)
    _masks(source, general)
    if source.read("include_subdirectories", boolean) is False:
        source.note("include_subdirectories", "sub-folders are always included here")
    source.unused("sub-folders are always included here", "include_subdirectories")
    source.leave_others(trainer_tables(NAME), "_data")


def _prompts(source: Translation) -> None:
    own = Translation(
        source.settings.get("text") or {}, {"prompt_source": "sample"}, f"{source.section}text.", source.place
    )
    kind, path = own.read("prompt_source", as_text), own.read("prompt_path", as_text)
    if kind == "sample":
        own.take("prompt_source", "captions", "txt")
    elif kind == "filename":
        own.take("prompt_source", "captions", "filename")
    else:
        own.leave(
            "prompt_path" if path else "prompt_source",
            f"prompts drawn from the lines of a file ({path}). Set prompt, or put a text beside each picture",
        )
    if kind == "sample":
        own.take("prompt_source", "caption_lines", "several")
    if own.read("enable_tag_shuffling", boolean):
        own.take("enable_tag_shuffling", "shuffle_tags", True)
    if own.read("tag_dropout_enable", boolean):
        mode = own.read("tag_dropout_mode", as_text) or "FULL"
        why = {"RANDOM": "each tag is dropped by itself"}.get(
            mode, f"mode {mode}; here each tag is dropped independently"
        )
        own.take("tag_dropout_probability", "tag_dropout", own.read("tag_dropout_probability", number) or 0.0, why)
        own.keep("tag_dropout_enable", "see tag_dropout_probability")
        if own.has("tag_dropout_mode"):
            own.note("tag_dropout_mode", why)
    if own.get("shuffle_tags") or own.get("tag_dropout"):
        own.by_table(
            [KeyRule("tag_delimiter", "tag_separator", as_text), KeyRule("keep_tags_count", "keep_tags", whole_number)]
        )
        if (source.get("variants") or 1) == 1:
            switch = "enable_tag_shuffling" if own.get("shuffle_tags") else "tag_dropout_probability"
            own.take(switch, "variants", VARIANTS, "drawn once for each variant")
    if boolean(own.settings.get("caps_randomize_enable", False)):
        own.leave("caps_randomize_enable", "upper and lower case stay unchanged")
    own.leave_others(trainer_tables(NAME), "_captions")
    source.told("text")
    source.lines += own.lines
    source.config |= own.config


def _image(source: Translation, general: Translation) -> None:
    own = Translation(
        source.settings.get("image") or {}, {"resolution_override": "512"}, f"{source.section}image.", source.place
    )
    varied = []
    for key, path, value in (("enable_crop_jitter", "crop", "random"), ("enable_random_flip", "flip", True)):
        if own.read(key, boolean):
            own.take(key, path, value)
            varied.append(key)
    for kind, (key, path, factor, most) in RANDOM.items():
        strength = own.read(key, number) if own.read(f"enable_random_{kind}", boolean) else None
        if strength:
            limit = round_digits(abs(strength) * factor)
            why = "the first variant stays as it is"
            why += "; enlarged instead of black corners" if kind == "rotate" else ""
            why += f"; at most {most}" if limit > most else ""
            own.take(key, path, min(most, limit), why)
            own.keep(f"enable_random_{kind}", f"see {key}")
            varied.append(key)
    if varied and (source.get("variants") or 1) == 1:
        own.take(varied[0], "variants", VARIANTS, "drawn once for each variant")
    sizes = as_text(
        own.read("resolution_override", as_text)
        if own.read("enable_resolution_override", boolean)
        else general.settings.get("resolution", "512")
    ).split(",")
    first = sizes[0].lower().split("x")
    side = side_of_area(number(first[0]), number(first[-1]), general.family.architecture.multiple)
    same = len(sizes) == len(first) == 1 and side == number(first[0])
    why = "" if same else "the first size, as the side of a square of that area in whole steps"
    (source.settings if general.has("resolution") else source.defaults)["resolution"] = ",".join(sizes)
    source.outer["resolution"] = "resolution"
    if own.read("enable_resolution_override", boolean):
        own.take("resolution_override", "resolution", side, why)
        own.keep("enable_resolution_override", "see resolution_override")
    else:
        source.take("resolution", "resolution", side, why)
        general.told("resolution")
    if general.settings.get("aspect_ratio_bucketing") is False:
        source.settings["aspect_ratio_bucketing"] = False
        source.outer["aspect_ratio_bucketing"] = "aspect_ratio_bucketing"
        source.take("aspect_ratio_bucketing", "aspect", "square")
    own.leave_others(trainer_tables(NAME), "_image")
    source.told("image", "resolution")
    source.lines += own.lines
    source.config |= own.config


def _masks(source: Translation, general: Translation) -> None:
    inpaints = "INPAINTING" in str(general.settings.get("model_type"))
    if not general.read("masked_training", boolean):
        if inpaints:
            source.note("masked_training", "off: OneTrainer paints whole pictures; here holes are drawn at random")
        return
    weight = general.read("unmasked_weight", number)
    weight = 0.1 if weight is None else weight
    given = {"unmasked_weight": weight} if general.has("unmasked_weight") else {}
    source.settings |= {"masked_training": True} | given
    source.defaults["unmasked_weight"] = weight
    source.outer |= {"masked_training": "masked_training", "unmasked_weight": "unmasked_weight"}
    source.take("masked_training", "mask", "files")
    if inpaints:
        source.take("masked_training", "inpainting_mask", "own", "the masks are the holes")
        why = "" if weight in (0, 1) else f"{weight:g} outside of the holes: here it is 0 or 1"
        source.take("unmasked_weight", "inpainting_loss", "inside" if weight < 0.5 else "everywhere", why)
    else:
        source.take("unmasked_weight", "unmasked_weight", weight)
    general.told("masked_training", "unmasked_weight")
    keep = general.read("masked_prior_preservation_weight", number)
    if keep and inpaints:
        general.leave("masked_prior_preservation_weight", "the masks are the holes")
    elif keep and general.get("prior.outside_mask") is None:
        prior = general.get("prior") or {"method": "base_prediction"}
        general.config["prior"] = prior
        general.take("masked_prior_preservation_weight", "prior.outside_mask", keep)


def _samples(samples: list[Json], general: Translation) -> None:
    """Take the samples' prompts, and size, seed, steps and guidance of the first."""
    used = [row for row in samples if row.get("enabled", True) and str(row.get("prompt", "")).strip()]
    general.told("samples")
    if used:
        take_samples(general, "samples", used, [str(row["prompt"]) for row in used])
    for index, row in enumerate(samples):
        if row not in used:
            whole = Translation(row, section=f"samples[{index}].")
            whole.leave_others({"no_effect": {"*": "the sample was not used"}})
            general.lines += whole.lines
