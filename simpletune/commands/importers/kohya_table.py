"""Options of kohya's scripts with a direct counterpart here, and their defaults."""

from __future__ import annotations

from simpletune.commands.importers.translation import KeyRule, as_text, boolean, number, whole_number

KEYS = {
    "network_module",
    "network_dim",
    "max_train_steps",
    "optimizer_type",
    "save_every_n_epochs",
    "train_data_dir",
    "output_name",
    "dataset_config",
    "mixed_precision",
    "sample_prompts",
    "save_model_as",
}
DEFAULTS = {
    "network_dim": 4, "network_alpha": 1.0, "max_train_steps": 1600, "learning_rate": 2e-6, "optimizer_type": "AdamW",
    "lr_scheduler": "constant", "weighting_scheme": "uniform", "training_shift": 1.0, "max_grad_norm": 1.0,
    "train_batch_size": 1, "mixed_precision": "no", "gradient_checkpointing": False,
}  # fmt: skip
BLOCKS = 24  # blocks of SD3 Medium's transformer
DENSITIES = {
    "logit_normal": "logit_normal",
    "mode": "mode",
    "cosmap": "cosmap",
    "uniform": "uniform",
    "none": "uniform",
    "sigma_sqrt": "uniform",
}

ROWS = (
    KeyRule("pretrained_model_name_or_path", "model.pretrained", as_text),
    KeyRule("vae", "model.vae", as_text),
    KeyRule("t5xxl_max_token_length", "model.t5_length", whole_number),
    KeyRule("gradient_accumulation_steps", "train.gradient_accumulation", whole_number),
    KeyRule("seed", "train.seed", whole_number),
    KeyRule("scale_weight_norms", "adapter.max_norm", number),
    KeyRule("min_snr_gamma", "objective.min_snr_gamma", number),
    KeyRule("noise_offset", "objective.offset_noise", number),
    KeyRule("zero_terminal_snr", "objective.zero_terminal_snr", boolean),
    KeyRule("save_every_n_steps", "checkpoint.every", whole_number),
    KeyRule("sample_every_n_steps", "validation.every", whole_number),
    KeyRule("output_dir", "output.runs", as_text, why={"*": "a run gets its own folder in it"}),
    KeyRule("logging_dir", "output.profiles", as_text),
    KeyRule("log_tracker_name", "tracking.wandb_project", as_text),
    KeyRule("torch_compile", "speed.compile", boolean),
)
