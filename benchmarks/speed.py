"""``speed``: measure seconds per step, compared with the device's rates and with diffusers' documented recipe.

Every row runs the trainer's own step on a model of the real size with random weights. All rows are measured in one
process; each model is freed before the next.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.roofline import finish, least_seconds, rates
from benchmarks.speed_rows import ABOUT, COLUMNS, CONFIG, ENOUGH, RATES, ROOFLINE, Row, demo_grid, grid
from benchmarks.table import Results, describe_machine
from simpletune.commands.doctor.bench_steps import RandomWeights, Steps, random_steps
from simpletune.config.compute import settle_compute
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_data_folder, resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.engine.profiling.figures import read_events, shares
from simpletune.engine.profiling.profile_option import Profile
from simpletune.engine.profiling.traces import TraceWindow, Window
from simpletune.engine.tensors import trained_parameters
from simpletune.models.shared.flops import Flops, trained_of
from simpletune.stages.latent_cache import free_memory
from simpletune.system.console import say
from simpletune.system.devices import capability_of, choose_device
from simpletune.system.gpus import peak_tflops
from simpletune.system.options import ConfigError, UserError
from simpletune.system.stage_timer import StageTimer

WARM_UP, LEAST, MOST, SECONDS = 3, 5, 20, 20.0


def run(folder: Path, minutes: float, only: str = "", model: str | None = None, device: str = "auto") -> Path:
    """Measure the rows that are missing, until the time is up.

    Args:
        model: demo, or None: SD3 Medium's size on a GPU, else demo.

    Raises:
        UserError: rows failed; the others were measured.
    """
    small = model == "demo" or device == "cpu" or not torch.cuda.is_available()
    here = choose_device(device, "bf16", is_demo=small)[0]
    rows = demo_grid() if small else grid()
    results = Results(folder / "speed", COLUMNS)
    for name, rate in rates(here).items() if results.lacks("copy") else ():
        results.add(name, {**rate, "table": ROOFLINE})
    failed = []
    for name, row in results.missing(rows, minutes, only):
        try:
            results.add(name, found := measure(name, row, here, results.rows))
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{name}: {traceback.format_exception_only(error)[-1].strip()}")
            continue
        say(f"bench   {name}: {found.get('note') or format(found['seconds_per_step'], '.4f') + ' s/step'}")
    compare(results, rows)
    words = ("The tiny model", "256 px, batch 1, no checkpointing, 154 text tokens")
    if not small:
        words = ("SD3 Medium at its real size", "all blocks checkpointed, 333 text tokens, batch 1")
    table = results.write_table(
        "Speed", ABOUT.format(model=words[0], setting=words[1]), describe_machine(), {ROOFLINE: RATES}
    )
    if failed:
        raise UserError(f"no figures for {'; '.join(failed)}. The other rows are in {table}", 1)
    return table


def compare(results: Results, rows: Mapping[str, Row]) -> None:
    """Add to each row its step time relative to diffusers' at equal settings."""
    for name, row in list(results.rows.items()):
        beside = results.rows.get(rows[name].beside or "", {}) if name in rows else {}
        if "seconds_per_step" in row and "seconds_per_step" in beside:
            ratio = row["seconds_per_step"] / beside["seconds_per_step"]
            results.add(name, {**row, "times_diffusers": round(ratio, 4)})


def config_of(overrides: tuple[str, ...], capability: tuple[int, int] | None = None) -> TrainConfig:
    """Return a row's configuration with folders resolved and the type that the device computes in; downloads nothing,
    since weights are random.

    Raises:
        ConfigError: the device lacks what the row needs.
    """
    config = settle_compute(read_config(CONFIG, [*ENOUGH, *overrides])[0], capability)
    return resolve_data_folder(resolve_model_folder(config))


def measure(name: str, row: Row, device: torch.device, rates: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one row; if it does not fit on the device, return a row with a note."""
    free_memory(device)  # from the previous row
    stages = StageTimer(cuda=device.type == "cuda")
    try:
        config = config_of(row.overrides, capability_of(device))
    except ConfigError:
        return {"note": "not supported on this card"}
    try:
        with (
            theirs(config, device) if name == row.beside else random_steps(config, device) as steps,
            stages.stage("train"),
        ):
            seconds = timed(steps.step, device)
            divided = profiled(steps.step, device)
            found = figures(config, steps, statistics.median(seconds), dict(rates), device)
    except torch.OutOfMemoryError:
        found, divided, seconds = {"note": "out of memory"}, {}, []
    peak = stages.peak("peak_allocated_gib") if device.type == "cuda" else stages.peak("peak_rss_gib")
    return {**found, "peak_mib": round((peak or 0) * 1024), "steps": len(seconds), **divided}


def figures(
    config: TrainConfig, steps: Steps, seconds: float, rates: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Derive figures from the median seconds per step."""
    flops, accumulated = flops_of(config, steps.model), config.train.accumulation
    model, executed = flops.model * accumulated, (flops.model + flops.recomputed) * accumulated
    int8 = getattr(config.precision, "products", None) == "int8"
    floor = least_seconds(rates, executed, traffic(steps, flops), (flops.forward + flops.recomputed) * int8)
    peak = peak_tflops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    achieved = model / seconds / 1e12
    return {
        "seconds_per_step": seconds,
        "samples_per_second": config.train.micro_batch * accumulated / seconds,
        "flops_per_step": model,
        "flops_executed": executed,
        "tflops": achieved,
        "mfu": None if peak is None else achieved / peak,
        "of_measured": achieved / rates["bf16 products"]["rate"],
        "floor": floor,
        "times_floor": seconds / floor,
    }


def flops_of(config: TrainConfig, model: nn.Module) -> Flops:
    """Count the operations of a micro-batch of a row."""
    # accelerate and PEFT keep the transformer's parameter names and add the adapter's name to those of LoRA.
    trained = {name: tuple(value.shape) for name, value in trained_parameters(model).items()}
    side, blocks = config.resolution, config.memory.checkpointed_count(config.model.architecture.blocks())
    return config.model.flops(trained_of(trained), (side, side), config.train.micro_batch, blocks)


def traffic(steps: Steps, flops: Flops) -> float:
    """Return the minimum traffic of a step: weights once per pass; trained weights, gradients and states twice."""
    weights = sum(tensor.nbytes for tensor in [*steps.model.parameters(), *steps.model.buffers()])
    trained = sum(2 * parameter.nbytes for parameter in trained_parameters(steps.model).values())
    states = [value for state in steps.optimizer.state.values() for value in state.values()]
    state = sum(value.nbytes for value in states if isinstance(value, Tensor))
    passes = 2 + flops.recomputed / (flops.forward or 1)
    return weights * passes + 2 * (trained + state)


def timed(step: Callable[[], Tensor], device: torch.device) -> list[float]:
    """Time steps after warm-up, synchronising after each.

    Raises:
        FloatingPointError: the loss is not finite, so the times are not representative.
    """
    seconds: list[float] = []
    for number in range(WARM_UP + MOST):
        finish(device)
        clock = time.perf_counter()
        loss = step()
        finish(device)
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - clock)
        if len(seconds) >= LEAST and sum(seconds) > SECONDS:
            break
    if not loss.isfinite():
        raise FloatingPointError(f"the loss is {loss.item()} after {number + 1} steps")
    return seconds


def profiled(step: Callable[[], Tensor], device: torch.device) -> dict[str, float]:
    """Profile one step and return the shares of its time."""
    window = Window(Profile(), TraceWindow(0, 1, 1), cuda=device.type == "cuda")
    window.start()
    try:
        for _ in range(2):
            step()
            finish(device)
            window.step()
    finally:
        window.close()
    return shares(read_events(window.events()), 1)


@contextmanager
def theirs(config: TrainConfig, device: torch.device) -> Any:
    """Set up diffusers' step on random pictures and prompts, with a configuration's settings."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler

    from benchmarks.diffusers_training import DreamBooth, Flags

    shapes, batch, side = config.model.files.known_config(), config.train.micro_batch, config.resolution
    rank = getattr(config.adapter, "rank", None)
    dtype = torch.float32 if rank is None else torch.bfloat16
    model, tensors = (
        nn.Module.to(config.model.architecture.empty_model(shapes), dtype),
        RandomWeights(config.model.architecture.empty_tensors(shapes), device),
    )
    model = model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(tensors.get(name))
    parts = {part: config.model.files.known_part(part).config() for part in ("vae", "scheduler")}
    with torch.device(device):
        vae = AutoencoderKL.from_config(parts["vae"])
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(parts["scheduler"])
    with accelerator_on(device) as accelerator:
        checkpointing = config.memory.checkpointing == "all"
        recipe = DreamBooth(model, vae, scheduler, accelerator, rank, Flags(checkpointing))
        pixels = torch.rand(batch, 3, side, side, device=device) * 2 - 1
        text = batch, config.model.text.tokens, shapes["joint_attention_dim"]
        prompt_embeds = torch.randn(text, device=device, dtype=torch.bfloat16)
        pooled = torch.randn(batch, shapes["pooled_projection_dim"], device=device, dtype=torch.bfloat16)
        yield Steps(lambda: recipe.step(pixels, prompt_embeds, pooled), model, recipe.optimizer)


@contextmanager
def accelerator_on(device: torch.device, mixed_precision: str = "bf16") -> Any:
    """Create accelerate's Accelerator; reset its process-wide settings before and after."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    try:
        yield Accelerator(mixed_precision=mixed_precision, cpu=device.type == "cpu")
    finally:
        AcceleratorState._reset_state(True)
