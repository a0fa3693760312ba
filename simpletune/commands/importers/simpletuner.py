"""Translate SimpleTuner's config.json; the image data sets of its multidatabackend.json become sources."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from simpletune.commands.importers.common_options import (
    VARIANTS,
    take_arguments,
    take_assistant,
    take_huber,
    take_lycoris,
    take_optimizer,
    take_pipeline_guidance,
    take_schedule,
    take_start,
    take_swapped_blocks,
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
    pairs,
    refuse,
    refuse_references,
    round_digits,
    side_of_area,
    trainer_tables,
    whole_number,
)
from simpletune.config.schema import run_name
from simpletune.system.options import Json, UserError

TITLE, NAME = "SimpleTuner", "simpletuner"
OF_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_type", "lycoris_config", "use_dora")
INHERITED = ("resolution", "resolution_type", "caption_dropout_probability")
OF_FLUX_2 = [f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj")]
CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds", "distillation_cache")


def flatten(settings: Json) -> Json:
    """Strip leading dashes from keys, which are written as on a command line."""
    return {key.lstrip("-").replace("-", "_"): value for key, value in settings.items()}


def translate(settings: Json, folder: Path, data: Path | None) -> tuple[Translation, list[Translation]]:
    """Translate options and data, the file of which ``data`` or the options name."""
    settings = flatten(settings)
    general = _options(settings, folder)
    entries = read_named(folder, settings.get("data_backend_config")) if data is None else read_any(data)
    if data is not None:
        general.unused("--data names another file", "data_backend_config")
    elif entries is not None:
        general.keep("data_backend_config", "its data sets are listed here")
    elif general.has("data_backend_config"):
        general.leave("data_backend_config", "the file is not here. Give it with --data")
    if entries is None:
        entries = [{}]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError("--data: SimpleTuner's data sets are a list of objects (multidatabackend.json)")
    sources = _data_sets(entries, general)
    general.leave_others(trainer_tables(NAME))
    return general, sources


def _options(settings: Json, folder: Path) -> Translation:
    tables = trainer_tables(NAME)
    scheduler = str(settings.get("lr_scheduler", ""))
    family = str(settings.get("model_family", "sd3"))
    flow = {} if family == "sd3" else {"tokenizer_max_length": None}
    flow |= {} if family in ("sd3", "flux2", "z_image", "qwen_image") else {"flow_schedule_shift": None}
    found = Translation(
        settings, tables["defaults"] | (tables["polynomial"] if scheduler == "polynomial" else {}) | flow
    )
    found.by_table(row for row in tables["options"] if row.key == "model_family")  # which the others depend on
    _model(found)
    if "t5_length" not in type(found.family).model_fields:
        found.unused("the length of a prompt is the model's own", "tokenizer_max_length")
    _adapter(found, folder)
    take_start(found, "init_lora")
    found.by_table(tables["options"])
    _optimizer(found)
    _length(found)
    _memory(found)
    _objective(found)
    _validation(found)
    _places(found)
    return found


def _model(found: Translation) -> None:
    flavour, flavours = found.read("model_flavour", as_text), trainer_tables(NAME)["flavours"]
    if found.settings.get("model_family") == "z_image":
        return _z_image(found, flavour)
    named = found.has("model_flavour") or found.has("pretrained_model_name_or_path")
    if not named and found.settings.get("model_family") == "flux2":
        refuse("model_family", "flux2", "FLUX.2 klein 9B, unless model_flavour is klein-4b")
    if flavour is not None and found.has("pretrained_model_name_or_path"):
        found.leave("model_flavour", "pretrained_model_name_or_path names the model", same=True)
    elif flavour is not None and flavour in flavours:
        found.take("model_flavour", "model.pretrained", flavours[flavour])
    elif flavour is not None:
        found.leave("model_flavour", f"unknown. Set model.pretrained; known are {', '.join(flavours)}")
    elif not found.has("pretrained_model_name_or_path"):
        usual = {"sd3": "medium", "qwen_image": "v1.0"}.get(str(found.settings.get("model_family", "")))
        if usual is not None:
            found.defaults["model_flavour"] = usual
            found.take("model_flavour", "model.pretrained", flavours[usual])


def _z_image(found: Translation, flavour: str | None) -> None:
    """Translate Z-Image's version, and the assistant under which it trains Turbo by LoRA."""
    found.by_table([KeyRule("tokenizer_max_length", "model.text_length", whole_number)])
    take_pipeline_guidance(found, "validation_guidance")
    known, named = trainer_tables(NAME)["z_image"], found.has("pretrained_model_name_or_path")
    if flavour is None and not named:
        flavour = found.defaults["model_flavour"] = "turbo-ostris-v2"
    if flavour is not None and flavour not in known:
        found.leave("model_flavour", f"unknown. Set model.pretrained; known are {', '.join(known)}")
    elif flavour is not None:
        own = known[flavour]
        if named:
            found.keep("model_flavour", "pretrained_model_name_or_path names the model")
        else:
            found.take("model_flavour", "model.pretrained", own["pretrained"])
        if "transformer" in own:
            found.take("model_flavour", "model.transformer", own["transformer"])
        off = found.read("disable_assistant_lora", boolean) or found.settings.get("model_type") != "lora"
        if "assistant" in own and not off:
            path, file = (found.read(f"assistant_lora_{key}", as_text) for key in ("path", "weight_name"))
            path = path or known["assistants"]
            whole = path if path.endswith(".safetensors") else f"{path}/{file or own['assistant']}"
            take_assistant(found, "model_flavour", whole)
            for key in ("assistant_lora_path", "assistant_lora_weight_name"):
                if found.has(key):
                    take_assistant(found, key, whole)
    found.unused("the assistant is that of a LoRA for Turbo", "assistant_lora_path", "assistant_lora_weight_name")
    found.unused("see model.loras", "disable_assistant_lora")


def _adapter(found: Translation, folder: Path) -> None:
    kind, form = found.read("model_type", as_text), found.read("lora_type", as_text) or "standard"
    if kind == "full":
        found.take("model_type", "adapter.method", "full")
        found.unused("model_type is full", *OF_LORA)
    elif kind is None:
        raise UserError(
            'model_type names no method. Add "model_type": "lora", or "model_type": "full" for fine-tuning the whole '
            "model"
        )
    elif form == "lycoris":
        name = found.read("lycoris_config", as_text) or "config/lycoris_config.json"
        own = read_named(folder, name)
        if not isinstance(own, dict):
            raise UserError(f"lycoris_config {name} is not here, and it names the method. Put the file beside this one")
        args = Translation(own, section="lycoris_config.")
        named = {"rank": "linear_dim" if "linear_dim" in own else "dim",
                 "alpha": "linear_alpha" if "linear_alpha" in own else "alpha"}  # fmt: skip
        take_lycoris(found, "lycoris_config", args, args, named)
        chosen = found.get("adapter.targets") is not None or found.get("adapter.method") in ("full", "partial")
        if found.settings.get("model_family") == "qwen_image" and not chosen:
            found.take("lycoris_config", "adapter.targets", "attention_mlp", "attention and networks of both streams")
        for key in ("model_type", "lora_type", "lycoris_config"):
            if found.has(key):
                found.keep(key, "LyCORIS, whose settings are listed here")
        found.unused("lycoris_config decides", *OF_LORA)
    else:
        dora = found.read("use_dora", boolean)
        found.take("model_type", "adapter.method", "dora" if dora else "lora")
        if dora:
            found.take("use_dora", "adapter.method", "dora")
        found.by_table(trainer_tables(NAME)["lora"])
        if found.settings.get("model_family", "sd3") in ("sd3", "qwen_image"):
            found.take("lora_type", "adapter.targets", "attention_image", "it updates to_q, to_k, to_v and to_out.0")
        elif found.settings["model_family"] == "flux2":
            found.take("lora_type", "adapter.targets", OF_FLUX_2, "its default layers")
        else:
            found.unused("adapter.targets attention: its default layers", "lora_type")
        found.unused("lora_type is standard", "lycoris_config")


def _optimizer(found: Translation) -> None:
    name = found.read("optimizer", as_text)
    if name is not None:
        ours = take_optimizer(found, "optimizer", name)
        if ours == "adamw_bf16" and found.get("adapter.method") in ("lora", "dora"):
            found.take("optimizer", "adapter.dtype", "bf16", "the update itself is in bf16 there")
    arguments = found.read("optimizer_config", pairs) or {}
    take_arguments(found, "optimizer_config", arguments)
    for key in ("adam_beta1", "adam_beta2", "adam_weight_decay", "adam_epsilon"):
        value = found.read(key, number)
        if value is not None and name is not None:
            named = {"adam_weight_decay": "weight_decay", "adam_epsilon": "eps"}.get(key, key.removeprefix("adam_"))
            take_arguments(found, key, {named: value}, alone=True)
        elif value is not None:
            found.leave(key, "no optimizer is named")
    schedule = found.read("lr_scheduler", as_text)
    if schedule is None:
        return
    ours = take_schedule(found, "lr_scheduler", schedule)
    if ours == "polynomial":
        found.by_table([KeyRule("lr_power", "schedule.power", number)])
        end, rate = found.read("lr_end", number), found.get("optimizer.lr", 1e-4)
        if end is not None and isinstance(rate, int | float):
            found.take(
                "lr_end", "schedule.end", min(1.0, round_digits(end / rate)), "a fraction of the learning rate here"
            )
    elif ours == "cosine_with_restarts":
        found.by_table([KeyRule("lr_num_cycles", "schedule.cycles", whole_number)])
    found.unused(f"schedule {ours} has no such option", "lr_power", "lr_end", "lr_num_cycles")


def _length(found: Translation) -> None:
    steps, epochs = found.read("max_train_steps", whole_number), found.read("num_train_epochs", whole_number)
    if steps:
        found.take("max_train_steps", "train.steps", steps)
        found.unused("max_train_steps decides", "num_train_epochs")
    elif epochs:
        found.take("num_train_epochs", "train.epochs", epochs)
    take_warmup(found, "lr_warmup_steps")
    norm, method = found.read("max_grad_norm", number), found.read("grad_clip_method", as_text)
    found.unused("max_grad_norm 0 means no clipping" if norm == 0 else "see max_grad_norm", "grad_clip_method")
    by_value = "SimpleTuner limits each value of the gradient by default; here its norm is limited"
    if norm == 0:
        found.take("max_grad_norm", "train.clip_norm", None, "0 means no clipping")
    elif norm is not None:
        found.take("max_grad_norm", "train.clip_norm", norm, by_value if method == "value" else "")


def _memory(found: Translation) -> None:
    on = found.read("gradient_checkpointing", boolean)
    blocks = blocks_of(found)
    interval = found.read("gradient_checkpointing_interval", whole_number)
    if on and interval and interval > 1:
        found.take(
            "gradient_checkpointing_interval",
            "memory.checkpointing",
            -(-blocks // interval),
            f"every {interval}th of {blocks} blocks there; here as many, from the first",
        )
    elif on is not None:
        found.take("gradient_checkpointing", "memory.checkpointing", "all" if on else "none")
    take_swapped_blocks(found, "musubi_blocks_to_swap", blocks)
    for key in [key for key in found.settings if key.startswith("ramtorch") or key == "enable_group_offload"]:
        if found.read(key, boolean if key in ("ramtorch", "enable_group_offload") else as_text) is True:
            found.take(key, "memory.resident_blocks", 0, "all blocks are offloaded to host memory")
        else:
            found.leave(key, "blocks are offloaded as memory.resident_blocks says")
    for key in [
        key for key in found.settings if key.startswith(("group_offload", "musubi_", "gradient_checkpointing_"))
    ]:
        if key not in ("gradient_checkpointing_interval", "musubi_blocks_to_swap"):
            found.leave(key, "blocks are offloaded and recomputed as memory.resident_blocks and checkpointing say")


def _objective(found: Translation) -> None:
    if found.objective == "flow":
        auto, shift = found.read("flow_schedule_auto_shift", boolean), found.read("flow_schedule_shift", number)
        if auto:
            found.take("flow_schedule_auto_shift", "objective.shift", "auto")
        elif shift:
            found.take("flow_schedule_shift", "objective.shift", shift)
        elif shift == 0:
            found.take("flow_schedule_shift", "objective.shift", 1.0, "0 means no shift")
    if found.read("flow_use_uniform_schedule", boolean):
        found.take("flow_use_uniform_schedule", "objective.sigma", "uniform")
    if found.read("flow_use_beta_schedule", boolean):
        found.take("flow_use_beta_schedule", "objective.sigma", "beta")
        found.by_table(
            [
                KeyRule("flow_beta_schedule_alpha", "objective.beta_alpha", number),
                KeyRule("flow_beta_schedule_beta", "objective.beta_beta", number),
            ]
        )
    found.by_table([KeyRule("flow_sigmoid_scale", "objective.logit_std", number)])
    take_huber(found)


def _validation(found: Translation) -> None:
    size = found.read("validation_resolution", as_text)
    if size is not None:
        first = size.split(",")[0].lower().split("x")
        width, height = (whole_number(first[0]), whole_number(first[-1])) if first[0].strip().isdigit() else (0, 0)
        why = "the first of several sizes" if "," in size else ""
        for name, side in (("width", width), ("height", height)):
            if not side:
                found.leave("validation_resolution", "not WIDTHxHEIGHT. Set validation.width and height")
            else:
                found.take("validation_resolution", f"validation.{name}", side, why)
    if found.read("use_ema", boolean):
        decay = found.read("ema_decay", number)
        found.take("use_ema", "ema.decay", decay or 0.995)
        if decay:
            found.keep("ema_decay", "see use_ema")


def _places(found: Translation) -> None:
    trackers = (found.read("report_to", as_text) or "").split(",")
    if trackers != [""]:
        found.take("report_to", "tracking.tensorboard", bool({"tensorboard", "all"} & set(trackers)))
        if {"wandb", "all"} & set(trackers):
            found.take("report_to", "tracking.wandb", "online")
        if left := set(trackers) - {"tensorboard", "wandb", "all", "none"}:
            found.leave("report_to", f"{', '.join(sorted(left))}: simpletune logs to TensorBoard and wandb")
    named, out = found.read("tracker_run_name", as_text), found.read("output_dir", as_text)
    if named is not None:
        found.take("tracker_run_name", "name", run_name(named))
    if out is not None:
        place = PurePosixPath(out)
        if named is None:
            found.take("output_dir", "name", run_name(place.name), "a run has its own folder in output.runs")
            place = place.parent
        found.take("output_dir", "output.runs", str(place), "a run gets its own folder in it")
    on = found.read("enable_profiler", boolean)
    if on is False:
        found.take("enable_profiler", "profile.max_traces", 0)
    elif on:
        found.take("enable_profiler", "profile.max_traces", 5, "traces of up to five epochs")


def _data_sets(data: list[Json], general: Translation) -> list[Translation]:
    masks = {entry.get("id"): entry for entry in data if entry.get("dataset_type") == "conditioning"}
    found: list[Translation] = []
    given = {key: general.settings[key] for key in INHERITED if general.has(key)}
    inherited = {key: general.defaults.get(key) for key in INHERITED}
    for index, entry in enumerate(data):
        section = f"{entry.get('id', index)}." if entry else ""
        kind = str(entry.get("dataset_type", "image"))
        if kind != "image" or boolean(entry.get("disabled", False)):
            _leave(general, section, entry, kind)
            continue
        place, outer = f"data.sources.{len(found)}.", {key: key for key in given if key not in entry}
        source = Translation({**given, **entry}, inherited, section, place, outer)
        _data_set(source, masks, general)
        found.append(source)
    told = {line.key for source in found for line in source.lines}
    general.told(*(key for key in given if key in told))
    general.unused("every data set sets its own" if found else "there is no data set", *INHERITED)
    return found


def _leave(general: Translation, section: str, entry: Json, kind: str) -> None:
    """Leave out a data set that does not contain pictures to train on."""
    whole = Translation({"dataset_type": kind, **entry}, section=section)
    if boolean(entry.get("disabled", False)):
        why, same = "the data set was not used", True
        whole.leave("disabled", why, same)
    elif kind == "conditioning":
        why, same = "the masks of another data set", True
    elif kind in CACHES:
        why, same = "a cache: prompts and latents are cached in output.cache", True
        if entry.get("cache_dir") and general.get("output.cache") is None:
            whole.take("cache_dir", "output.cache", entry["cache_dir"], "one cache for everything")
            general.set("output.cache", entry["cache_dir"])
    else:
        why, same = f"a data set of type {kind}: simpletune trains on pictures. validation.split holds some out", False
    whole.leave("dataset_type", why, same)
    whole.leave_others({"no_effect" if same else "left_out": {"*": why}})
    general.lines.extend(whole.lines)


def _data_set(source: Translation, masks: dict[Any, Json], general: Translation) -> None:
    source.set("path", "")
    _images(source)
    source.by_table(
        [
            KeyRule("caption_dropout_probability", "caption_dropout", number),
            KeyRule("is_regularisation_data", "regularization", boolean),
            KeyRule("is_regularization_data", "regularization", boolean),
        ]
    )
    _captions(source)
    _size(source, general.family.architecture.multiple)
    repeats = source.read("repeats", whole_number)
    if repeats is not None:
        source.take("repeats", "repeats", repeats + 1, "0 means once there, 1 here")
    named = source.settings.get("conditioning_data")
    mask = masks.get(named[0] if isinstance(named, list) else named) if named else None
    if mask is not None and mask.get("conditioning_type", "mask") in ("mask", "segmentation"):
        source.take("conditioning_data", "mask", "files")
        source.set("mask_path", str(mask.get("instance_data_dir", "")))
    elif named:
        refuse_references(general, "conditioning_data", named)
        source.leave("conditioning_data", "not masks, or not in this file: simpletune trains no conditioning")
    source.leave_others(trainer_tables(NAME), "_data")


def _images(source: Translation) -> None:
    kind = source.read("type", as_text) or "local"
    place = "instance_data_dir" if source.has("instance_data_dir") else "instance_data_root"  # its older name
    path = source.read(place, as_text)
    if kind == "huggingface":
        source.take("type", "source", "table")
        source.by_table(
            [
                KeyRule("dataset_name", "path", as_text),
                KeyRule("image_column", "image_column", as_text),
                KeyRule("caption_column", "caption_column", as_text),
                KeyRule("split", "split", as_text),
            ]
        )
    elif path is not None:
        source.take(place, "path", path)
    if kind not in ("local", "huggingface"):
        source.leave(
            "type", f"{kind}: simpletune reads local folders, parquet and Hugging Face data sets. Set its path"
        )


def _captions(source: Translation) -> None:
    strategy, prompt = source.read("caption_strategy", as_text), source.read("instance_prompt", as_text)
    only = boolean(source.settings.get("only_instance_prompt", False))
    strategy = "instanceprompt" if only else strategy
    if strategy == "instanceprompt" and prompt:
        source.take("instance_prompt", "prompt", prompt)
        for key in ("caption_strategy", "only_instance_prompt"):
            if source.has(key):
                source.keep(key, "see instance_prompt")
    elif strategy == "textfile":
        source.take("caption_strategy", "captions", "txt")
        if not source.read("disable_multiline_split", boolean):
            source.take("caption_strategy", "caption_lines", "several")
        elif source.has("disable_multiline_split"):
            source.keep("disable_multiline_split", "a text is one caption")
    elif strategy == "filename":
        source.take("caption_strategy", "captions", "filename")
    elif strategy is not None and source.get("source") != "table":
        source.leave("caption_strategy", f"{strategy}: put captions beside the pictures or into metadata.jsonl")
    before = source.read("prepend_instance_prompt", boolean)
    if prompt and strategy != "instanceprompt" and before:
        source.take("instance_prompt", "caption_prefix", prompt)
        source.keep("prepend_instance_prompt", "see instance_prompt")
    elif prompt and strategy != "instanceprompt":
        source.leave("instance_prompt", "the captions are used")


def _size(source: Translation, step: int) -> None:
    size, kind = source.read("resolution", number) or 1024, source.read("resolution_type", as_text) or "pixel_area"
    if kind == "area":
        side = side_of_area(1000 * size**0.5, 1000 * size**0.5, step)
        source.take("resolution", "resolution", side, "megapixels there; the side of a square of that area here")
    else:
        side = side_of_area(size, size, step)
        why = "the shorter edge there; the side of a square of the pictures' area here" if kind == "pixel" else ""
        source.take("resolution", "resolution", side, why or (f"a multiple of {step}" if side != size else ""))
    crop, aspect = source.read("crop", boolean), source.read("crop_aspect", as_text) or "square"
    style = source.read("crop_style", as_text)
    if crop:
        source.keep("crop", "see crop_aspect")
        if aspect in ("preserve", "closest") and source.has("crop_aspect"):
            source.keep("crop_aspect", "pictures go to buckets near their own aspect ratios")
    if crop and aspect == "square":
        source.take("crop_aspect", "aspect", "square")
    elif crop and aspect not in ("preserve", "closest"):
        source.leave("crop_aspect", f"{aspect}: pictures go to buckets near their own aspect ratios")
    if crop and style in ("center", "centre", "random"):
        source.take("crop_style", "crop", "random" if style == "random" else "center")
        if style == "random":
            source.take("crop_style", "variants", VARIANTS, "drawn once for each variant, and cached")
    elif crop and style is not None:
        source.leave("crop_style", f"{style}: simpletune crops at the center or at random")
