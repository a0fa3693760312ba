"""Translate SimpleTuner's config.json."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from simpletune.commands.importers.files import read_beside
from simpletune.commands.importers.lycoris import take_lycoris
from simpletune.commands.importers.optimizers import take_arguments, take_optimizer, take_schedule, take_warmup
from simpletune.commands.importers.translation import (
    KeyRule,
    Translation,
    as_text,
    boolean,
    number,
    pairs,
    round_digits,
    trainer_tables,
    whole_number,
)
from simpletune.config.run_name import run_name
from simpletune.models.sd3.files import SD35_MEDIUM
from simpletune.system.options import Json

TITLE, NAME = "SimpleTuner", "simpletuner"


def strip_dashes(settings: Json) -> Json:
    """Strip leading dashes from keys, which are written as on a command line."""
    return {key.lstrip("-").replace("-", "_"): value for key, value in settings.items()}


def translate(settings: Json, folder: Path) -> Translation:
    """Translate all but the data."""
    settings, tables = strip_dashes(settings), trainer_tables(NAME)
    scheduler = str(settings.get("lr_scheduler", ""))
    flow = (
        {}
        if str(settings.get("model_family", "sd3")) == "sd3"
        else {"flow_schedule_shift": None, "tokenizer_max_length": None}
    )
    found = Translation(
        settings, tables["defaults"] | (tables["polynomial"] if scheduler == "polynomial" else {}) | flow
    )
    found.seen("data_backend_config", "resolution", "resolution_type", "caption_dropout_probability")
    _model(found)
    _adapter(found, folder)
    found.by_table(tables["options"])
    _optimizer(found)
    _length(found)
    _memory(found)
    _objective(found)
    _validation(found)
    _places(found)
    found.leave_by_table(tables["left_out"])
    found.leave_rest()
    return found


def _model(found: Translation) -> None:
    flavour, flavours = found.read("model_flavour", as_text), trainer_tables(NAME)["flavours"]
    if flavour is not None and found.has("pretrained_model_name_or_path"):
        found.leave("model_flavour", "pretrained_model_name_or_path names the model")
    elif flavour is not None and flavour in flavours:
        found.take("model_flavour", "model.pretrained", flavours[flavour])
    elif flavour is not None:
        found.leave("model_flavour", f"unknown. Set model.pretrained; known are {', '.join(flavours)}")
    elif not found.has("pretrained_model_name_or_path") and str(found.settings.get("model_family", "")) == "sd3":
        found.defaults["model_flavour"] = "medium"
        found.take("model_flavour", "model.pretrained", SD35_MEDIUM)


def _adapter(found: Translation, folder: Path) -> None:
    kind, form = found.read("model_type", as_text), found.read("lora_type", as_text) or "standard"
    if kind == "full":
        found.take("model_type", "adapter.method", "full")
        found.seen("lora_rank", "lora_alpha", "lora_dropout", "lora_type", "init_lora")
    elif kind not in (None, "lora"):
        found.leave("model_type", "simpletune trains lora and full. Set adapter.method")
    elif form == "lycoris":
        _lycoris(found, folder)
    else:
        dora = found.read("use_dora", boolean)
        found.take("model_type", "adapter.method", "dora" if dora else "lora")
        found.by_table(trainer_tables(NAME)["lora"])
        if found.settings.get("model_family", "sd3") == "sd3":
            found.change("lora_type", "adapter.targets", "attention_image", "it updates to_q, to_k, to_v and to_out.0")
    if form == "standard":
        found.seen("lora_type", "lycoris_config")


def _lycoris(found: Translation, folder: Path) -> None:
    """Translate LyCORIS's settings, which are in a separate file."""
    name = found.read("lycoris_config", as_text)
    own = read_beside(folder, name) if name else None
    if own is None:
        found.take("lora_type", "adapter.method", "lokr")
        if name:
            found.leave("lycoris_config", "the file is not here. Set adapter.method and its fields")
        return
    take_lycoris(found, "lycoris_config", own)
    found.seen("lora_type", "lora_rank", "lora_alpha", "model_type")


def _optimizer(found: Translation) -> None:
    name = found.read("optimizer", as_text)
    if name is not None:
        ours = take_optimizer(found, "optimizer", name)
        if ours == "adamw_bf16" and found.get("adapter.method") in ("lora", "dora"):
            found.change("optimizer", "adapter.dtype", "bf16", "the update itself is in bf16 there")
    arguments = found.read("optimizer_config", pairs) or {}
    take_arguments(found, "optimizer_config", arguments)
    for key in ("adam_beta1", "adam_beta2", "adam_weight_decay", "adam_epsilon"):
        value = found.read(key, number)
        if value is not None and name is not None:
            named = {"adam_weight_decay": "weight_decay", "adam_epsilon": "eps"}.get(key, key.removeprefix("adam_"))
            take_arguments(found, key, {named: value})
    schedule = found.read("lr_scheduler", as_text)
    if schedule is None:
        return
    ours = take_schedule(found, "lr_scheduler", schedule)
    if ours == "polynomial":
        found.by_table([KeyRule("lr_power", "schedule.power", number)])
        end, rate = found.read("lr_end", number), found.get("optimizer.lr", 1e-4)
        if end is not None and isinstance(rate, int | float):
            found.change(
                "lr_end", "schedule.end", min(1.0, round_digits(end / rate)), "a fraction of the learning rate here"
            )
    elif ours == "cosine_with_restarts":
        found.by_table([KeyRule("lr_num_cycles", "schedule.cycles", whole_number)])
    for key in ("lr_power", "lr_end", "lr_num_cycles"):
        if found.has(key) and key not in {line.key for line in found.lines}:
            found.leave(key, f"schedule {ours} has no such option")


def _length(found: Translation) -> None:
    steps, epochs = found.read("max_train_steps", whole_number), found.read("num_train_epochs", whole_number)
    if steps:
        found.take("max_train_steps", "train.steps", steps)
        if epochs:
            found.leave("num_train_epochs", "max_train_steps decides")
    elif epochs:
        found.take("num_train_epochs", "train.epochs", epochs)
    take_warmup(found, "lr_warmup_steps")
    norm, method = found.read("max_grad_norm", number), found.read("grad_clip_method", as_text)
    if norm == 0:
        found.change("max_grad_norm", "train.clip_norm", None, "0 means no clipping")
    elif norm is not None and method == "value":
        found.change(
            "max_grad_norm",
            "train.clip_norm",
            norm,
            "SimpleTuner limits each value of the gradient by default; here its norm is limited",
        )
    elif norm is not None:
        found.take("max_grad_norm", "train.clip_norm", norm)


def _memory(found: Translation) -> None:
    on = found.read("gradient_checkpointing", boolean)
    blocks = trainer_tables(NAME)["blocks"].get(str(found.get("model.pretrained")), 24)
    interval = found.read("gradient_checkpointing_interval", whole_number)
    if on and interval and interval > 1:
        found.change(
            "gradient_checkpointing_interval",
            "memory.checkpointing",
            -(-blocks // interval),
            f"every {interval}th of {blocks} blocks there; here as many, from the first",
        )
    elif on is not None:
        found.take("gradient_checkpointing", "memory.checkpointing", "all" if on else "none")
    swapped = found.read("musubi_blocks_to_swap", whole_number)
    if swapped:
        found.change(
            "musubi_blocks_to_swap",
            "memory.resident_blocks",
            max(0, blocks - swapped),
            f"the rest of the {blocks} blocks stays on the device",
        )
    for key in [key for key in found.settings if key.startswith("ramtorch") or key == "enable_group_offload"]:
        if found.read(key, boolean if key in ("ramtorch", "enable_group_offload") else as_text) is True:
            found.change(key, "memory.resident_blocks", 0, "all blocks are offloaded to host memory")
        else:
            found.leave(key, "blocks are offloaded as memory.resident_blocks says")
    for key in [
        key for key in found.settings if key.startswith(("group_offload", "musubi_", "gradient_checkpointing_"))
    ]:
        if key not in ("gradient_checkpointing_interval", "musubi_blocks_to_swap"):
            found.leave(key, "blocks are offloaded and recomputed as memory.resident_blocks and checkpointing say")


def _objective(found: Translation) -> None:
    if found.get("model.family", "sd3") == "sd3":
        auto, shift = found.read("flow_schedule_auto_shift", boolean), found.read("flow_schedule_shift", number)
        if auto:
            found.take("flow_schedule_auto_shift", "objective.shift", "auto")
        elif shift:
            found.take("flow_schedule_shift", "objective.shift", shift)
        elif shift == 0:
            found.change("flow_schedule_shift", "objective.shift", 1.0, "0 means no shift")
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
    if (loss := found.read("loss_type", as_text)) in ("huber", "smooth_l1"):
        c, schedule = found.read("huber_c", number), found.read("huber_schedule", as_text)
        found.change(
            "loss_type",
            "objective.huber",
            {"c": c or 0.1, "schedule": schedule or "snr"},
            "the pseudo-Huber loss of simpletune",
        )
    elif loss is not None:
        found.seen("huber_c", "huber_schedule")


def _validation(found: Translation) -> None:
    size = found.read("validation_resolution", as_text)
    if size is not None:
        first = size.split(",")[0].lower().split("x")
        width, height = (whole_number(first[0]), whole_number(first[-1])) if first[0].strip().isdigit() else (0, 0)
        why = "the first of several sizes" if "," in size else ""
        for name, side in (("width", width), ("height", height)):
            if not side:
                found.leave("validation_resolution", "not WIDTHxHEIGHT. Set validation.width and height")
            elif why:
                found.change("validation_resolution", f"validation.{name}", side, why)
            else:
                found.take("validation_resolution", f"validation.{name}", side)
    if found.read("use_ema", boolean):
        found.take("use_ema", "ema.decay", found.read("ema_decay", number) or 0.995)
    else:
        found.seen("ema_decay", "use_ema")


def _places(found: Translation) -> None:
    """Translate trackers, the run's name and its folders."""
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
            found.change("output_dir", "name", run_name(place.name), "a run has its own folder in output.runs")
            place = place.parent
        found.change("output_dir", "output.runs", str(place), "a run gets its own folder in it")
    on = found.read("enable_profiler", boolean)
    if on is False:
        found.take("enable_profiler", "profile.max_traces", 0)
    elif on:
        found.change("enable_profiler", "profile.max_traces", 5, "traces of up to five epochs")
