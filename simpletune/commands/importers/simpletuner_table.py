"""SimpleTuner's keys with a direct counterpart here, its defaults, and the names of its models."""

from __future__ import annotations

from simpletune.commands.importers.translation import KeyRule, as_text, boolean, number, whole_number
from simpletune.models.sd3.files import SD3_MEDIUM, SD35_LARGE, SD35_MEDIUM

KEYS = {
    "model_family",
    "base_model_precision",
    "data_backend_config",
    "lora_type",
    "flow_schedule_shift",
    "checkpointing_steps",
    "checkpoint_step_interval",
    "validation_guidance",
    "aspect_bucket_rounding",
}
DEFAULTS = {
    "lora_rank": 16, "base_model_precision": "no_change", "max_grad_norm": 2.0, "grad_clip_method": "value",
    "caption_dropout_probability": 0.1, "flow_schedule_shift": 3.0, "tokenizer_max_length": 154,
    "resolution": 1024.0, "resolution_type": "pixel_area",
}  # fmt: skip
POLYNOMIAL = {"lr_power": 0.8, "lr_end": 4e-7}  # defaults of that schedule
BLOCKS = {SD35_LARGE: 38}  # blocks of the transformer; SD3 Medium and 3.5 Medium have 24
FLAVOURS = {
    "medium": SD35_MEDIUM,
    "3.5-medium": SD35_MEDIUM,
    "3.5-large": SD35_LARGE,
    "large": SD35_LARGE,
    "3.0-medium": SD3_MEDIUM,
    "sd3-medium": SD3_MEDIUM,
}
FP8 = "int8 weights take as many bytes, with a smaller error"

ROWS = (
    KeyRule("model_family", "model.family", as_text, {"sd3": "sd3", "sd1x": "sd15", "sd2x": "sd15"},
        {"sd2x": "SD 2 is read by the family of SD 1.5"}),
    KeyRule("pretrained_model_name_or_path", "model.pretrained", as_text),
    KeyRule("pretrained_transformer_model_name_or_path", "model.transformer", as_text),
    KeyRule("pretrained_unet_model_name_or_path", "model.unet", as_text),
    KeyRule("pretrained_vae_model_name_or_path", "model.vae", as_text),
    KeyRule("revision", "model.revision", as_text),
    KeyRule("base_model_precision", "precision.weights", as_text,
        {"no_change": "bf16", "int8-quanto": "int8-quanto", "int8-torchao": "int8", "int8-sdnq": "int8",
         "int4-quanto": "nf4", "int2-quanto": "nf4", "nf4-bnb": "nf4", "bnb-nf4": "nf4", "fp8-quanto": "int8",
         "fp8uz-quanto": "int8", "fp8-torchao": "int8", "fp8-sdnq": "int8"},
        {"int8-torchao": "simpletune's own int8 layers", "int8-sdnq": "simpletune's own int8 layers",
         "int4-quanto": "another 4-bit format", "int2-quanto": "2 bits become 4", "fp8-quanto": FP8,
         "fp8uz-quanto": FP8, "fp8-torchao": FP8, "fp8-sdnq": FP8}),
    KeyRule("mixed_precision", "precision.compute", as_text,
        {"bf16": "bf16", "fp16": "fp16", "no": "fp32", "fp32": "fp32"},
        otherwise=("auto", "simpletune does not multiply in fp8")),
    KeyRule("learning_rate", "optimizer.lr", number),
    KeyRule("train_batch_size", "train.batch_size", whole_number),
    KeyRule("gradient_accumulation_steps", "train.gradient_accumulation", whole_number),
    KeyRule("seed", "train.seed", whole_number),
    KeyRule("tokenizer_max_length", "model.t5_length", whole_number),
    KeyRule("snr_gamma", "objective.min_snr_gamma", number),
    KeyRule("noise_offset", "objective.offset_noise", number),
    KeyRule("rescale_betas_zero_snr", "objective.zero_terminal_snr", boolean),
    KeyRule("prediction_type", "objective.prediction", as_text, {"epsilon": "epsilon", "v_prediction": "v"}),
    KeyRule("validation_prompt", "validation.prompts", lambda value: [as_text(value)]),  # type: ignore[arg-type, return-value]
    KeyRule("validation_negative_prompt", "validation.negative_prompt", as_text),
    KeyRule("validation_steps", "validation.every", whole_number),
    KeyRule("validation_step_interval", "validation.every", whole_number),
    KeyRule("validation_seed", "validation.seed", whole_number),
    KeyRule("validation_guidance", "validation.guidance", number),
    KeyRule("validation_num_inference_steps", "validation.steps", whole_number),
    KeyRule("num_eval_images", "validation.loss_samples", whole_number),
    KeyRule("checkpointing_steps", "checkpoint.every", whole_number),
    KeyRule("checkpoint_step_interval", "checkpoint.every", whole_number),
    KeyRule("checkpoints_total_limit", "checkpoint.keep_last", whole_number),
    KeyRule("attention_mechanism", "speed.attention", as_text, {"diffusers": "auto", "sdpa": "auto"},
        otherwise=("auto", "PyTorch chooses its kernel here")),
    KeyRule("tracker_project_name", "tracking.wandb_project", as_text),
    KeyRule("profiler_output_dir", "output.profiles", as_text),
)  # fmt: skip
LORA = (
    KeyRule("lora_rank", "adapter.rank", whole_number),
    KeyRule("lora_alpha", "adapter.alpha", number),
    KeyRule("lora_dropout", "adapter.dropout", number),
)
