"""Train with several processes on this machine; measure pictures per second and the exchange of gradients.

``python -m benchmarks.measured_scaling BYTES`` is one process of the second measurement.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_folders
from simpletune.runs.folder import read_json_or_none, read_metrics
from simpletune.system.options import Json, UserError

STEPS, WARM_UP, MICRO, ROUNDS = 10, 2, 2, 10
METHODS = {
    "LoRA": ("adapter.method=lora", "adapter.rank=16", "adapter.targets=attention"),
    "full": ("adapter.method=full",),
}
COMMON = (
    "data.path=demo:pictures", "precision.weights=fp32", "precision.compute=fp32", "memory.checkpointing=none",
    "optimizer.name=adamw", f"train.batch_size={MICRO}", f"train.steps={STEPS}", "schedule.warmup_steps=0", "ema=null",
    "validation.prompts=[]", "validation.loss_samples=0", "validation.every=null", "checkpoint.every=null",
    "profile.max_traces=0", "output.report=false", "tracking.tensorboard=false", "device=cpu",
)  # fmt: skip


def measured(method: str, processes: int, passes: int) -> Json:
    """Train the tiny SD3 in several processes of one thread each, with ``passes`` micro-batches per step in total.

    Args:
        method: of ``METHODS``.
        processes: number of processes.
        passes: micro-batches of a step, which the processes share.
    """
    with tempfile.TemporaryDirectory() as place:
        overrides = [f"output.{name}={place}/{name}" for name in ("runs", "profiles", "cache")]
        words = [*METHODS[method], *COMMON, f"train.gradient_accumulation={passes}", *overrides]
        launch(["-m", "simpletune", "train", "demo", f"name=x{processes}", *words], processes)
        run = Path(place) / "runs" / f"x{processes}"
        rows = read_metrics(run)[WARM_UP:]
        data, summary = read_json_or_none(run / "data.json"), read_json_or_none(run / "summary.json")
    if data is None or summary is None:
        raise UserError(f"the run on {processes} processes left no summary", 1)
    batch = len(data["samples"]) / summary["steps_per_epoch"]
    seconds = statistics.median(row["seconds"] for row in rows)
    return {"processes": processes, "batch": batch, "micro": MICRO, "passes": passes // processes, "seconds": seconds,
            "rate": batch / seconds, "loss": rows[-1]["loss"]}  # fmt: skip


def exchange_of(method: str, processes: int) -> Json:
    """Measure an all-reduce of the gradients of ``METHODS`` among processes, with gloo over this machine's loopback."""
    config = resolve_folders(read_config(Path("demo"), [*METHODS[method], *COMMON], needs_data=False)[0])
    bytes_ = 4 * config.adapter.trainable(config.model.architecture.known_shapes())
    said = launch(["-m", "benchmarks.measured_scaling", str(bytes_)], processes)
    return {"processes": processes, "bytes": bytes_, "seconds": json.loads(said.splitlines()[-1])["seconds"]}


def launch(words: list[str], processes: int) -> str:
    """Run Python in several processes that train together, as a launcher does, and return what the first one prints.

    Raises:
        UserError: a process failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": port, "OMP_NUM_THREADS": "1"} if processes > 1 else {"OMP_NUM_THREADS": "1"}
    started = []
    for rank in range(processes):
        ranked = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {"OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen([sys.executable, *words], env={**os.environ, **ranked}, stdout=subprocess.PIPE, text=True)
        )
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise UserError(f"{' '.join(words[:4])} failed on {processes} processes: {said[0][-500:]}", 1)
    return said[0]


def main() -> None:
    """One process of an exchange: the median seconds of an all-reduce of ``bytes_`` bytes."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    tensor = torch.ones(int(sys.argv[1]) // 4)
    times = []
    for _ in range(ROUNDS + WARM_UP):
        torch.distributed.barrier()
        began = time.perf_counter()
        torch.distributed.all_reduce(tensor)
        times.append(time.perf_counter() - began)
    print(json.dumps({"seconds": statistics.median(times[WARM_UP:])}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
