"""``traffic``: bytes, launches and products of a training step by class of operation, counted without a GPU.

The step runs on fake tensors, as for a prediction, and the same recorder counts what a card would do. The fast tests
recount the small rows of the demo's model, the slow tests the others, so no change moves more bytes unnoticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from benchmarks import memory
from benchmarks.memory import BF16, FULL, NF4, PLAN
from benchmarks.predicted_seconds import config_of
from benchmarks.table import Results, describe_machine
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.timing.datasheet import DatasheetSpeeds
from simpletune.estimate.timing.sections import KernelWork, StreamWork
from simpletune.estimate.timing.speeds import ITEM, SCALES
from simpletune.estimate.timing.timeline import step_seconds
from simpletune.system.gpus import find_card
from simpletune.system.options import Json

CARD = find_card("L4")
PRODUCTS, ATTENTION, COPIES = "products", "attention", "copies"
CLASSES = {
    "product_tn": PRODUCTS, "product_nn": PRODUCTS, "product_nt": PRODUCTS, "int8_product": PRODUCTS,
    "int8_gradient": PRODUCTS, "convolution": PRODUCTS, "convolution_input": PRODUCTS, "convolution_weight": PRODUCTS,
    "attention": ATTENTION, "attention_backward": ATTENTION, "unpack_int8": "unpacking", "unpack_nf4": "unpacking",
    "int8_rows": "quantising", "norm": "norms", "norm_backward": "norms", "gelu": "gelu", "gelu_backward": "gelu",
    "normal": "random", "to_device": COPIES, "to_host": COPIES,
}  # fmt: skip
"""The class of each kind of work (``work.Work``); others are element-wise."""
ELEMENTWISE = "element-wise"
COUNTED = (ELEMENTWISE, "norms", "gelu", "unpacking", "quantising", "random")
"""Classes whose bytes are the step's traffic: neither products, which take their operations' time, nor copies between
host and device."""
LORA = ("precision.weights=int8", *PLAN)
INT8 = ("precision.products=int8",)
SMALL = ("precision.compute=bf16", "memory.checkpointing=all", "memory.modulation=resident")
BASES: dict[str, tuple[str, ...]] = {
    "bf16": BF16, "int8": (), "int8 products": INT8,
    "int8 products and gradients": (*INT8, "precision.input_gradient=int8"),
    "nf4": NF4,
}  # fmt: skip
DEMO = "demo, "  # rows for the tests
FULL_BF16 = (*FULL, "optimizer.name=adamw_bf16")
ROWS: dict[str, tuple[Path, tuple[str, ...]]] = {
    **{f"LoRA r16, {name}": (memory.CONFIG, (*LORA, *base)) for name, base in BASES.items()},
    "full bf16, adamw_bf16 in backward": (memory.CONFIG, FULL_BF16),
    "full bf16, adamw8bit in backward": (memory.CONFIG, FULL),
    **{f"{DEMO}{name}": (Path("demo"), (*LORA, *SMALL, *base)) for name, base in BASES.items()},
    f"{DEMO}full, adamw_bf16 in backward": (Path("demo"), (*FULL_BF16, *SMALL)),
}
COLUMNS = {
    "what": "", "gb": "GB", "of_bf16": "of bf16's", **{name: name for name in COUNTED}, "launches": "launches",
    "products": "products", "tflop": "TFLOP", "seconds": "predicted, s",
}  # fmt: skip
ABOUT = f"""\
One training step of SD3 Medium at 1024 px, batch 1, with all blocks checkpointed, counted on fake tensors and predicted
for an {CARD.name} by its stated figures; nothing ran on a card. *GB*: bytes that operations other than products,
attention and copies between host and device read and write, each element once, without credit for caches; the next
columns are parts of it. For bitsandbytes' update only reads count, 10 of 16 bytes per parameter. *of bf16's*:
relative to the LoRA step with a bf16 base. *launches*: of all kernels. *products*: matrix products and convolutions,
and their operations. LoRA rows use the modulation plan and adamw."""


def counted(sections: Iterable[StreamWork]) -> Json:
    """Count a step's bytes and launches by class, and its products' operations.

    Args:
        sections: of a recorded step.
    """
    moved: dict[str, float] = defaultdict(float)
    launches: dict[str, float] = defaultdict(float)
    operations = 0.0
    for section in sections:
        for work, count in section.work.items():
            name, times = CLASSES.get(work.kind, ELEMENTWISE), section.share * count
            if work.kind == "bias":  # a part of the product's kernel
                continue
            launches[name] += times * launches_of(work)
            moved[name] += times * bytes_of(work, name)
            operations += times * (operations_of(work) if name == PRODUCTS else 0)
    return {"bytes": dict(moved), "launches": dict(launches), "operations": operations}


def launches_of(work: KernelWork) -> int:
    """Kernels that an operation launches; one on a list of tensors launches one per few dozen tensors."""
    return max(1, round(work.extents[0] / SCALES)) if work.kind == "each" else 1


def bytes_of(work: KernelWork, name: str) -> int:
    """Bytes read and written; for products and attention, those of operands and results."""
    if name == ATTENTION:
        heads, queries, keys, width = work.extents
        tensors = 2 * heads * width * (queries + keys) * ITEM[work.dtype]
        return tensors * (2 if work.kind == "attention_backward" else 1)
    if name != PRODUCTS:
        return work.extents[-1]
    if work.kind.startswith("convolution"):
        pixels, inputs, outputs = work.extents
        return ITEM[work.dtype] * (pixels * (inputs + outputs) + 9 * inputs * outputs)
    m, n, k = work.extents
    return (m * k + n * k) * (1 if work.kind.startswith("int8") else ITEM[work.dtype]) + m * n * ITEM[work.dtype]


def operations_of(work: KernelWork) -> int:
    """Multiplications and additions of a product."""
    m, n, k = work.extents
    return 2 * m * n * k * (9 if work.kind.startswith("convolution") else 1)


def measure(file: Path, overrides: tuple[str, ...]) -> Json:
    """Count one row."""
    config = config_of(file, (*overrides, "data.path=demo:pictures", "schedule.warmup_steps=0"), CARD)
    sections = simulate(config, capability=CARD.capability).sections
    found = counted(sections)
    return {
        **found,
        "gb": sum(found["bytes"].get(name, 0) for name in COUNTED) / 1e9,
        "seconds": step_seconds(sections, DatasheetSpeeds(CARD)).seconds,
    }


def run(folder: Path, minutes: float, only: str) -> Path:
    """Count missing rows and write their table."""
    results = Results(folder / "traffic", COLUMNS)
    rows = {name: partial(measure, *row) for name, row in ROWS.items()}
    results.measure(rows, minutes, only, lambda row: f"{row['gb']:.1f} GB, {row['seconds']:.3f} s")
    shown = Results(folder / "traffic", COLUMNS)
    base = results.rows.get("LoRA r16, bf16")
    known = [name for name in ROWS if name in results.rows and not name.startswith(DEMO)]
    shown.rows = {name: as_shown(results.rows[name], base) for name in known}
    return shown.write_table("Bytes, launches and products of a step", ABOUT, describe_machine())


def as_shown(row: Json, base: Json | None) -> Json:
    """The cells of a row.

    Args:
        row: counted.
        base: the row to compare with, if it has been counted.
    """
    return {
        **{name: row["bytes"].get(name, 0) / 1e9 for name in COUNTED},
        "gb": row["gb"],
        "of_bf16": row["gb"] / base["gb"] if base else None,
        "launches": round(sum(row["launches"].values())),
        "products": round(row["launches"][PRODUCTS]),
        "tflop": row["operations"] / 1e12,
        "seconds": row["seconds"],
    }
