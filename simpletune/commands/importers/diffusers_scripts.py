"""Translate the command line of one of diffusers' training scripts for SD 1.5, 2, 3, XL, Z-Image or
Qwen-Image."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath

from simpletune.commands.importers.common_options import (
    VARIANTS,
    take_alpha,
    take_arguments,
    take_embedding,
    take_optimizer,
    take_schedule,
    take_text_lora,
    take_warmup,
)
from simpletune.commands.importers.translation import (
    KeyRule,
    Translation,
    as_text,
    boolean,
    number,
    trainer_tables,
    whole_number,
)
from simpletune.config.schema import run_name
from simpletune.models.zimage.zimage_files import SHIFT, TURBO_SHIFT
from simpletune.system.options import Json, UserError

TITLE, NAME = "diffusers' scripts", "diffusers"
ADAM = {"adam_beta1": "beta1", "adam_beta2": "beta2", "adam_weight_decay": "weight_decay", "adam_epsilon": "eps"}


def flatten(settings: Json) -> Json:
    """Return the options, which have no sections."""
    return settings


def translate(settings: Json, folder: Path, data: Path | None) -> tuple[Translation, list[Translation]]:
    """Translate the options, which name the data, too."""
    if data is not None:
        raise UserError("--data: the command line names the data of diffusers' scripts. Leave --data out")
    tables, script = trainer_tables(NAME), str(settings["script"])
    method = tables["scripts"][script]
    found = Translation(settings, tables["defaults"] | tables["defaults_of"].get(script, {}))
    named = (family for ending, family in tables["families"].items() if script.endswith(f"{ending}.py"))
    found.take("script", "model.family", next(named, "sd15"))
    if method == "lora" and found.read("use_dora", boolean):
        method = "dora"
        found.take("use_dora", "adapter.method", method)
    found.take("script", "adapter.method", method)
    if method in ("lora", "dora"):
        rank = found.read("rank", whole_number)
        found.take("rank", "adapter.rank", rank)
        take_alpha(found, "lora_alpha", found.read("lora_alpha", number), rank)
        found.by_table([KeyRule("lora_dropout", "adapter.dropout", number)])
        targets = "attention_image" if found.get("model.family") == "qwen_image" else "attention"
        found.take("script", "adapter.targets", targets, "the layers that it updates")
    elif method == "none":
        keys = {"token": "placeholder_token", "initial": "initializer_token", "vectors": "num_vectors"}
        take_embedding(found, keys, None)
        found.set("text.embeddings.keep_norm", False)
    if found.get("model.family") in ("zimage", "qwen_image"):
        found.by_table([KeyRule("max_sequence_length", "model.text_length", whole_number)])
        found.unused("the script does not read it", "guidance_scale", "text_encoder_lr")
    found.by_table(tables["options"])
    _precision(found, method)
    _optimizer(found)
    _length(found)
    if found.objective == "flow":
        _noise_levels(found)
    _places(found)
    source = _data(found, method)
    found.leave_others(tables)
    return found, [source]


def _precision(found: Translation, method: str) -> None:
    compute = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}.get(found.read("mixed_precision", as_text) or "no", "auto")
    found.take("mixed_precision", "precision.compute", compute)
    whole = method == "full" or compute == "fp32"
    why = "what trains is in full precision there" if whole else "a frozen base, in the compute type"
    found.take("mixed_precision", "precision.weights", "fp32" if whole else "bf16", why)


def _optimizer(found: Translation) -> None:
    name = found.read("optimizer", as_text) or "AdamW"
    eight = found.read("use_8bit_adam", boolean) and name.lower() == "adamw"
    take_optimizer(found, "use_8bit_adam" if eight else "optimizer", "adamw8bit" if eight else name)
    found.unused("use_8bit_adam decides" if eight else f"{name} has no 8-bit form there", "optimizer", "use_8bit_adam")
    for key, argument in ADAM.items():
        if found.has(key):
            take_arguments(found, key, {argument: found.read(key, number)}, alone=True)
    rate = found.read("learning_rate", number) or 0.0
    if found.read("scale_lr", boolean):
        times = math.prod(
            found.read(key, whole_number) or 1 for key in ("train_batch_size", "gradient_accumulation_steps")
        )
        found.take("scale_lr", "optimizer.lr", rate * times, f"{rate:g} x {times}, the pictures of a step")
        found.unused("see scale_lr", "learning_rate")
    else:
        found.take("learning_rate", "optimizer.lr", rate)
    schedule = take_schedule(found, "lr_scheduler", found.read("lr_scheduler", as_text) or "constant")
    for key, path, of, needed in (
        ("lr_num_cycles", "schedule.cycles", whole_number, "cosine_with_restarts"),
        ("lr_power", "schedule.power", number, "polynomial"),
    ):
        if schedule == needed:
            found.by_table([KeyRule(key, path, of)])
        elif found.has(key):
            found.leave(key, f"schedule {schedule} has no such option", same=True)
    if found.read("train_text_encoder", boolean):
        take_text_lora(found, "train_text_encoder", found.read("text_encoder_lr", number))


def _length(found: Translation) -> None:
    steps, epochs = found.read("max_train_steps", whole_number), found.read("num_train_epochs", whole_number)
    if steps:
        found.take("max_train_steps", "train.steps", steps)
        if found.has("num_train_epochs"):
            found.leave("num_train_epochs", "max_train_steps decides", same=True)
    else:
        found.take("num_train_epochs", "train.epochs", epochs)
    if found.settings.get("lr_scheduler", "constant") == "constant":
        if found.has("lr_warmup_steps"):
            found.leave("lr_warmup_steps", "their schedule constant has no warm-up", same=True)
    else:
        take_warmup(found, "lr_warmup_steps")


def _noise_levels(found: Translation) -> None:
    scheme, densities = found.read("weighting_scheme", as_text) or "logit_normal", trainer_tables(NAME)["densities"]
    if scheme in densities:
        found.take("weighting_scheme", "objective.sigma", *densities[scheme])
    else:
        found.leave("weighting_scheme", f"simpletune has {', '.join(densities)}")
    mean = found.read("logit_mean", number)
    if mean is not None:
        why = "a positive mean draws less noise there" if mean else ""
        found.take("logit_mean", "objective.logit_mean", 0.0 - mean, why)
    found.by_table(
        [KeyRule("logit_std", "objective.logit_std", number), KeyRule("mode_scale", "objective.mode_scale", number)]
    )
    shift, title = 3.0, "SD3"
    if found.get("model.family") == "zimage":
        model = found.family.model_copy(update={"pretrained": str(found.get("model.pretrained", ""))})
        shift, title = (TURBO_SHIFT, "Turbo") if model.few_steps is not None else (SHIFT, "Z-Image")
    elif found.get("model.family") == "qwen_image":
        shift, title = 1.0, "Qwen-Image"  # which the script does not shift by the pictures' sizes
    found.take("weighting_scheme", "objective.shift", shift, f"that of {title}'s noise schedule, at every size")
    if found.read("precondition_outputs", boolean):
        found.leave("precondition_outputs", "it weighs the loss by sigma^2; here it is the velocity's plain error")


def _places(found: Translation) -> None:
    place = PurePosixPath(found.read("output_dir", as_text) or "simpletune-run")
    found.take("output_dir", "name", run_name(place.name), "a run has its own folder in output.runs")
    if str(place.parent) != ".":
        found.take("output_dir", "output.runs", str(place.parent), "a run gets its own folder in it")
    prompts = found.read("validation_prompts", lambda value: value)
    prompts = prompts if isinstance(prompts, list) else [prompts] if prompts else []
    prompt = found.read("validation_prompt", as_text)
    if prompts or prompt:
        key = "validation_prompts" if prompts else "validation_prompt"
        found.take(key, "validation.prompts", prompts or [prompt])
    trackers = found.read("report_to", as_text)
    if trackers is not None:
        found.take("report_to", "tracking.tensorboard", trackers in ("tensorboard", "all"))
        if trackers in ("wandb", "all"):
            found.take("report_to", "tracking.wandb", "online")


def _data(found: Translation, method: str) -> Translation:
    tables = trainer_tables(NAME)
    own = {key: found.settings[key] for key in tables["data"] if found.has(key)}
    found.told(*tables["data"])
    usual = tables["defaults_data"] | {key: found.defaults[key] for key in tables["data"] if key in found.defaults}
    source = Translation(own, usual, "", "data.sources.0.")
    source.set("path", "")
    folder = "instance_data_dir" if source.has("instance_data_dir") else "train_data_dir"
    table = source.read("dataset_name", as_text)
    if table is not None:
        source.take("dataset_name", "source", "table")
        source.take("dataset_name", "path", table)
        source.by_table(
            [KeyRule("image_column", "image_column", as_text), KeyRule("caption_column", "caption_column", as_text)]
        )
        source.unused("dataset_name names the pictures", "instance_data_dir", "train_data_dir")
    else:
        source.by_table([KeyRule(folder, "path", as_text)])
    prompt = source.read("instance_prompt", as_text)
    if prompt is not None and (table is None or not source.has("caption_column")):
        source.take("instance_prompt", "prompt", prompt)
        source.config.pop("caption_column", None)
    if method == "none":
        style, token = source.read("learnable_property", as_text) == "style", found.get("text.embeddings.token")
        words = f"a painting in the style of {token}" if style else f"a photo of a {token}"
        source.take("learnable_property", "prompt", words, "one of several such prompts there")
    side, repeats = source.read("resolution", whole_number) or 512, source.read("repeats", whole_number)
    source.by_table([KeyRule("proportion_empty_prompts", "caption_dropout", number)])
    step = found.family.architecture.multiple
    whole = max(step, round(side / step) * step)
    source.take("resolution", "resolution", whole, "" if whole == side else f"in steps of {step}")
    source.take("resolution", "aspect", "square", "pictures are cropped to squares there")
    if repeats is not None:
        source.take("repeats", "repeats", repeats)
    if not source.read("center_crop", boolean) and method != "none":
        source.take("center_crop", "crop", "random")
    flip = source.read("random_flip", boolean)
    if flip:
        source.take("random_flip", "flip", True)
    if flip or source.get("crop") == "random":
        source.take("random_flip" if flip else "center_crop", "variants", VARIANTS, "drawn once for each, and cached")
    if source.read("with_prior_preservation", boolean):
        _prior(found, source)
    source.leave_others(tables, "_data")
    return source


def _prior(found: Translation, source: Translation) -> None:
    """Translate prior preservation, which generates class pictures into a folder there and into the cache here."""
    found.set("prior", {"method": "class_pictures"})
    for key, path, value in (
        ("class_prompt", "prior.prompt", source.read("class_prompt", as_text)),
        ("num_class_images", "prior.count", source.read("num_class_images", whole_number)),
        ("prior_loss_weight", "prior.weight", source.read("prior_loss_weight", number)),
    ):
        if value is not None:
            found.settings.setdefault(key, value)
            found.take(key, path, value)
            source.told(key)
    source.keep("with_prior_preservation", "prior.method class_pictures")
