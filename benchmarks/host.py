"""``host``: processor seconds that a training step costs the host, beside the same step by diffusers and peft.

torch's CUDA build runs over a stub of the CUDA runtime (tests/gpu/dry_gpu): kernels do nothing, and Python, dispatcher,
autograd and Triton's launchers are the real ones, so what is left of a step is the host's part.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.dry import LAUNCHER
from benchmarks.dry_rows import UNCHECKED, UNET, XL
from benchmarks.memory import BF16, NF4, PLAN, config_of
from benchmarks.table import Results, describe_machine
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.timing.datasheet import HOST
from simpletune.system.options import Json, UserError

STEPS = 25
PRODUCTS = ("precision.products=int8", "precision.input_gradient=int8")
OURS = {"bf16": BF16, "int8": (), "nf4": NF4, "int8_products": PRODUCTS}  # contenders whose steps are predicted
STEPPED = OURS | {"plan": PLAN}  # and those that are only measured
REPLAYED = {f"{name}_graphs": (*STEPPED[name], "speed.graphs=true") for name in ("bf16", "int8", "nf4", "plan")}
STEPPED |= REPLAYED  # passes replayed as CUDA graphs
THEIRS = ("diffusers", "diffusers_fp32")
TOWARDS = 0.1  # how strongly a fit is drawn to the constants it replaces, which few rows separate
CONTENDERS = {
    "bf16": "bf16", "bf16_graphs": "bf16 replayed", "int8": "int8", "int8_graphs": "int8 replayed", "nf4": "nf4",
    "nf4_graphs": "nf4 replayed", "plan": "int8 with the plan", "plan_graphs": "the same replayed",
    "int8_products": "int8 products", "diffusers": "diffusers + peft", "diffusers_fp32": "the same, fp32 LoRA",
}  # fmt: skip
CAUSES = {
    "lora": "LoRA layers", "recompute": "second passes", "operators": "own operators",
    "launch": "Triton launches", "optimizer": "clipping, optimizer", "rest": "all else",
}  # fmt: skip
COLUMNS = {
    "what": "", **{name: f"{title}, s" for name, title in CONTENDERS.items()}, "ratio": "bf16 / fp32 LoRA",
    "int8_ratio": "int8 / bf16", **{name: f"{title}, s" for name, title in CAUSES.items()}, "launches": "launches",
}  # fmt: skip
ABOUT = f"""\
Processor seconds of a step on the host, the smallest of {STEPS}, of two measurements on 30 November 2026 where the step
was the same; batch 1, SD3 Medium at 1024 px with rank 16, SD 1.5
at 512 px with rank 8, SDXL at 1024 px with rank 16 and with LoKr of factor 12, on attention. No hardware: torch's CUDA
build over a stub of the CUDA runtime, on which kernels take no time. The driver's part of a launch is not in it (2 to
3 us each on a real one), nor is cuDNN's of a convolution. All contenders take their steps in turn in one process. *int8
products*: the input's gradient in int8, too. *Replayed*: with `speed.graphs=true`, without the driver's part of a
graph's launch; [nodes and memory](../dry-h100/graphs.md). *diffusers + peft*: the model of diffusers in bf16 under
autocast, PEFT's LoRA in bf16 as diffusers' examples leave it, or in fp32 as ours is, AdamW, clipping. The
causes are of the bf16 row with timers in it, each without those within it; *LoRA layers* include the products with
their frozen weights, *second passes* are the recomputation of checkpointed blocks and its books, *all else* is mostly
torch and diffusers.
*Launches*: of torch's own kernels and Triton's, without cuBLAS's."""
PLAIN = ("bf16", "int8", *THEIRS)


@dataclass(frozen=True)
class Row:
    """A model, whether its blocks are checkpointed, and who takes its steps."""

    overrides: tuple[str, ...] = ()
    contenders: tuple[str, ...] = PLAIN

    @property
    def checkpoints(self) -> bool:
        return UNCHECKED[0] not in self.overrides


CHECKED = ("memory.checkpointing=all",)
LOKR = ("adapter.method=lokr", "adapter.factor=12", "adapter.targets=attention")
ROWS = {
    "SD3 Medium, checkpointed": Row((), (*STEPPED, *THEIRS)),
    "SD3 Medium, not checkpointed": Row(UNCHECKED, (*PLAIN, "bf16_graphs")),
    "SD 1.5, checkpointed": Row(UNET),
    "SD 1.5, not checkpointed": Row((*UNET, *UNCHECKED), (*PLAIN, "bf16_graphs")),
    "SDXL, checkpointed": Row((*XL, *CHECKED), ("bf16", "bf16_graphs", "int8")),
    "SDXL, not checkpointed": Row((*XL, *UNCHECKED), ("bf16", "int8")),
    "SDXL LoKr, not checkpointed": Row((*XL, *LOKR, *UNCHECKED), ("bf16", "bf16_graphs")),
}


def overrides_of(row: Row, contender: str) -> tuple[str, ...]:
    """Overrides of the memory grid's baseline, which is int8; others' steps are in bf16."""
    return (*row.overrides, *STEPPED.get(contender, BF16))


def run(folder: Path, minutes: float, only: str = "") -> Path:
    """Measure the missing rows, each in a process of its own.

    Raises:
        UserError: the simulated card cannot be started, or measured nothing.
    """
    results = Results(folder / "host", COLUMNS)
    rows = {name: partial(measure, row) for name, row in ROWS.items()}
    results.measure(rows, minutes, only, lambda row: f"{row['bf16']:.3f} s")
    versions: Mapping[str, str] = next((row["versions"] for row in results.rows.values()), {})
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    return results.write_table("The host's part of a step", ABOUT, {**describe_machine(), "versions on it": said})


def measure(row: Row) -> Json:
    """Measure a row on a simulated card, and count the tasks in it."""
    ours = [each for each in row.contenders if each in OURS]
    return compared(measured(row)) | {"tasks": {each: tasks_of(overrides_of(row, each)) for each in ours}}


def tasks_of(overrides: tuple[str, ...]) -> dict[str, float]:
    """Count the host's tasks in a row's step, as a prediction does."""
    found: Counter[str] = Counter()
    for section in simulate(config_of(overrides), capability=(8, 9)).sections:
        found.update({task: section.share * count for task, count in section.host.items()})
    return dict(found)


def fitted(rows: Iterable[Json]) -> dict[str, float]:
    """Fit the host's seconds for each task to measured steps: least squares of the relative errors, none negative,
    drawn towards the present constants."""
    steps = [(tasks, row[each]) for row in rows for each, tasks in row["tasks"].items()]
    shares = np.array([[tasks.get(name, 0) * HOST[name] / seconds for name in HOST] for tasks, seconds in steps])
    normal = shares.T @ shares + TOWARDS**2 * np.eye(len(HOST))
    wanted, factors = shares.sum(0) + TOWARDS**2, np.ones(len(HOST))
    for _ in range(1000):  # Gauss and Seidel's, clipped
        for at in range(len(factors)):
            rest = normal[at] @ factors - normal[at, at] * factors[at]
            factors[at] = max(0.0, (wanted[at] - rest) / normal[at, at])
    return {name: float(f"{factor * HOST[name]:.2g}") for name, factor in zip(HOST, factors, strict=True)}


def measured(row: Row) -> Json:
    """Run a row's process on a simulated card."""
    given = json.dumps([row.overrides, row.contenders])
    command = [LAUNCHER, "python", "-m", "benchmarks.host_row", given]
    env = os.environ | {"DRY_GIB": "79", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        raise UserError("host: the simulated card measured nothing. See its messages above; make dry prepares it")
    result: Json = json.loads(found[-1])
    return result


def compared(row: Json) -> Json:
    """Add the ratios of a row, of those that took its steps."""
    pairs = {"ratio": ("bf16", "diffusers_fp32"), "int8_ratio": ("int8", "bf16")}
    found = {name: round(row[a] / row[b], 2) for name, (a, b) in pairs.items() if a in row and b in row}
    return row | found
