"""Measure one row of ``memory`` in this process: read a JSON list of overrides, print the row's JSON.

A second argument ``whole`` selects the whole job by stage.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from simpletune.system.devices import prepare_environment

STEPS = 4


def measure(overrides: tuple[str, ...], where: str = "cuda") -> dict[str, Any]:
    """Take a few steps on the GPU with uninitialised weights.

    Returns:
        Peaks in MiB. Not the time: products of uninitialised weights, mostly zeros, take less power and thus less time.
    """
    import torch

    from benchmarks.memory import config_of
    from simpletune.commands.doctor.bench_steps import free_optimizer
    from simpletune.stages.load import empty_base
    from simpletune.stages.step.synthetic import SingleProcess, SyntheticBatches
    from simpletune.stages.step.train_step import assemble
    from simpletune.system.devices import capability_of
    from simpletune.system.stage_timer import peak_rss_gib

    device = torch.device(where)
    config = config_of(overrides, capability_of(device))
    sizes = [(config.resolution, config.resolution)]
    transformer = empty_base(config.model, config.memory, config.precision, device, sizes)
    core = assemble(config, transformer, SingleProcess(device))
    synthetic = SyntheticBatches(config, core, device=device)
    transformer.train()
    torch.cuda.reset_peak_memory_stats()
    for step in range(STEPS):
        core.step(synthetic.step(step))
    torch.cuda.synchronize()
    free_optimizer(core.optimizer)
    return {
        "measured_mib": round(torch.cuda.max_memory_allocated() / 2**20),
        "reserved_mib": round(torch.cuda.max_memory_reserved() / 2**20),
        "rss_mib": round(peak_rss_gib() * 1024),
    }


def main(overrides: tuple[str, ...], whole: bool = False) -> dict[str, Any]:
    """Predict, and measure if there is a GPU; the whole job is only predicted."""
    import torch

    from benchmarks.memory import predict, predict_job

    if whole:
        return predict_job(overrides)
    row = predict(overrides)
    if torch.cuda.is_available():
        row |= measure(overrides)
        row["error"] = round(row["predicted_mib"] / row["measured_mib"] - 1, 4)
    return row


if __name__ == "__main__":
    prepare_environment()
    print(json.dumps(main(tuple(json.loads(sys.argv[1])), "whole" in sys.argv[2:])))
