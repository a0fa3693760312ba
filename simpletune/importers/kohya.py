"""What the options of kohya's scripts (sd-scripts) mean here: a TOML file, in sections or not."""

from __future__ import annotations

import tomllib
from pathlib import Path

from simpletune.config.run_name import run_name
from simpletune.importers.files import found_beside
from simpletune.importers.kohya_prompts import prompts_of
from simpletune.importers.optimizers import take_arguments, take_optimizer, take_schedule, take_warmup
from simpletune.importers.simpletuner import take_lycoris
from simpletune.importers.translation import Row, Translation, number, pairs, text, truth, whole_number
from simpletune.options import Json

TITLE = "kohya's scripts"
KEYS = {"network_module", "network_dim", "max_train_steps", "optimizer_type", "save_every_n_epochs", "train_data_dir",
        "output_name", "dataset_config", "mixed_precision", "sample_prompts", "save_model_as"}  # fmt: skip
DEFAULTS = {
    "network_dim": 4, "network_alpha": 1.0, "max_train_steps": 1600, "learning_rate": 2e-6, "optimizer_type": "AdamW",
    "lr_scheduler": "constant", "weighting_scheme": "uniform", "training_shift": 1.0, "max_grad_norm": 1.0,
    "train_batch_size": 1, "mixed_precision": "no", "gradient_checkpointing": False,
}  # fmt: skip
BLOCKS = 24  # of SD3 Medium's transformer
DENSITIES = {"logit_normal": "logit_normal", "mode": "mode", "cosmap": "cosmap", "uniform": "uniform",
             "none": "uniform", "sigma_sqrt": "uniform"}  # fmt: skip

ROWS = (
    Row("pretrained_model_name_or_path", "model.pretrained", text),
    Row("vae", "model.vae", text),
    Row("t5xxl_max_token_length", "model.t5_length", whole_number),
    Row("gradient_accumulation_steps", "train.gradient_accumulation", whole_number),
    Row("seed", "train.seed", whole_number),
    Row("scale_weight_norms", "adapter.max_norm", number),
    Row("min_snr_gamma", "objective.min_snr_gamma", number),
    Row("noise_offset", "objective.offset_noise", number),
    Row("zero_terminal_snr", "objective.zero_terminal_snr", truth),
    Row("save_every_n_steps", "checkpoint.every", whole_number),
    Row("sample_every_n_steps", "validation.every", whole_number),
    Row("output_dir", "output.runs", text, why={"*": "a run has its folder in it"}),
    Row("logging_dir", "output.profiles", text),
    Row("log_tracker_name", "tracking.wandb_project", text),
    Row("torch_compile", "speed.compile", truth),
)
LEFT = {
    "wandb_run_name": "a run in wandb has the run's name",
    "clip_l": "it named a text encoder's file. model.text_encoders takes a pipeline's folder with all of them",
    "clip_g": "as clip_l", "t5xxl": "as clip_l", "text_encoder_lr": "text encoders stay frozen",
    "learning_rate_te*": "text encoders stay frozen", "train_text_encoder": "text encoders stay frozen",
    "network_weights": "it began with the weights of another LoRA. Combine them with simpletune mix",
    "dim_from_weights": "as network_weights", "base_weights*": "as network_weights",
    "save_every_n_epochs": "checkpoints are saved by steps: checkpoint.every",
    "sample_every_n_epochs": "pictures are drawn by steps: validation.every",
    "save_last_n_epochs*": "set checkpoint.keep_last", "save_model_as": "the result is a .safetensors file",
    "save_precision": "the result has the type that it trained in; simpletune export --dtype writes another",
    "save_state*": "every checkpoint holds the state", "resume": "use simpletune train --resume auto",
    "save_n_epoch_ratio": "checkpoints are saved by steps: checkpoint.every", "training_comment": "use about",
    "cache_latents*": "latents are always cached", "cache_text_encoder_outputs*": "prompts are always cached",
    "text_encoder_batch_size": "prompts are encoded once", "vae_batch_size": "latents are encoded once",
    "sdpa": "PyTorch's attention is used", "xformers": "PyTorch's attention is used", "mem_eff_attn": "as xformers",
    "split_attn": "PyTorch's attention is used", "max_data_loader_n_workers": "speed.prefetch loads one step ahead",
    "persistent_data_loader_workers": "speed.prefetch loads one step ahead", "lowram": "weights are memory-mapped",
    "highvram": "the text encoders leave the device after encoding", "no_half_vae": "the autoencoder runs in fp32 where needed",
    "metadata_*": "simpletune export fills the header", "no_metadata": "the header names the run's settings",
    "console_log_*": "it formatted kohya's log", "log_*": "metrics.jsonl, TensorBoard and wandb have everything",
    "wandb_api_key": "set WANDB_API_KEY in the environment", "huggingface_*": "use simpletune push",
    "sample_sampler": "each family has its own sampler", "sample_at_first": "pictures are drawn before training",
    "clip_skip": "SD3's encoders give their last but one layer, SD 1.5's its last",
    "max_token_length": "CLIP sees 77 tokens", "weighted_captions": "weights in captions are not read",
    "prior_loss_weight": "without regularization pictures it does nothing", "ip_noise_gamma*": "noise is drawn as it is",
    "multires_noise_*": "noise is drawn as it is", "adaptive_noise_scale": "noise is drawn as it is",
    "scale_v_pred_loss_like_noise_pred": "not supported", "v_pred_like_loss": "not supported",
    "debiased_estimation_loss": "not supported", "lr_scheduler_args": "not supported", "lr_scheduler_type": "not supported",
    "network_train_unet_only": "text encoders stay frozen", "network_train_text_encoder_only": "text encoders stay frozen",
    "cpu_offload_checkpointing": "memory.offload_checkpoint_inputs is near", "full_fp16": "weights stay in bf16 or fp32",
    "apply_lg_attn_mask": "prompts are padded without a mask, as SD3 was trained",
    "apply_t5_attn_mask": "prompts are padded without a mask, as SD3 was trained",
    "clip_l_dropout_rate": "caption_dropout drops whole captions", "clip_g_dropout_rate": "as clip_l_dropout_rate",
    "t5_dropout_rate": "as clip_l_dropout_rate", "enable_scaled_pos_embed": "positions are cropped from the model's table",
    "pos_emb_random_crop_rate": "positions are cropped from the center", "dataset_class": "it ran code of a user",
    "in_json": "captions of a file: name metadata.jsonl", "disable_mmap_load_safetensors": "weights are memory-mapped",
    "async_upload": "use simpletune push", "caption_*": "set in the data set", "dynamo_backend": "speed.compile",
    "initial_*": "use simpletune train --resume auto", "skip_until_initial_step": "use --resume auto",
    "deepspeed*": "not supported", "zero*": "not supported", "fp8_base_unet": "as fp8_base", "debug_dataset": "use simpletune data",
    "tokenizer_cache_dir": "everything is cached in output.cache", "max_validation_steps": "validation.eval_samples",
    "validation_*": "set validation.split", "validate_*": "the loss is evaluated at each validation and checkpoint",
    "fused_optimizer_groups": "memory.optimizer_in_backward is near", "skip_cache_check": "the cache is checked",
    "color_aug": "colours stay as they are", "face_crop_aug_range": "pictures are cropped at the center or at random",
    "unsharp_mask": "not supported", "masked_loss": "without masks it does nothing", "conditioning_data_dir": "set in the data set",
    "d_*": "not supported", "sample_*": "set validation", "v2": "the model's own configuration tells",
}  # fmt: skip


def flattened(settings: Json) -> Json:
    """The options without their sections, which mean nothing."""
    flat: Json = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= flattened(value)
        else:
            flat[key] = value
    return flat


def translate(settings: Json, folder: Path) -> Translation:
    """Translate all but the data.

    Args:
        settings: the options, without sections.
        folder: that the file lies in, for sample_prompts.
    """
    found = Translation(settings, DEFAULTS)
    is_sd3 = _family(found)
    method = _adapter(found, is_sd3)
    _precision(found, method)
    found.by_table(ROWS)
    _optimizer(found)
    _length(found)
    _memory(found, method)
    _objective(found, is_sd3)
    _samples(found, folder)
    _places(found)
    return found


def finish(found: Translation) -> None:
    """Leave out what is left, after the data."""
    found.leave_by_table(LEFT)
    found.leave_rest()


def _family(found: Translation) -> bool:
    """SD3's scripts have options of their own; ``v2`` and the networks of other models tell the others."""
    own = {"clip_l", "clip_g", "t5xxl", "t5xxl_max_token_length", "training_shift", "weighting_scheme", "mode_scale"}
    module = str(found.settings.get("network_module", ""))
    named = str(found.settings.get("pretrained_model_name_or_path", "")).lower().replace("-", "").replace("_", "")
    is_sd3 = module == "networks.lora_sd3" or bool(own & set(found.settings)) or "sd3" in named or "diffusion3" in named
    if not is_sd3:
        found.change("pretrained_model_name_or_path", "model.family", "sd15", "no option or name says SD3")
        for key in ("weighting_scheme", "training_shift"):
            found.defaults.pop(key)
    return is_sd3


def _adapter(found: Translation, is_sd3: bool) -> str:
    module = found.read("network_module", text)
    arguments = found.read("network_args", pairs) or {}
    if module is None:
        found.change("network_module", "adapter.method", "full", "without a network everything trains")
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
        found.leave("network_dim", "its number of blocks; adapter.block_size is their size")
    else:
        known = module in ("networks.lora", "networks.lora_sd3")
        if known:
            found.take("network_module", "adapter.method", "lora")
        else:
            found.change("network_module", "adapter.method", "lora", "the nearest that simpletune has")
        found.take("network_dim", "adapter.rank", rank)
        if alpha is not None and rank is not None and alpha != rank:
            found.change("network_alpha", "adapter.alpha", alpha, f"a scale of {alpha / rank:g}: with alpha = rank, the "
                         "same updates need a lower learning rate")  # fmt: skip
        elif alpha is not None:
            found.take("network_alpha", "adapter.alpha", alpha)
    if found.get("adapter.method") in ("lora", "dora"):
        found.by_table([Row("network_dropout", "adapter.dropout", number)])
        _network_arguments(found, arguments)
    return str(found.get("adapter.method"))


def _plain(arguments: dict[str, str]) -> Json:
    own = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "rank_dropout", "module_dropout")
    return {key: value for key, value in arguments.items() if key not in own}


def _network_arguments(found: Translation, arguments: dict[str, str]) -> None:
    names = {"loraplus_lr_ratio": "b_lr_ratio", "loraplus_unet_lr_ratio": "b_lr_ratio", "rank_dropout": "rank_dropout",
             "module_dropout": "module_dropout"}  # fmt: skip
    lycoris = str(found.settings.get("network_module")).startswith("lycoris")
    for name, value in arguments.items():
        if name in names:
            found.take(found.part("network_args", name, value), f"adapter.{names[name]}", number(value))
        elif not lycoris:
            found.leave(found.part("network_args", name, value), "simpletune has no such option, or adapter.targets")


def _precision(found: Translation, method: str) -> None:
    compute = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}.get(found.read("mixed_precision", text) or "no", "auto")
    full = found.read("full_bf16", truth)
    if found.read("fp8_base", truth):
        found.change("fp8_base", "precision.weights", "int8",
                     "int8 weights take as many bytes, and are exact to a smaller error")  # fmt: skip
    elif full:
        found.take("full_bf16", "precision.weights", "bf16")
    elif method == "full" or compute == "fp32":
        found.change("mixed_precision", "precision.weights", "fp32", "kohya's scripts keep full weights then")
    else:
        found.change("mixed_precision", "precision.weights", "bf16", "a frozen base, in the compute type")
    found.take("mixed_precision", "precision.compute", compute)


def _optimizer(found: Translation) -> None:
    name = found.read("optimizer_type", text) or "AdamW"
    take_optimizer(found, "optimizer_type", name)
    take_arguments(found, "optimizer_args", found.read("optimizer_args", pairs) or {})
    rate, own = found.read("learning_rate", number), found.read("unet_lr", number)
    if own is not None:
        found.change("unet_lr", "optimizer.lr", own, "the learning rate of what trains here")
        if found.has("learning_rate"):
            found.leave("learning_rate", "unet_lr decides")
    elif rate is not None:
        found.take("learning_rate", "optimizer.lr", rate)
    schedule = take_schedule(found, "lr_scheduler", found.read("lr_scheduler", text) or "constant")
    for key, path, of, needed in (
        ("lr_scheduler_power", "schedule.power", number, "polynomial"),
        ("lr_scheduler_num_cycles", "schedule.cycles", whole_number, "cosine_with_restarts"),
        ("lr_scheduler_min_lr_ratio", "schedule.end", number, "polynomial"),
    ):
        if schedule == needed:
            found.by_table([Row(key, path, of)])
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
            "save_last_n_steps", "checkpoint.keep_last", max(1, last // int(every)), "a number of checkpoints here"
        )
    elif last:
        found.leave("save_last_n_steps", "set checkpoint.keep_last")


def _memory(found: Translation, method: str) -> None:
    found.by_table([Row("gradient_checkpointing", "memory.checkpointing", truth, {"true": "all", "false": "none"})])
    swapped = found.read("blocks_to_swap", whole_number)
    if swapped:
        found.change("blocks_to_swap", "memory.resident_blocks", max(0, BLOCKS - swapped),
                     f"the rest of {BLOCKS} blocks stays on the device")  # fmt: skip
    if found.read("fused_backward_pass", truth):
        if method == "full":
            found.take("fused_backward_pass", "memory.optimizer_in_backward", True)
            found.change("fused_backward_pass", "train.clip", "per_parameter", "no gradients exist all at once")
        else:
            found.leave("fused_backward_pass", "an adapter's gradients are small")


def _objective(found: Translation, is_sd3: bool) -> None:
    if is_sd3:
        scheme = found.read("weighting_scheme", text) or "uniform"
        if scheme in ("none", "sigma_sqrt"):
            why = (
                "it weighs the loss by 1 / sigma^2, which simpletune does not" if scheme == "sigma_sqrt" else "uniform"
            )
            found.change("weighting_scheme", "objective.sigma", DENSITIES[scheme], why)
        elif scheme in DENSITIES:
            found.take("weighting_scheme", "objective.sigma", DENSITIES[scheme])
        else:
            found.leave("weighting_scheme", f"simpletune has {', '.join(dict.fromkeys(DENSITIES.values()))}")
        found.by_table([
            Row("logit_mean", "objective.logit_mean", number), Row("logit_std", "objective.logit_std", number),
            Row("mode_scale", "objective.mode_scale", number), Row("training_shift", "objective.shift", number),
        ])  # fmt: skip
    elif found.read("v_parameterization", truth):
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
    loss, c, schedule = found.read("loss_type", text), found.read("huber_c", number), found.read("huber_schedule", text)
    if loss in ("huber", "smooth_l1"):
        found.change("loss_type", "objective.huber", {"c": c or 0.1, "schedule": schedule or "snr"},
                     "the pseudo-Huber loss of simpletune")  # fmt: skip


def _samples(found: Translation, folder: Path) -> None:
    name = found.read("sample_prompts", text)
    file = None if name is None else found_beside(folder, name)
    if name is not None and file is None:
        return found.leave("sample_prompts", "the file is not here. Set validation.prompts")
    if file is not None:
        try:
            prompts_of(found, "sample_prompts", file)
        except (UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError):
            found.leave("sample_prompts", "the file cannot be read. Set validation.prompts")


def _places(found: Translation) -> None:
    if (name := found.read("output_name", text)) is not None:
        found.take("output_name", "name", run_name(name))
    tracker = found.read("log_with", text)
    if tracker is not None:
        found.take("log_with", "tracking.tensorboard", tracker in ("tensorboard", "all"))
        if tracker in ("wandb", "all"):
            found.take("log_with", "tracking.wandb", "online")
