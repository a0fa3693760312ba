"""Translate the options of kohya's scripts (sd-scripts): a TOML file, with or without sections."""

from __future__ import annotations

import tomllib
from pathlib import Path

from simpletune.commands.importers.files import found_beside
from simpletune.commands.importers.kohya_prompts import take_prompts
from simpletune.commands.importers.lycoris import take_lycoris
from simpletune.commands.importers.optimizers import take_arguments, take_optimizer, take_schedule, take_warmup
from simpletune.commands.importers.translation import (
    KeyRule,
    Translation,
    as_text,
    boolean,
    number,
    pairs,
    trainer_tables,
    whole_number,
)
from simpletune.config.run_name import run_name
from simpletune.system.options import Json

TITLE, NAME = "kohya's scripts", "kohya"


def flatten_sections(settings: Json) -> Json:
    """Return the options without their sections, which have no meaning."""
    flat: Json = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= flatten_sections(value)
        else:
            flat[key] = value
    return flat


def translate(settings: Json, folder: Path) -> Translation:
    """Translate all but the data."""
    tables = trainer_tables(NAME)
    found = Translation(settings, tables["defaults"])
    is_sd3 = _family(found)
    method = _adapter(found, is_sd3)
    _precision(found, method)
    found.by_table(tables["options"])
    _optimizer(found)
    _length(found)
    _memory(found, method)
    _objective(found, is_sd3)
    _samples(found, folder)
    _places(found)
    return found


def finish(found: Translation) -> None:
    """Leave out the remaining options, after the data."""
    found.leave_by_table(trainer_tables(NAME)["left_out"])
    found.leave_rest()


def _family(found: Translation) -> bool:
    """Recognise the family: SD3's scripts have their own options; ``v2`` and other models' networks tell the others."""
    own = {"clip_l", "clip_g", "t5xxl", "t5xxl_max_token_length", "training_shift", "weighting_scheme", "mode_scale"}
    module = str(found.settings.get("network_module", ""))
    named = str(found.settings.get("pretrained_model_name_or_path", "")).lower().replace("-", "").replace("_", "")
    is_sd3 = module == "networks.lora_sd3" or bool(own & set(found.settings)) or "sd3" in named or "diffusion3" in named
    if not is_sd3:
        found.change("pretrained_model_name_or_path", "model.family", "sd15", "no option or name indicates SD3")
        for key in ("weighting_scheme", "training_shift"):
            found.defaults.pop(key)
    return is_sd3


def _adapter(found: Translation, is_sd3: bool) -> str:
    module = found.read("network_module", as_text)
    arguments = found.read("network_args", pairs) or {}
    if module is None:
        found.change("network_module", "adapter.method", "full", "without a network, everything trains")
        found.seen("network_dim", "network_alpha", "network_dropout")
        return "full"
    found.change("network_module", "adapter.targets", "all_linear", "what kohya's networks update")
    rank, alpha = found.read("network_dim", whole_number), found.read("network_alpha", number)
    if module.startswith("lycoris"):
        take_lycoris(
            found,
            "network_module",
            {"algo": arguments.pop("algo", "lora"), "dim": rank, "alpha": alpha, **_plain(arguments)},
        )
        if found.get("adapter.method") == "full":
            found.set("adapter", {"method": "full"})
    elif module.startswith("networks.oft"):
        found.take("network_module", "adapter.method", "oft")
        found.leave("network_dim", "it is the number of blocks; adapter.block_size is their size")
    else:
        known = module in ("networks.lora", "networks.lora_sd3")
        if known:
            found.take("network_module", "adapter.method", "lora")
        else:
            found.change("network_module", "adapter.method", "lora", "the nearest that simpletune has")
        found.take("network_dim", "adapter.rank", rank)
        if alpha is not None and rank is not None and alpha != rank:
            found.change(
                "network_alpha",
                "adapter.alpha",
                alpha,
                f"a scale of {alpha / rank:g}: with alpha = rank, the same updates need a lower learning rate",
            )
        elif alpha is not None:
            found.take("network_alpha", "adapter.alpha", alpha)
    if found.get("adapter.method") in ("lora", "dora"):
        found.by_table([KeyRule("network_dropout", "adapter.dropout", number)])
        _network_arguments(found, arguments)
    return str(found.get("adapter.method"))


def _plain(arguments: dict[str, str]) -> Json:
    own = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "rank_dropout", "module_dropout")
    return {key: value for key, value in arguments.items() if key not in own}


def _network_arguments(found: Translation, arguments: dict[str, str]) -> None:
    names = {
        "loraplus_lr_ratio": "b_lr_ratio",
        "loraplus_unet_lr_ratio": "b_lr_ratio",
        "rank_dropout": "rank_dropout",
        "module_dropout": "module_dropout",
    }
    lycoris = str(found.settings.get("network_module")).startswith("lycoris")
    for name, value in arguments.items():
        if name in names:
            found.take(found.part("network_args", name, value), f"adapter.{names[name]}", number(value))
        elif not lycoris:
            found.leave(found.part("network_args", name, value), "simpletune has no such option, or adapter.targets")


def _precision(found: Translation, method: str) -> None:
    compute = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}.get(found.read("mixed_precision", as_text) or "no", "auto")
    full = found.read("full_bf16", boolean)
    if found.read("fp8_base", boolean):
        found.change("fp8_base", "precision.weights", "int8", "int8 weights take as many bytes, with a smaller error")
    elif full:
        found.take("full_bf16", "precision.weights", "bf16")
    elif method == "full" or compute == "fp32":
        found.change("mixed_precision", "precision.weights", "fp32", "kohya's scripts then keep full weights")
    else:
        found.change("mixed_precision", "precision.weights", "bf16", "a frozen base, in the compute type")
    found.take("mixed_precision", "precision.compute", compute)


def _optimizer(found: Translation) -> None:
    name = found.read("optimizer_type", as_text) or "AdamW"
    take_optimizer(found, "optimizer_type", name)
    take_arguments(found, "optimizer_args", found.read("optimizer_args", pairs) or {})
    rate, own = found.read("learning_rate", number), found.read("unet_lr", number)
    if own is not None:
        found.change("unet_lr", "optimizer.lr", own, "the learning rate of the part that trains here")
        if found.has("learning_rate"):
            found.leave("learning_rate", "unet_lr decides")
    elif rate is not None:
        found.take("learning_rate", "optimizer.lr", rate)
    schedule = take_schedule(found, "lr_scheduler", found.read("lr_scheduler", as_text) or "constant")
    for key, path, of, needed in (
        ("lr_scheduler_power", "schedule.power", number, "polynomial"),
        ("lr_scheduler_num_cycles", "schedule.cycles", whole_number, "cosine_with_restarts"),
        ("lr_scheduler_min_lr_ratio", "schedule.end", number, "polynomial"),
    ):
        if schedule == needed:
            found.by_table([KeyRule(key, path, of)])
        elif found.has(key):
            found.leave(key, f"schedule {schedule} has no such option")


def _length(found: Translation) -> None:
    epochs, steps = found.read("max_train_epochs", whole_number), found.read("max_train_steps", whole_number)
    if epochs:
        found.take("max_train_epochs", "train.epochs", epochs)
        if found.has("max_train_steps"):
            found.leave("max_train_steps", "max_train_epochs decides")
    else:
        found.take("max_train_steps", "train.steps", steps)
    take_warmup(found, "lr_warmup_steps")
    norm = found.read("max_grad_norm", number)
    if norm == 0:
        found.change("max_grad_norm", "train.clip_norm", None, "0 means no clipping")
    else:
        found.take("max_grad_norm", "train.clip_norm", norm)
    last, every = found.read("save_last_n_steps", whole_number), found.settings.get("save_every_n_steps")
    if last and every:
        found.change(
            "save_last_n_steps", "checkpoint.keep_last", max(1, last // int(every)), "counted in checkpoints here"
        )
    elif last:
        found.leave("save_last_n_steps", "set checkpoint.keep_last")


def _memory(found: Translation, method: str) -> None:
    found.by_table(
        [KeyRule("gradient_checkpointing", "memory.checkpointing", boolean, {"true": "all", "false": "none"})]
    )
    swapped, blocks = found.read("blocks_to_swap", whole_number), trainer_tables(NAME)["blocks"]
    if swapped:
        found.change(
            "blocks_to_swap",
            "memory.resident_blocks",
            max(0, blocks - swapped),
            f"the rest of the {blocks} blocks stays on the device",
        )
    if found.read("fused_backward_pass", boolean):
        if method == "full":
            found.take("fused_backward_pass", "memory.optimizer_in_backward", True)
            found.change("fused_backward_pass", "train.clip", "per_parameter", "gradients never exist all at once")
        else:
            found.leave("fused_backward_pass", "an adapter's gradients are small")


def _objective(found: Translation, is_sd3: bool) -> None:
    if is_sd3:
        scheme, densities = found.read("weighting_scheme", as_text) or "uniform", trainer_tables(NAME)["densities"]
        if scheme in ("none", "sigma_sqrt"):
            why = (
                "it weights the loss by 1 / sigma^2, which simpletune does not do"
                if scheme == "sigma_sqrt"
                else "uniform"
            )
            found.change("weighting_scheme", "objective.sigma", densities[scheme], why)
        elif scheme in densities:
            found.take("weighting_scheme", "objective.sigma", densities[scheme])
        else:
            found.leave("weighting_scheme", f"simpletune has {', '.join(dict.fromkeys(densities.values()))}")
        found.by_table(
            [
                KeyRule("logit_mean", "objective.logit_mean", number),
                KeyRule("logit_std", "objective.logit_std", number),
                KeyRule("mode_scale", "objective.mode_scale", number),
                KeyRule("training_shift", "objective.shift", number),
            ]
        )
    elif found.read("v_parameterization", boolean):
        found.take("v_parameterization", "objective.prediction", "v")
    for key, flow, ddpm in (
        ("min_timestep", "min_sigma", "min_timestep"),
        ("max_timestep", "max_sigma", "max_timestep"),
    ):
        step = found.read(key, whole_number)
        if step is not None and is_sd3:
            found.change(key, f"objective.{flow}", step / 1000, "a noise level from 0 to 1 here")
        elif step is not None:
            found.take(key, f"objective.{ddpm}", min(step, 999))
    loss, c, schedule = (
        found.read("loss_type", as_text),
        found.read("huber_c", number),
        found.read("huber_schedule", as_text),
    )
    if loss in ("huber", "smooth_l1"):
        found.change(
            "loss_type",
            "objective.huber",
            {"c": c or 0.1, "schedule": schedule or "snr"},
            "the pseudo-Huber loss of simpletune",
        )


def _samples(found: Translation, folder: Path) -> None:
    name = found.read("sample_prompts", as_text)
    file = None if name is None else found_beside(folder, name)
    if name is not None and file is None:
        return found.leave("sample_prompts", "the file is not here. Set validation.prompts")
    if file is not None:
        try:
            take_prompts(found, "sample_prompts", file)
        except (UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError):
            found.leave("sample_prompts", "the file cannot be read. Set validation.prompts")


def _places(found: Translation) -> None:
    if (name := found.read("output_name", as_text)) is not None:
        found.take("output_name", "name", run_name(name))
    tracker = found.read("log_with", as_text)
    if tracker is not None:
        found.take("log_with", "tracking.tensorboard", tracker in ("tensorboard", "all"))
        if tracker in ("wandb", "all"):
            found.take("log_with", "tracking.wandb", "online")
