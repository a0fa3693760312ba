"""Translate OneTrainer's configuration: its concepts become sources, and its samples validation prompts."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from simpletune.commands.importers.common_options import (
    VARIANTS,
    take_alpha,
    take_arguments,
    take_convolutions,
    take_embedding,
    take_optimizer,
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
AUGMENTED = ("rotate", "brightness", "contrast", "saturation", "hue", "circular_mask", "mask_rotate")
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
    concepts = settings.get("concepts")
    if data is not None:
        concepts = read_any(data)
    elif concepts is None:
        concepts = read_named(folder, settings.get("concept_file_name"))
    general = _options(settings)
    if concepts is not None and not (isinstance(concepts, list) and all(isinstance(each, dict) for each in concepts)):
        raise UserError("--data: OneTrainer's concepts are a list of objects (concepts.json)")
    sources = _concepts(concepts or [], general)
    samples = settings.get("samples")
    if samples is None:
        samples = read_named(folder, settings.get("sample_definition_file_name"))
    if isinstance(samples, list):
        _samples(samples, general)
    general.leave_others(trainer_tables(NAME))
    return general, sources


def _options(settings: Json) -> Translation:
    tables = trainer_tables(NAME)
    found = Translation(settings, tables["defaults"])
    found.seen("concepts", "concept_file_name", "samples", "sample_definition_file_name", "resolution")
    _model(found)
    method = _adapter(found)
    take_start(found, "lora_model_name")
    found.by_table(tables["options"])
    _part(found, found.family.denoiser, method)
    _optimizer(found)
    _text(found, method)
    found.by_table([KeyRule("epochs", "train.epochs", whole_number)])
    take_warmup(found, "learning_rate_warmup_steps")
    found.by_table([KeyRule("clip_grad_norm", "train.clip_norm", number)])
    if found.settings.get("clip_grad_norm", 1.0) == 0:
        found.set("train.clip_norm", None)
    _objective(found)
    average, decay = found.read("ema", as_text) or "OFF", found.read("ema_decay", number)
    if average != "OFF":
        found.take("ema", "ema.decay", decay or 0.999, "the average stays on the device")
    _places(found)
    return found


def _model(found: Translation) -> None:
    name, families = found.read("model_type", as_text) or "", trainer_tables(NAME)["families"]
    found.take("model_type", "model.family", families[name])


def _adapter(found: Translation) -> str:
    tables = trainer_tables(NAME)
    kind, peft = found.read("training_method", as_text), found.read("peft_type", as_text) or "LORA"
    if kind in ("FINE_TUNE", "EMBEDDING"):
        why = "only the embedding trains" if kind == "EMBEDDING" else ""
        method = "none" if kind == "EMBEDDING" else "full"
        found.take("training_method", "adapter.method", method, why)
        found.seen("lora_rank", "lora_alpha", "lora_weight_dtype", "layer_filter_preset", "peft_type")
        return method
    method = tables["methods"][peft]
    if method == "lora" and found.read("lora_decompose", boolean):
        method = "dora"
        found.take("lora_decompose", "adapter.method", "dora")
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
    chosen = found.get("adapter.targets")
    if preset == "full" or isinstance(chosen, list) and any(map(is_convolution, chosen)):
        rank = found.read("lokr_dim" if method == "lokr" else "lora_rank", whole_number)
        rank = 1024 if method == "lokr" and found.read("lokr_full_matrix", boolean) else rank
        if method != "oft":
            key = "layer_filter_preset" if preset == "full" else "layer_filter"
            take_convolutions(found, key, rank, found.read("lora_alpha", number))
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
    if part.has("model_name"):
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
    found.lines += [line for line in part.lines if line.why != "it trains"]
    _merge(found.config, part.config)


def _text(found: Translation, method: str) -> None:
    """Translate what trains on the text side: the embedding, or CLIP beside a LoRA."""
    rate = found.read("embedding_learning_rate", number)
    more = found.read("additional_embeddings", as_objects) or []
    training = [each for each in more if each.get("train", True)]
    own = found.read("embedding", as_object) or {} if method == "none" else {}
    if method == "none" or (training and method in ("lora", "dora")):
        defaults = {"placeholder": "<embedding>", "initial_embedding_text": "*", "token_count": 1}
        part = Translation(own if method == "none" else training.pop(0), defaults, "embedding.")
        keys = {"token": "placeholder", "initial": "initial_embedding_text", "vectors": "token_count"}
        take_embedding(part, keys, rate, alone=method == "none")
        if part.read("is_output_embedding", boolean):
            part.take("is_output_embedding", "text.embeddings.place", "output")
        part.leave_others(trainer_tables(NAME), "_embedding")
        keep = found.read("preserve_embedding_norm", boolean) or False
        part.set("text.embeddings.keep_norm", keep)
        found.lines += part.lines
        _merge(found.config, part.config)
    if training:
        found.leave("additional_embeddings", f"{len(training)} more: one embedding trains, beside a LoRA or alone")
    clip = dict(zip(("text_encoder", "text_encoder_2"), found.family.text.trainable, strict=False))
    trained = [name for key, name in clip.items() if boolean((found.read(key, as_object) or {}).get("train", False))]
    for key in ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4"):
        part = Translation(found.read(key, as_object) or {}, {}, f"{key}.")
        if method == "none" or not part.read("train", boolean):
            part.seen("train")
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
        part.leave_others(trainer_tables(NAME), "_text")
        found.lines += part.lines


def _merge(into: Json, more: Json) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _optimizer(found: Translation) -> None:
    own: Any = found.read("optimizer", lambda value: value) or {"optimizer": "ADAMW"}
    own = {"optimizer": own} if isinstance(own, str) else dict(own)
    take_optimizer(found, "optimizer", str(own.pop("optimizer", "ADAMW")))
    if boolean(own.pop("fused_back_pass", False)):
        if found.get("adapter.method") == "full":
            found.take("optimizer", "memory.optimizer_in_backward", True)
            found.take("optimizer", "train.clip", "per_parameter", "gradients never exist all at once")
        else:
            found.leave("optimizer", "fused_back_pass: an adapter's gradients are small")
    rounding = own.pop("stochastic_rounding", None)
    if rounding is not None and found.get("optimizer.name") != "adamw_bf16":
        found.take("optimizer", "optimizer.rounding", "stochastic" if boolean(rounding) else "nearest")
    arguments = {name: value for name, value in own.items() if value is not None and not isinstance(value, bool | dict)}
    arguments |= {name: value for name, value in own.items() if value is True}
    arguments.pop("__version", None)
    take_arguments(found, "optimizer", arguments)
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
        found.seen("text_encoder_3_sequence_length")
        title = found.family.words.title
        if found.read("timestep_distribution", as_text) not in (None, "UNIFORM"):
            found.leave("timestep_distribution", f"{title}'s timesteps are uniform here")
            found.seen("noising_weight", "noising_bias")  # which belong to it
        if found.read("timestep_shift", number) not in (None, 1):
            found.leave("timestep_shift", f"{title}'s timesteps are not shifted here")
        if found.has("dynamic_timestep_shifting"):
            found.leave("dynamic_timestep_shifting", f"OneTrainer does not read it for {title}", same=True)
        _prediction(found)
        if found.read("loss_weight_fn", as_text) == "MIN_SNR_GAMMA":
            found.take("loss_weight_fn", "objective.min_snr_gamma", found.read("loss_weight_strength", number) or 5.0)
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
        elif value:
            found.leave(key, f"in {(unit or 'other unit').lower()}s; here {what} are set in steps: set {path}")
    found.by_table([KeyRule("rolling_backup_count", "checkpoint.keep_last", whole_number)])


def _concepts(concepts: list[Json], general: Translation) -> list[Translation]:
    found: list[Translation] = []
    for index, concept in enumerate(concepts):
        section = f"concepts[{index}]."
        kind = str(concept.get("type", "STANDARD"))
        whole = Translation({"type": kind, **concept}, section=section)
        if concept.get("enabled") is False:
            whole.leave("enabled", "the concept was not used")
        elif kind == "VALIDATION" or concept.get("validation_concept"):
            whole.leave("type", "a concept for the validation loss. validation.split holds pictures out instead")
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
    general.seen("aspect_ratio_bucketing", "masked_training")
    return found


def _concept(source: Translation, general: Translation, kind: str) -> None:
    source.set("path", "")
    source.by_table(
        [
            KeyRule("path", "path", as_text),
            KeyRule("loss_weight", "weight", number),
            KeyRule("image_variations", "variants", whole_number),
        ]
    )
    if kind == "PRIOR_PREDICTION":
        source.take("type", "regularization", True)
        general.set("prior", {"method": "base_prediction"})
    count, strategy = source.read("balancing", number) or 1.0, source.read("balancing_strategy", as_text) or "REPEATS"
    if strategy == "SAMPLES":
        source.leave("balancing", "a number of samples per epoch; here every picture has its repeats")
    elif count >= 1 and count == int(count):
        source.take("balancing", "repeats", int(count))
    else:
        source.take("balancing", "repeats", max(1, round(count)), "whole numbers, at least 1")
    _prompts(source)
    _image(source, general)
    _masks(source, general)
    source.seen("type")
    if source.read("include_subdirectories", boolean) is False:
        source.note("include_subdirectories", "sub-folders are always included here")
    source.leave_others(trainer_tables(NAME), "_data")
    source.lines = [
        line for line in source.lines if line.became != "left out" or line.why not in ("", "it is used", "repeats")
    ]


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
    if own.get("shuffle_tags") or own.get("tag_dropout"):
        own.by_table(
            [KeyRule("tag_delimiter", "tag_separator", as_text), KeyRule("keep_tags_count", "keep_tags", whole_number)]
        )
        if (source.get("variants") or 1) == 1:
            own.take("enable_tag_shuffling", "variants", VARIANTS, "drawn once for each variant")
    if boolean(own.settings.get("caps_randomize_enable", False)):
        own.leave("caps_randomize_enable", "upper and lower case stay unchanged")
    source.seen("text")
    source.lines += own.lines
    source.config |= own.config


def _image(source: Translation, general: Translation) -> None:
    own = Translation(source.settings.get("image") or {}, {}, f"{source.section}image.", source.place)
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
            varied.append(key)
    if varied and (source.get("variants") or 1) == 1:
        own.take(varied[0], "variants", VARIANTS, "drawn once for each variant")
    sizes = as_text(
        own.settings.get("resolution_override")
        if own.read("enable_resolution_override", boolean)
        else general.settings.get("resolution", "512")
    ).split(",")
    first = sizes[0].lower().split("x")
    side = side_of_area(number(first[0]), number(first[-1]), general.family.architecture.multiple)
    same = len(sizes) == len(first) == 1 and side == number(first[0])
    why = "" if same else "the first size, as the side of a square of that area in whole steps"
    given = general.has("resolution") or own.has("resolution_override")
    (source.settings if given else source.defaults)["resolution"] = ",".join(sizes)
    source.take("resolution", "resolution", side, why)
    if general.settings.get("aspect_ratio_bucketing") is False:
        source.settings["aspect_ratio_bucketing"] = False
        source.take("aspect_ratio_bucketing", "aspect", "square")
        source.seen("aspect_ratio_bucketing")
    for key, value in own.settings.items():
        if key.removeprefix("enable_random_") in RANDOM:
            continue
        if value is True and any(word in key for word in AUGMENTED):
            own.leave(key, "colours and rotation change at random, masks only with their picture")
        elif value is True and key == "enable_fixed_flip":
            own.leave(key, "pictures are flipped at random or not")
    source.seen("image", "resolution")
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
    source.settings |= {"masked_training": True, "unmasked_weight": weight}
    source.take("masked_training", "mask", "files")
    if inpaints:
        source.take("masked_training", "inpainting_mask", "own", "the masks are the holes")
        why = "" if weight in (0, 1) else f"{weight:g} outside of the holes: here it is 0 or 1"
        source.take("unmasked_weight", "inpainting_loss", "inside" if weight < 0.5 else "everywhere", why)
    else:
        source.take("unmasked_weight", "unmasked_weight", weight)
    source.seen("masked_training", "unmasked_weight")
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
    if not used:
        return
    general.settings["samples"] = f"{len(used)} prompts"
    general.take("samples", "validation.prompts", [str(row["prompt"]) for row in used])
    names = {
        "negative_prompt": "negative_prompt",
        "seed": "seed",
        "cfg_scale": "guidance",
        "diffusion_steps": "steps",
        "width": "width",
        "height": "height",
    }
    for name, path in names.items():
        values = [row[name] for row in used if row.get(name) not in (None, "")]
        if not values:
            continue
        first = values[0] if name == "negative_prompt" else number(values[0])
        step = general.family.architecture.multiple
        value = max(step, whole_number(first) // step * step) if path in ("width", "height") else first
        differ = any(other != values[0] for other in values) and path != "seed"
        general.take("samples", f"validation.{path}", value, f"{name} of the first sample, for all" if differ else "")
