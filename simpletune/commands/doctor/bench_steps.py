"""Take steps of a model of its real size with random weights: a run of ``doctor --bench``, in the child process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simpletune.config.compute import settle_compute
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.timing.datasheet import DatasheetSpeeds
from simpletune.estimate.timing.host_probes import measure_host
from simpletune.estimate.timing.speeds import HostSpeeds
from simpletune.estimate.timing.timeline import step_seconds
from simpletune.models.shared.weights import TensorSource, fill_model
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.load import stays_on_host
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.synthetic import SingleProcess, SyntheticBatches
from simpletune.stages.step.train_step import TrainStep, assemble
from simpletune.system.console import silence
from simpletune.system.devices import capability_of, choose_device
from simpletune.system.gpus import card_named_by_driver
from simpletune.system.options import ConfigError, Json

MIB = 2**20
TINY = (
    "model.family=sd3",
    "model.pretrained=demo:tiny-sd3",
    "model.t5_length=77",
    "validation.prompts=[]",
    "data.resolution=64",
)
WARM_UP, MOST = 2, 10
ROOM = 1.1  # times the predicted peak must be free: what the allocator rounds, and other programs take meanwhile


@dataclass
class Steps:
    """A model in training.

    Args:
        step: takes one step.
        model: with its trained parameters.
        optimizer: of the trained parameters.
    """

    step: Callable[[], Tensor]
    model: nn.Module
    optimizer: Any


@dataclass
class OwnSteps(Steps):
    """Those of this package.

    Args:
        core: takes steps of micro-batches.
        batches: makes a step's micro-batches, by its number, with other values each time.
    """

    core: TrainStep
    batches: Callable[[int], list[Batch]]


class RandomWeights:
    """Random weights of a denoiser, created on the device: norms one, biases zero, the rest normal.

    Args:
        tensors: of the same shapes, without values.
        device: of the weights.
    """

    def __init__(self, tensors: TensorSource, device: torch.device):
        self._tensors = tensors
        self.names = tensors.names
        self.device = device

    def get(self, name: str) -> Tensor:
        """Create one tensor in fp32 on the device."""
        tensor = torch.empty(self._tensors.get(name).shape, device=self.device)
        if tensor.dim() > 1:
            return tensor.normal_(0, tensor[0].numel() ** -0.5)
        return tensor.fill_(1.0 if "norm" in name and name.endswith(".weight") else 0.0)


@contextmanager
def random_steps(config: TrainConfig, device: torch.device) -> Iterator[OwnSteps]:
    """Set up the trainer's step on random weights, latents and prompts."""
    side, shapes = config.resolution, config.model.files.known_config()
    on_host = stays_on_host(config.memory, config.model)
    network = config.model.architecture
    empty = network.empty_tensors(shapes)
    model = fill_model(network.empty_model(shapes), RandomWeights(empty, device), config.precision, device, on_host)
    if config.memory.crop_positions:
        weights = RandomWeights(empty, device)
        network.fit_to(model, [(side, side)], lambda: weights, config.precision.compute_dtype())
    core = assemble(config, model, SingleProcess(device))
    synthetic, count = SyntheticBatches(config, core, device=device), iter(range(10**9))
    model.train()

    def batches(step: int) -> list[Batch]:
        made = synthetic.step(step)
        for batch in made:
            for tensor in (batch.z_0, batch.noise, batch.conditioning.embeds):
                tensor.normal_()
        return made

    try:
        yield OwnSteps(lambda: core.step(batches(next(count)))[0], model, core.optimizer, core, batches)
    finally:
        free_optimizer(core.optimizer)


def free_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Free the memory of an optimizer's parameters and states. Hooks that update in the backward pass hold both from
    within torch, where Python's collector sees no cycle, and the next model would find the memory taken."""
    for state in optimizer.state.values():
        state.clear()  # in place: a rounded optimizer shares it with the one that it wraps
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data = parameter.data.new_empty(0)


def run_config(overrides: Sequence[str], capability: tuple[int, int] | None) -> TrainConfig:
    """Return the configuration of a run; without a card, of the tiny model. Raises ConfigError if the card lacks what
    the run needs."""
    base = ("schedule.warmup_steps=0", "data.path=demo:pictures", "precision.compute=auto")
    tiny = () if capability else TINY
    with silence():
        config, _ = read_config(Path("sd3_medium_lora_r16_int8"), [*base, *overrides, *tiny])
        return resolve_model_folder(settle_compute(config, capability))


def measure(overrides: Sequence[str], where: str, seconds: float) -> Json:
    """Predict a run and take its steps.

    Args:
        overrides: of the run (``bench.RUNS``).
        where: cuda or cpu.
        seconds: budget; at least one step is timed.

    Returns:
        Fields of ``bench.Run``.
    """
    began = time.monotonic()
    device = choose_device(where, "fp32", is_demo=True)[0]
    capability = capability_of(device)
    free_memory(device)  # from the run before
    try:
        config = run_config(overrides, capability)
    except ConfigError:
        return {"left_out": "not supported"}
    report = simulate(config, capability=capability)
    host = measure_host(device)
    found: Json = {"predicted_mib": round(report.peak.bytes / MIB, 1), "host": three_digits(host)}
    if capability:
        free, total = torch.cuda.mem_get_info(device)
        card = card_named_by_driver(torch.cuda.get_device_name(device), total, capability)
        stated = step_seconds(report.sections, DatasheetSpeeds(card, host)).seconds
        found["predicted_seconds"] = round(stated, 4)
        if report.peak.bytes * ROOM > free:  # what only a busy card lacks is tried again by the next call
            return found | {"left_out": "does not fit" if report.peak.bytes * ROOM > total else "out of memory"}
    try:
        with random_steps(config, device) as steps:
            if capability:
                torch.cuda.reset_peak_memory_stats(device)
            times = _time_steps(steps.step, device, began + seconds)
    except torch.OutOfMemoryError:
        return found | {"left_out": "out of memory"}
    found |= {"seconds": round(statistics.median(times), 4), "least": round(min(times), 4), "steps": len(times)}
    if capability:
        found["measured_mib"] = round(torch.cuda.max_memory_allocated(device) / MIB, 1)
    return found | {"host_after": three_digits(measure_host(device))}


def three_digits(host: HostSpeeds) -> Json:
    """Return what was measured of a machine, in three digits each."""
    return {name: float(f"{value:.3g}") for name, value in host if value is not None}


def _time_steps(step: Callable[[], Tensor], device: torch.device, deadline: float) -> list[float]:
    """Measure the seconds of steps after warm-up: one, and more while another one would end before the deadline."""
    times: list[float] = []
    for number in range(WARM_UP + MOST):
        clock = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= WARM_UP:
            times.append(time.perf_counter() - clock)
        if times and time.monotonic() + times[-1] > deadline:
            break
    return times
