"""Train the demo model for a few steps on random latents and prompts, and measure them."""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path

import torch

from simpletune.config.compute import settle_compute
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.estimate.simulate.simulate import simulate
from simpletune.stages.load import load_base
from simpletune.stages.step.synthetic import SingleProcess, SyntheticBatches
from simpletune.stages.step.train_step import TrainStep, assemble
from simpletune.system.devices import capability_of, choose_device
from simpletune.system.options import Json

MIB = 2**20


def probe_config(weights: str, capability: tuple[int, int] | None) -> TrainConfig:
    """Return the demo's configuration in one precision."""
    overrides = [f"precision.weights={weights}", "precision.compute=auto"]
    config, _ = read_config(Path("demo"), overrides, needs_data=False)
    return resolve_model_folder(settle_compute(config, capability))


def take_steps(weights: str, count: int) -> Json:
    """Train for some steps: median seconds of one, losses, and peaks in MiB: predicted, and on a card measured and
    reserved."""
    device = choose_device("auto", "fp32", is_demo=True)[0]
    capability = capability_of(device)
    config = probe_config(weights, capability)
    found: Json = {"compute": config.precision.compute}
    if capability:
        found["predicted_mib"] = simulate(config, capability=capability).peak.bytes / MIB
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    side = config.resolution
    denoiser = load_base(config, device, [(side, side)])
    core = assemble(config, denoiser, SingleProcess(device))
    denoiser.train()
    losses, seconds = _losses(core, SyntheticBatches(config, core, device=device), count)
    found |= {"losses": losses, "seconds_per_step": statistics.median(seconds[1:] or seconds)}
    if capability:
        found["measured_mib"] = torch.cuda.max_memory_allocated(device) / MIB
        found["reserved_mib"] = torch.cuda.max_memory_reserved(device) / MIB
    return found


def _losses(core: TrainStep, synthetic: SyntheticBatches, count: int) -> tuple[list[float], list[float]]:
    """Take the steps on random values; return their losses and seconds."""
    torch.manual_seed(0)
    losses, seconds = [], []
    for step in range(count):
        began = time.perf_counter()
        batches = synthetic.step(step)
        for batch in batches:
            for tensor in (batch.z_0, batch.noise, *batch.conditioning.tensors().values()):
                tensor.normal_()
        loss, _ = core.step(batches)
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - began)
    return losses, seconds
