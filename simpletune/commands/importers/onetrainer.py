"""Translate OneTrainer's configuration."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from simpletune.commands.importers.optimizers import take_arguments, take_optimizer, take_schedule, take_warmup
from simpletune.commands.importers.translation import (
    KeyRule,
    Translation,
    as_text,
    boolean,
    number,
    trainer_tables,
    whole_number,
)
from simpletune.config.run_name import run_name
from simpletune.system.options import Json

TITLE, NAME = "OneTrainer", "onetrainer"


def translate(settings: Json) -> Translation:
    """Translate all but concepts and samples."""
    tables = trainer_tables(NAME)
    found = Translation(settings, tables["defaults"])
    found.seen("concepts", "concept_file_name", "samples", "sample_definition_file_name", "resolution")
    family = _model(found)
    method = _adapter(found)
    found.by_table(tables["options"])
    _part(found, "transformer" if family == "sd3" else "unet", method)
    _optimizer(found)
    _length(found)
    _objective(found, family)
    _average(found)
    _places(found)
    return found


def finish(found: Translation) -> None:
    """Leave out the remaining options, after the concepts."""
    found.leave_by_table(trainer_tables(NAME)["left_out"])
    found.leave_rest()


def _model(found: Translation) -> str:
    name, families = found.read("model_type", as_text) or "", trainer_tables(NAME)["families"]
    if name not in families:
        found.leave("model_type", f"simpletune trains {', '.join(families)}")
        return "sd3"
    found.take("model_type", "model.family", families[name])
    return families[name]


def _adapter(found: Translation) -> str:
    tables = trainer_tables(NAME)
    kind, peft = found.read("training_method", as_text), found.read("peft_type", as_text) or "LORA"
    if kind in ("FINE_TUNE", "FINE_TUNE_VAE"):
        found.take("training_method", "adapter.method", "full")
        found.seen("lora_rank", "lora_alpha", "lora_weight_dtype", "layer_filter_preset", "peft_type")
        return "full"
    if kind != "LORA":
        found.leave("training_method", "simpletune trains LORA and FINE_TUNE. Set adapter.method")
        return "lora"
    method = tables["methods"].get(peft, "lora")
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
            ),
        ]
    )
    names, preset = found.read("layer_filter", as_text), found.read("layer_filter_preset", as_text) or "full"
    if preset in tables["targets"]:
        found.take("layer_filter_preset", "adapter.targets", tables["targets"][preset])
    elif names:
        found.change(
            "layer_filter",
            "adapter.targets",
            [part.strip() for part in names.split(",") if part.strip()],
            "endings of layer names; OneTrainer matches any part of them",
        )
    return method


def _rank(found: Translation, method: str) -> None:
    rank, alpha = found.read("lora_rank", whole_number), found.read("lora_alpha", number)
    if method in ("lora", "dora") and rank is not None and alpha is not None:
        found.take("lora_rank", "adapter.rank", rank)
        if alpha != rank:
            found.change(
                "lora_alpha",
                "adapter.alpha",
                alpha,
                f"a scale of {alpha / rank:g}: with alpha = rank, the same updates need a lower learning rate",
            )
        else:
            found.take("lora_alpha", "adapter.alpha", alpha)
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
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise ValueError
    return value


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
    elif kind in tables["weights_why"]:
        part.change("weight_dtype", "precision.weights", weights, tables["weights_why"][kind])
    else:
        part.take("weight_dtype", "precision.weights", weights)
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
        part.change(
            "offload_fraction",
            "memory.resident_blocks",
            round(tables["blocks"] * (1 - share)),
            f"the number of {tables['blocks']} blocks that stay on the device",
        )
    for key in part.settings:
        if key == "train" and boolean(part.settings[key]) is False:
            part.leave(key, f"only the {name} trains here")
    part.leave_by_table(tables["left_out_part"])
    part.leave_rest()
    found.lines += [line for line in part.lines if line.why != "it trains"]
    _merge(found.config, part.config)


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
            found.change("optimizer", "train.clip", "per_parameter", "gradients never exist all at once")
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
        found.change("learning_rate_min_factor", "schedule.end", least, "a polynomial of power 1 is linear and ends")
        found.change("learning_rate_scheduler", "schedule.name", "polynomial", "linear, with an end")
    elif least:
        found.leave("learning_rate_min_factor", f"schedule {schedule} ends at zero")


def _length(found: Translation) -> None:
    found.by_table([KeyRule("epochs", "train.epochs", whole_number)])
    take_warmup(found, "learning_rate_warmup_steps")
    norm = found.settings.get("clip_grad_norm", 1.0)
    found.by_table([KeyRule("clip_grad_norm", "train.clip_norm", number)])
    if norm == 0:
        found.set("train.clip_norm", None)


def _objective(found: Translation, family: str) -> None:
    if family != "sd3":
        found.seen("timestep_shift", "timestep_distribution", "text_encoder_3_sequence_length")
        if found.read("loss_weight_fn", as_text) == "MIN_SNR_GAMMA":
            found.take("loss_weight_fn", "objective.min_snr_gamma", found.read("loss_weight_strength", number) or 5.0)
        for key, path in (("min_noising_strength", "min_timestep"), ("max_noising_strength", "max_timestep")):
            value = found.read(key, number)
            if value is not None:
                found.change(key, f"objective.{path}", min(999, round(1000 * value)), "a timestep here")
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
        found.change(
            "huber_strength",
            "objective.huber",
            {"c": min(1.0, delta), "schedule": "constant"},
            "only the pseudo-Huber loss, instead of a mixture",
        )


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
        return found.change(
            "timestep_distribution",
            "objective.sigma",
            "logit_normal",
            f"simpletune has no {name}; the logit-normal density also favours the middle",
        )
    found.take("timestep_distribution", "objective.sigma", names[name])
    if name == "LOGIT_NORMAL":
        found.change("noising_bias", "objective.logit_mean", bias, "the mean")
        found.change("noising_weight", "objective.logit_std", weight + 1.0, "the standard deviation minus 1")
    elif name == "HEAVY_TAIL":
        found.take("noising_weight", "objective.mode_scale", weight)


def _average(found: Translation) -> None:
    mode = found.read("ema", as_text) or "OFF"
    decay = found.read("ema_decay", number)
    if mode != "OFF":
        found.change("ema", "ema.decay", decay or 0.999, "the average stays on the device")


def _places(found: Translation) -> None:
    result, place = found.read("output_model_destination", as_text), found.read("workspace_dir", as_text)
    if result is not None:
        name = PurePosixPath(result.replace("\\", "/"))
        found.change(
            "output_model_destination",
            "name",
            run_name(name.stem if name.suffix else name.name),
            "a run has its own folder in output.runs",
        )
    if place is not None:
        found.change("workspace_dir", "output.runs", place, "a run gets its own folder in it")
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
