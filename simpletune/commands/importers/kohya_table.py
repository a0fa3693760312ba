"""Options of kohya's scripts with a direct counterpart here, and their defaults."""

from __future__ import annotations

from simpletune.commands.importers.translation import Row, boolean, number, text, whole_number

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
    Row("pretrained_model_name_or_path", "model.pretrained", text),
    Row("vae", "model.vae", text),
    Row("t5xxl_max_token_length", "model.t5_length", whole_number),
    Row("gradient_accumulation_steps", "train.gradient_accumulation", whole_number),
    Row("seed", "train.seed", whole_number),
    Row("scale_weight_norms", "adapter.max_norm", number),
    Row("min_snr_gamma", "objective.min_snr_gamma", number),
    Row("noise_offset", "objective.offset_noise", number),
    Row("zero_terminal_snr", "objective.zero_terminal_snr", boolean),
    Row("save_every_n_steps", "checkpoint.every", whole_number),
    Row("sample_every_n_steps", "validation.every", whole_number),
    Row("output_dir", "output.runs", text, why={"*": "a run gets its own folder in it"}),
    Row("logging_dir", "output.profiles", text),
    Row("log_tracker_name", "tracking.wandb_project", text),
    Row("torch_compile", "speed.compile", boolean),
)
