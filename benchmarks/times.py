"""``times``: predicted and measured seconds of a step on the CPU, for the trainer's own step on random weights.

Each measured step runs between two runs of a fixed reference load, and the ratio is compared, because other programs on
the machine slow both down.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.table import Results, describe_machine
from simpletune.commands.doctor.bench_steps import random_steps
from simpletune.config.load import read_config
from simpletune.config.modulation import settle_modulation
from simpletune.config.resolve import resolve_data_folder, resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import SHIPPED
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.timing.constants import Constants, constants_file, read_constants
from simpletune.estimate.timing.recorder import Recorder
from simpletune.estimate.timing.speeds import CalibratedSpeeds
from simpletune.estimate.timing.stopwatch import CpuStopwatch, cpu_seconds
from simpletune.estimate.timing.timeline import step_seconds
from simpletune.system.console import say
from simpletune.system.options import Json

BASE = Path("configs/sd3_medium_lora_r16_int8.json")
COMMON = (
    "schedule.warmup_steps=0", "data.path=demo:pictures", "data.caption_dropout=0", "memory.modulation=resident",
    "validation.prompts=[]", "memory.checkpointing=none", "data.resolution=256", "device=cpu",
)  # fmt: skip
CPU = torch.device("cpu")
WARM_UP, STEPS = 2, 9
LARGER = {"num_layers": 6, "num_attention_heads": 6, "caption_projection_dim": 384}  # than the embedded model's
UNET = {
    "_class_name": "UNet2DConditionModel", "sample_size": 32, "in_channels": 4, "out_channels": 4,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3, "layers_per_block": 1,
    "block_out_channels": [64, 128, 256, 256], "attention_head_dim": 8, "cross_attention_dim": 96,
}  # fmt: skip
NOISE = {
    "_class_name": "DDIMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000, "prediction_type": "epsilon", "steps_offset": 1, "set_alpha_to_one": False,
}  # fmt: skip
FP32 = ("precision.weights=fp32", "precision.compute=fp32")
BF16, INT8, NF4 = ("precision.weights=bf16",), ("precision.weights=int8",), ("precision.weights=nf4",)
PRODUCTS = (*INT8, "precision.products=int8")
ALL, FULL = ("memory.checkpointing=all",), ("adapter.method=full",)
IN_BACKWARD = ("optimizer.name=adamw8bit", "memory.optimizer_in_backward=true", "train.clip=per_parameter")
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tiny SD3, LoRA int8": ("tiny", INT8),
    "tiny SD3, LoRA int8 products": ("tiny", PRODUCTS),
    "tiny SD3, LoRA nf4": ("tiny", NF4),
    "tiny SD3, LoRA bf16, batch 4": ("tiny", (*BF16, "train.batch_size=4")),
    "tiny SD3, LoRA fp32, 512 px": ("tiny", (*FP32, "data.resolution=512")),
    "tiny SD3, LoRA bf16, 512 px, checkpointing": ("tiny", (*BF16, *ALL, "data.resolution=512")),
    "tiny SD3, LoRA bf16, plan, batch 2": ("tiny", (*BF16, "memory.modulation=plan", "train.batch_size=2")),
    "tiny SD3, LoRA bf16, streamed": ("tiny", (*BF16, *ALL, "memory.resident_blocks=0")),
    "tiny SD3, LoRA fp32, 2 micro-batches": ("tiny", (*FP32, "train.gradient_accumulation=2")),
    "tiny SD3, LoRA r64 int8": ("tiny", (*INT8, "adapter.rank=64")),
    "tiny SD3, partial bf16": ("tiny", (*BF16, "adapter.method=partial", 'adapter.layers=["*attn*"]')),
    "tiny SD3, full fp32, batch 2": ("tiny", (*FULL, *FP32, "train.batch_size=2")),
    "tiny SD3, full bf16, adamw_bf16": ("tiny", (*FULL, *BF16, "optimizer.name=adamw_bf16")),
    "tiny SD3, full bf16, adamw8bit in backward": ("tiny", (*FULL, *BF16, *IN_BACKWARD)),
    "larger SD3, LoRA bf16": ("larger", BF16),
    "larger SD3, LoRA int8, checkpointing": ("larger", (*INT8, *ALL)),
    "larger SD3, LoRA fp32, 128 px, batch 2": ("larger", (*FP32, "data.resolution=128", "train.batch_size=2")),
    "larger SD3, LoRA nf4": ("larger", NF4),
    "larger SD3, full bf16": ("larger", (*FULL, *BF16)),
    "U-Net, LoRA fp32": ("unet", FP32),
    "U-Net, LoRA bf16, batch 2": ("unet", (*BF16, "train.batch_size=2")),
    "U-Net, LoRA int8": ("unet", INT8),
    "U-Net, LoRA bf16, 512 px, checkpointing": ("unet", (*BF16, *ALL, "data.resolution=512")),
    "U-Net, full fp32": ("unet", (*FULL, *FP32)),
}
COLUMNS = {
    "what": "", "predicted": "predicted, s", "measured": "measured, s", "error": "error, %", "spread": "spread, %",
    "host": "host's part, s", "bound": "bound by",
}  # fmt: skip
ABOUT = """\
Steps of the trainer on random latents and weights, on one thread of a shared machine. *Predicted* follows from the
operations of a simulated step and the constants that `simpletune calibrate --device cpu` measured on the same machine
({calibrated}). *Measured*: the median of {steps} steps, each in
units of a fixed reference load that ran just before and after it, times that load's seconds during calibration; seconds
are those that the thread ran. *Spread*: half the distance between the quartiles. Median error {median:.1f}%, worst
{worst:.1f}%. No constant was fitted to these rows. The first run of the table (median 11.4%, worst 75.2%) showed
mistakes: unmeasured points of a grid took the slowest neighbour's rate, casts were looked up the wrong way
round, square roots were timed on negative numbers, and 8-bit updates were not timed. They were corrected, these two
kinds were timed, and the predictions were repeated for the same measurements."""


def run(folder: Path, minutes: float, only: str = "", calibration: Path | None = None) -> Path:
    """Predict and measure the rows that are missing, until the time is up.

    Args:
        folder: for the results.
        minutes: start no row after this many.
        only: text that row names must contain.
        calibration: file of this machine's constants; None: the one in the cache.

    Returns:
        The Markdown table.
    """
    from simpletune.system.environment import cpu_name

    constants = read_constants(
        calibration or constants_file(Path(".cache"), cpu_name(), torch.get_num_threads(), "cpu")
    )
    results, speeds = Results(folder / "times", COLUMNS), CalibratedSpeeds(constants)
    with tempfile.TemporaryDirectory() as models:
        for name, (model, overrides) in results.missing(ROWS, minutes, only):
            config = config_of(Path(models), model, overrides)
            found = {**predicted(config, speeds), **measured(config, constants)}
            found["error"] = round(100 * (found["predicted"] / found["measured"] - 1), 1)
            results.add(
                name, {key: round(value, 5) if isinstance(value, float) else value for key, value in found.items()}
            )
            say(
                f"bench   {name}: {found['predicted']:.4f} s predicted, {found['measured']:.4f} measured, "
                f"{found['error']:+.1f}%"
            )
    errors = [abs(row["error"]) for row in results.rows.values()] or [0.0]
    about = ABOUT.format(
        calibrated=f"{constants.date}, {constants.device}",
        steps=STEPS,
        median=statistics.median(errors),
        worst=max(errors),
    )
    return results.write_table("Predicted seconds of a step", about, describe_machine())


def config_of(models: Path, model: str, overrides: tuple[str, ...]) -> TrainConfig:
    """Return a row's configuration; only the configurations of its model exist, since weights are random."""
    own: tuple[str, ...] = ("model.pretrained=demo:tiny-sd3", "model.t5_length=77")
    base = BASE
    if model == "larger":
        own = (f"model.pretrained={larger(models)}", "model.t5_length=77")
    elif model == "unet":
        base, own = Path("configs/sd15_lora.json"), (f"model.pretrained={unet(models)}",)
    config = read_config(base, [*COMMON, *own, *overrides], needs_model=False)[0]
    return settle_modulation(resolve_data_folder(resolve_model_folder(config)), on_host=False)


def larger(models: Path) -> Path:
    """The tiny SD3's configurations with more and wider blocks."""
    folder = models / "larger"
    if not folder.exists():
        shutil.copytree(SHIPPED, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        file = folder / "transformer" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | LARGER))
    return folder


def unet(models: Path) -> Path:
    """The configurations of a small U-Net."""
    folder = models / "unet"
    for part, content in (("unet/config", UNET), ("scheduler/scheduler_config", NOISE)):
        file = folder / f"{part}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    return folder


def predicted(config: TrainConfig, speeds: CalibratedSpeeds) -> Json:
    """Predict a step from its simulation."""
    recorder = Recorder(cuda=False)
    simulate(config, recorder=recorder)
    seconds = step_seconds(recorder.sections, speeds)
    return {"predicted": seconds.seconds, "host": seconds.host, "bound": seconds.bound}


def measured(config: TrainConfig, constants: Constants) -> Json:
    """Time steps in units of the reference load."""
    watch = CpuStopwatch()
    with random_steps(config, CPU) as steps:
        for _ in range(WARM_UP):
            steps.step()
        ratios = watch.ratios(lambda: cpu_seconds(steps.step), STEPS)
    seconds = constants.rates["reference_seconds"]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"measured": middle * seconds, "spread": round(100 * (high - low) / 2 / middle, 1)}
