"""The rows of ``speed`` as overrides of one configuration, and the table's texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from simpletune.engine.profiling.figures import KINDS

CONFIG = Path("configs/more/sd3_medium_lora_r16_int8.json")
ENOUGH = (
    "schedule.warmup_steps=0", "data.path=demo:pictures", "data.caption_dropout=0", "memory.modulation=resident",
)  # fmt: skip
DEMO = (
    "model.pretrained=demo:tiny-sd3", "model.t5_length=77", "validation.prompts=[]", "data.resolution=256",
    "memory.checkpointing=none",
)  # fmt: skip
BF16, FP32 = ("precision.weights=bf16",), ("precision.weights=fp32", "precision.compute=bf16")
INT8, NF4, QUANTO = ("precision.weights=int8",), ("precision.weights=nf4",), ("precision.weights=int8-quanto",)
PRODUCTS = (*INT8, "precision.products=int8")
INPUT_GRADIENT = (*PRODUCTS, "precision.input_gradient=int8")
COMPILE = ("speed.compile=true",)
PLAN = ("memory.modulation=plan",)
OPEN = ("memory.checkpointing=none",)
ALL = ("memory.checkpointing=all",)
BATCH4, PX512 = ("train.batch_size=4",), ("data.resolution=512",)
FULL = ("adapter.method=full",)
IN_BACKWARD = ("optimizer.name=adamw8bit", "memory.optimizer_in_backward=true", "train.clip=per_parameter")


@dataclass(frozen=True)
class Row:
    """One job.

    Args:
        overrides: for the configuration.
        beside: the diffusers row with equal settings; for a diffusers row, its own name.
    """

    overrides: tuple[str, ...]
    beside: str | None = None


def grid() -> dict[str, Row]:
    """List the rows of SD3 Medium at its real size: diffusers, then ours with equal settings; at most 31 rows."""
    rows: dict[str, Row] = {}
    sizes = {"1024 px": (), "1024 px, batch 4": BATCH4, "512 px": PX512, "512 px, batch 4": (*PX512, *BATCH4)}
    for title, size in sizes.items():
        yardstick = f"diffusers, LoRA, {title}"
        rows[yardstick] = Row((*BF16, *ALL, *size), yardstick)
        for name, options in {"bf16": BF16, "int8": INT8, "int8 products": PRODUCTS}.items():
            rows[f"LoRA {name}, {title}"] = Row((*options, *ALL, *size), yardstick)
    first = "diffusers, LoRA, 1024 px"
    more = {
        "int8 products, int8 input gradient": INPUT_GRADIENT, "int8-quanto": QUANTO, "nf4": NF4,
        "bf16, compiled": (*BF16, *COMPILE), "int8 products, compiled, plan": (*PRODUCTS, *COMPILE, *PLAN),
        "bf16, plan": (*BF16, *PLAN),
    }  # fmt: skip
    rows |= {f"LoRA {name}, 1024 px": Row((*ALL, *options), first) for name, options in more.items()}
    yardstick = "diffusers, LoRA, 1024 px, no checkpointing"
    rows[yardstick] = Row((*BF16, *OPEN), yardstick)
    for name, options in {"bf16": BF16, "int8": INT8}.items():
        rows[f"LoRA {name}, 1024 px, no checkpointing"] = Row((*options, *OPEN), yardstick)
    yardstick = "diffusers, full, 1024 px"
    rows[yardstick] = Row((*FULL, *FP32, *ALL), yardstick)
    rows["full fp32 weights, 1024 px"] = Row((*FULL, *FP32, *ALL), yardstick)
    rows["full bf16, 1024 px"] = Row((*FULL, *BF16, *ALL), yardstick)
    rows["full bf16, adamw8bit in backward, 1024 px"] = Row((*FULL, *BF16, *ALL, *IN_BACKWARD), yardstick)
    streamed = (*IN_BACKWARD, "memory.resident_blocks=0")
    rows["full bf16, adamw8bit in backward, streamed, 1024 px"] = Row((*FULL, *BF16, *ALL, *streamed), yardstick)
    rows["full bf16, 512 px, batch 4"] = Row((*FULL, *BF16, *ALL, *PX512, *BATCH4))
    return rows


def demo_grid() -> dict[str, Row]:
    """List the rows of the tiny model at 256 px, for a machine without a GPU."""
    first, second, third = "diffusers, LoRA", "diffusers, LoRA, checkpointing", "diffusers, full"
    rows = {
        first: Row((*DEMO, *BF16), first),
        "LoRA bf16": Row((*DEMO, *BF16), first),
        "LoRA int8": Row((*DEMO, *INT8), first),
        "LoRA int8 products": Row((*DEMO, *PRODUCTS), first),
        "LoRA int8-quanto": Row((*DEMO, *QUANTO), first),
        "LoRA bf16, compiled": Row((*DEMO, *BF16, *COMPILE), first),
        "LoRA bf16, plan": Row((*DEMO, *BF16, *PLAN), first),
        second: Row((*DEMO, *BF16, *ALL), second),
        "LoRA bf16, checkpointing": Row((*DEMO, *BF16, *ALL), second),
        third: Row((*DEMO, *FULL, *FP32), third),
        "full fp32 weights": Row((*DEMO, *FULL, *FP32), third),
        "full bf16": Row((*DEMO, *FULL, *BF16), third),
    }
    return rows


ROOFLINE = "What this device does at best"
RATES = {"what": "", "rate": "measured", "unit": ""}
COLUMNS = {
    "what": "", "seconds_per_step": "s/step", "samples_per_second": "samples/s", "tflops": "TFLOP/s", "mfu": "MFU",
    "of_measured": "of the measured rate", "floor": "floor, s", "times_floor": "times the floor",
    "times_diffusers": "times diffusers' s/step", "peak_mib": "peak, MiB", **{kind: kind for kind in KINDS},
    "note": "",
}  # fmt: skip
ABOUT = """\
{model}, random weights, LoRA r16 on attention or all weights, AdamW, {setting}, unless a row
says otherwise. Ours is the trainer's own step on random latents; *diffusers* is its DreamBooth recipe, which encodes
the pictures in each step. Median seconds without warm-up. *TFLOP/s* counts the model's operations, without
recomputation by checkpointing; *MFU*: share of the vendor's peak; *of the measured rate*: share of the rate below.
*Floor*: all products at the measured rates, or weights and optimizer state at the measured bandwidth, whichever takes
longer. Peaks are the device's (`max_memory_allocated`), or without a device the process's. The last columns are shares
of one profiled step. docs/explanation/measurements.md explains each figure."""
