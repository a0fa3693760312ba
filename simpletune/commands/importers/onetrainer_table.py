"""OneTrainer's keys with a direct counterpart here, its defaults, and its terms."""

from __future__ import annotations

from simpletune.commands.importers.translation import KeyRule, as_text, boolean, number, whole_number

KEYS = {
    "training_method",
    "model_type",
    "base_model_name",
    "concept_file_name",
    "learning_rate_warmup_steps",
    "timestep_distribution",
    "output_model_destination",
    "peft_type",
    "sample_definition_file_name",
}
DEFAULTS = {
    "training_method": "FINE_TUNE", "model_type": "STABLE_DIFFUSION_15", "learning_rate": 3e-6,
    "learning_rate_scheduler": "CONSTANT", "learning_rate_warmup_steps": 200.0, "epochs": 100, "batch_size": 1,
    "gradient_accumulation_steps": 1, "clip_grad_norm": 1.0, "train_dtype": "FLOAT_16", "peft_type": "LORA",
    "lora_rank": 16, "lora_alpha": 1.0, "lora_weight_dtype": "FLOAT_32", "timestep_distribution": "UNIFORM",
    "timestep_shift": 1.0, "ema": "OFF", "layer_filter_preset": "full",
}  # fmt: skip
MODELS = {
    "STABLE_DIFFUSION_3": ("sd3", ""), "STABLE_DIFFUSION_35": ("sd3", ""), "STABLE_DIFFUSION_15": ("sd15", ""),
    "STABLE_DIFFUSION_20_BASE": ("sd15", ""), "STABLE_DIFFUSION_20": ("sd15", ""),
    "STABLE_DIFFUSION_21_BASE": ("sd15", ""), "STABLE_DIFFUSION_21": ("sd15", ""),
}  # fmt: skip
WEIGHTS = {
    "BFLOAT_16": "bf16",
    "FLOAT_16": "bf16",
    "FLOAT_32": "fp32",
    "TFLOAT_32": "fp32",
    "INT_8": "int8",
    "INT_W8A8": "int8",
    "FLOAT_8": "int8",
    "FLOAT_W8A8": "int8",
    "NFLOAT_4": "nf4",
}
WHY = {
    "FLOAT_16": "16 bits in the compute type",
    "TFLOAT_32": "fp32",
    "FLOAT_8": "int8 weights take as many bytes, with a smaller error",
    "FLOAT_W8A8": "int8 weights and products",
}
COMPUTE = {"BFLOAT_16": "bf16", "FLOAT_16": "fp16", "FLOAT_32": "fp32", "TFLOAT_32": "fp32"}
METHODS = {"LORA": "lora", "LOHA": "loha", "LOKR": "lokr", "OFT_2": "oft", "OFT": "oft"}
TARGETS = {"full": "all_linear", "attn-mlp": "attention_mlp", "attn-only": "attention", "attention": "attention"}
BLOCKS = 24

ROWS = (
    KeyRule("base_model_name", "model.pretrained", as_text),
    KeyRule("learning_rate", "optimizer.lr", number),
    KeyRule("batch_size", "train.batch_size", whole_number),
    KeyRule("gradient_accumulation_steps", "train.gradient_accumulation", whole_number),
    KeyRule("train_dtype", "precision.compute", as_text, {key.lower(): value for key, value in COMPUTE.items()}),
    KeyRule("offset_noise_weight", "objective.offset_noise", number),
    KeyRule("rescale_noise_scheduler_to_zero_terminal_snr", "objective.zero_terminal_snr", boolean),
    KeyRule("text_encoder_3_sequence_length", "model.t5_length", whole_number),
    KeyRule("tensorboard", "tracking.tensorboard", boolean),
    KeyRule("compile", "speed.compile", boolean),
    KeyRule(
        "attention_mechanism",
        "speed.attention",
        as_text,
        {"sdp": "auto", "default": "auto"},
        otherwise=("auto", "PyTorch chooses its kernel here"),
    ),
    KeyRule("cache_dir", "output.cache", as_text),
    KeyRule(
        "train_device", "device", as_text, {"cuda": "cuda", "cpu": "cpu"}, otherwise=("auto", "the one NVIDIA card")
    ),
)
