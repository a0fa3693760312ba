"""``methods``: compare a training step of other adapters with LoRA's at SD3 Medium's width, in time and in memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks.table import Results, describe_machine
from simpletune.adapters.methods import Adapter
from simpletune.config.load import read_config
from simpletune.config.schema import TrainConfig
from simpletune.estimate.simulate.simulate import simulate
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.shared.weights import fill_model
from simpletune.stages.step.synthetic import CPU, SingleProcess, SyntheticBatches
from simpletune.stages.step.train_step import assemble
from simpletune.system.options import Json

LORA: Json = {"method": "lora", "rank": 16}
METHODS: dict[str, Json] = {
    "lokr, factor 16, rank 16": {"method": "lokr", "factor": 16, "rank": 16},
    "lokr, factor 16, whole": {"method": "lokr", "factor": 16, "rank": None},
    "lokr, factor 4, whole": {"method": "lokr", "factor": 4, "rank": None},
    "loha, rank 4": {"method": "loha", "rank": 4},
    "dora, rank 16": {"method": "dora", "rank": 16},
    "oft, blocks of 32": {"method": "oft"},
}
BLOCKS, WARM_UP, ROUNDS, SIZE, MIB = 2, 1, 9, 512, 2**20
SHIPPED = {"sd3_medium_lora_8gb": "all", "sd3_medium_lora_24gb": "none"}  # with this checkpointing
COLUMNS = {
    "what": "", "parameters": "parameters", "lora": "LoRA, s", "step": "s", "ratio": "ratio", "least": "least",
    "most": "most",
    **{key: text for name in SHIPPED for key, text in (
        (name, f"predicted peak, `{name}`, MiB"), (f"{name}_ratio", "to LoRA's"))},
}  # fmt: skip
ABOUT = f"""\
A training step of {BLOCKS} of SD3 Medium's blocks at their real size and random weights, bf16 base, attention targets,
{SIZE} px, batch 1, AdamW, no checkpointing, against LoRA of rank 16. Both alternate in one process; seconds are medians
of {ROUNDS} rounds, ratios are within a round. *Parameters* and *predicted peak* are for the whole model, in a
shipped configuration with another adapter, the first with `memory.checkpointing=all`; its LoRA also has rank 16.
The peak is predicted by running the step on fake tensors."""


def with_adapter(shipped: str, adapter: Json, *overrides: str) -> TrainConfig:
    """Read a shipped configuration and replace its adapter."""
    from pydantic import TypeAdapter

    config, _ = read_config(Path(shipped), list(overrides), needs_data=False, needs_model=False)
    return config.model_copy(update={"adapter": TypeAdapter(Adapter).validate_python(adapter)})


def stepper(adapter: Json) -> Callable[[], object]:
    """Assemble a few blocks with random weights and an adapter; return a function that takes a training step."""
    shapes = {**SD3().files.known_config(), "num_layers": BLOCKS}
    overrides = ["device=cpu", "precision.weights=bf16", f"data.resolution={SIZE}", "optimizer.name=adamw"]
    overrides += ["memory.checkpointing=none", "memory.modulation=resident"]
    config = with_adapter(list(SHIPPED)[-1], adapter, *overrides)
    config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"warmup_steps": 0})})
    model = fill_model(
        SD3().architecture.empty_model(shapes),
        SD3().architecture.random_tensors(shapes, 1),
        config.precision,
        CPU,
        lambda name: False,
        "step",
    )
    core = assemble(config, model, SingleProcess(CPU))
    batches = SyntheticBatches(config, core, (SIZE, SIZE)).step(0)
    return lambda: core.step(batches)


def measure(adapter: Json) -> dict[str, float]:
    """Measure one method and LoRA, alternating, and predict both peaks."""
    steps = {"lora": stepper(LORA), "step": stepper(adapter)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM_UP + ROUNDS):
        order = list(steps) if number % 2 else list(steps)[::-1]
        for name in order:
            clock = perf_counter()
            steps[name]()
            seconds[name].append(perf_counter() - clock)
    del steps
    kept = {name: values[WARM_UP:] for name, values in seconds.items()}
    ratios = [own / lora for own, lora in zip(kept["step"], kept["lora"], strict=True)]
    found = {name: statistics.median(values) for name, values in kept.items()}
    found |= {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    for shipped, blocks in SHIPPED.items():
        levers = f"memory.checkpointing={blocks}"
        lora, own = (simulate(with_adapter(shipped, each, levers)) for each in (LORA, adapter))
        found |= {shipped: own.peak.bytes / MIB, f"{shipped}_ratio": own.peak.bytes / lora.peak.bytes}
        found["parameters"] = sum(math.prod(shape) for shape in own.trained.values())
    return found


def run(folder: Path, minutes: float, only: str) -> Path:
    """Measure missing rows and write their table."""
    results = Results(folder / "methods", COLUMNS)
    rows = {name: partial(measure, adapter) for name, adapter in METHODS.items()}
    results.measure(rows, minutes, only, lambda row: f"{row['ratio']:.2f} times LoRA's step")
    return results.write_table("Other adapters against LoRA: time and memory of a step", ABOUT, describe_machine())
