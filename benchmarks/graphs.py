"""``graphs``: replayed passes beside plain ones on a card, and streamed weights whose copies are delayed on purpose.

What nothing else can tell comes first: whether a replayed pass gives the plain one's gradients to the bit, which
decides what ``speed.graphs`` ``auto`` means (``stages/step/replay.py``, ``PROVEN``). Every row is saved when it is
measured, and one that fails does not end the others. Makes no predictions, for which torch 2.11 lacks a name.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.table import Results, describe_machine
from simpletune.commands.doctor.bench_steps import OwnSteps, random_steps, run_config
from simpletune.engine.graphs import Graphs
from simpletune.engine.memory.copy_stream import CopyEvent, CudaCopies
from simpletune.engine.tensors import trained_parameters
from simpletune.estimate.timing.host_probes import core_seconds
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.replay import why_not
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.devices import capability_of, choose_device, use_deterministic
from simpletune.system.environment import cpu_name
from simpletune.system.gpus import file_words
from simpletune.system.options import Json, UserError
from simpletune.system.printable import describe_exception
from simpletune.system.rng import stream

MIB = 2**20
WARM, ROUNDS = 3, 6
LATE_STEPS = 200
LATEST = 3_000_000  # cycles of the device by which a copy is delayed at most: 2 ms
OPEN, BF16 = ("memory.checkpointing=none",), ("precision.weights=bf16",)
EXACT = ("speed.deterministic=true",)
XL = ("model.family=sdxl", "data.resolution=1024", "adapter.rank=16")
SMALL = ("data.resolution=512",)
ROWS: dict[str, tuple[str, ...]] = {
    "SD3 LoRA bf16, no checkpointing, deterministic": (*BF16, *OPEN, *EXACT),
    "SDXL LoRA bf16, no checkpointing, deterministic": (*XL, *BF16, *OPEN, *EXACT),
    "SD3 LoRA bf16": BF16,
    "SD3 LoRA bf16, no checkpointing": (*BF16, *OPEN),
    "SDXL LoRA bf16, no checkpointing": (*XL, *BF16, *OPEN),
    "SD3 LoRA int8 products and gradients": ("precision.products=int8", "precision.input_gradient=int8"),
    "SD3 LoRA nf4": ("precision.weights=nf4",),
    "SD3 LoRA int8": (),
    "SD3 LoRA int8, plan": ("memory.modulation=plan",),
    "SDXL LoRA bf16": (*XL, *BF16),
    "SD 1.5 LoRA bf16, 512 px": ("model.family=sd15", "adapter.rank=8", *SMALL, *BF16, *OPEN),
    "SDXL LoKr bf16, no checkpointing": (*XL[:2], "adapter.method=lokr", *BF16, *OPEN),
    "SD3 LoRA bf16, batch 4": (*BF16, "train.batch_size=4"),
}
STREAMED = ("memory.resident_blocks=0", "memory.checkpointing=all")
LATE = "SD3 LoRA int8, 512 px, deterministic: streamed with late copies, beside resident"
COLUMNS = {
    "what": "", "plain": "plain, s", "replayed": "replayed, s", "ratio": "plain / replayed",
    "host": "host, s", "host_replayed": "host replayed, s", "device": "device, s",
    "capture": "capture, s", "same": "equal bits", "plain_same": "plain twice", "worst": "worst gradient",
    "plain_mib": "reserved plain, MiB", "graph_mib": "with the graph, MiB", "driver_mib": "driver, MiB",
    "nodes": "nodes", "core": "core, s", "note": "note",
}  # fmt: skip
ABOUT = f"""\
Steps of models of their real size with random weights, batch 1 and 1024 px unless the row says otherwise: medians of
{ROUNDS} with the host waiting for each. *Host*: the least processor seconds of all threads to queue a step. *Device*:
one replay by events. *Equal bits*: loss and every gradient of one micro-batch, replayed against plain, *plain twice*
plain against plain; *worst gradient*: the largest relative difference. *Driver*: memory outside torch that the graph
took. *Nodes*: its kernels, counted on a simulated card only, where seconds are the host's and bits mean nothing.
*Core*: seconds of a fixed loop of Python and torch. The last row trains {LATE_STEPS} steps with all blocks streamed and
each copy delayed by up to {LATEST:,} cycles of the device, and with resident ones: *equal bits* are those of all losses
and weights."""


def run(folder: Path, minutes: float, only: str = "", overrides: Sequence[str] = ()) -> Path:
    """Measure the missing rows, until the time is up; ``overrides`` change every row.

    Raises:
        UserError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("graphs: torch sees no CUDA device, and graphs are CUDA's. Run it on a machine with a card")
    device = choose_device("cuda", "fp32", is_demo=True)[0]
    if folder.name == "cpu":
        folder = folder.with_name(f"gpu-{file_words(torch.cuda.get_device_name(device))}")
    results = Results(folder / "graphs", COLUMNS)
    rows = {name: partial(tried, replayed, (*row, *overrides), device) for name, row in ROWS.items()}
    late = (*SMALL, *EXACT, *overrides)
    rows[LATE] = partial(tried, streamed_late, late, device)
    results.measure(rows, minutes, only, lambda row: row.get("note") or f"equal bits {row['same']}")
    simulated = hasattr(ctypes.CDLL(None), "dry_count")
    card = f"{'simulated, like an ' * simulated}{torch.cuda.get_device_name(device)}"
    about = {**describe_machine(), "host": cpu_name(), "card": card}
    return results.write_table("Replayed passes", ABOUT, about)


def tried(measure: Callable[[Sequence[str], torch.device], Json], row: Sequence[str], device: torch.device) -> Json:
    """Measure a row; its failure becomes a note."""
    free_memory(device)
    try:
        return measure(row, device)
    except Exception as error:
        return {"note": describe_exception(error)}
    finally:
        gc.unfreeze()


def replayed(overrides: Sequence[str], device: torch.device) -> Json:
    """Take plain steps, then replayed ones."""
    config = run_config(overrides, capability_of(device))
    use_deterministic(config.speed.deterministic)
    if (why := why_not(config, device)) is not None:
        return {"note": why}
    with random_steps(config, device) as steps:
        core, batches = steps.core, steps.batches(0)
        gc.collect()
        gc.freeze()  # what the process holds costs every collection in a step
        timed(core, batches, WARM)
        torch.cuda.reset_peak_memory_stats(device)
        plain, host = timed(core, batches, ROUNDS)
        found: Json = {"plain": plain, "host": host, "plain_mib": torch.cuda.max_memory_reserved(device) // MIB}
        twice = gradients(core, batches[0]), gradients(core, batches[0])
        found["plain_same"] = differences(*twice)[0]
        del twice
        outside = outside_torch(device)
        core.graphs = graphs = Graphs(device, core.parameters)
        timed(core, batches, WARM)
        if graphs.off is not None:
            return found | {"note": graphs.off}
        found["driver_mib"] = (outside_torch(device) - outside) // MIB
        torch.cuda.reset_peak_memory_stats(device)
        nodes = simulated_nodes()
        found["replayed"], found["host_replayed"] = timed(core, batches, ROUNDS)
        found["nodes"] = (simulated_nodes() - nodes) // ROUNDS or None
        found |= {
            "graph_mib": torch.cuda.max_memory_reserved(device) // MIB,
            "ratio": round(plain / found["replayed"], 2),
        }
        captured = next(iter(graphs._graphs.values()))
        found |= {"capture": round(captured.queued, 4), "device": device_seconds(captured.graph)}
        of_graph = gradients(core, batches[0])
        graphs.drop()
        core.graphs = None
        found["same"], found["worst"] = differences(of_graph, gradients(core, batches[0]))
    return found | {"core": core_seconds()}


def timed(core: TrainStep, batches: list[Batch], count: int) -> tuple[float, float]:
    """Return the median seconds of steps, and the least processor seconds of queueing one."""
    walls, host = [], []
    torch.cuda.synchronize()
    for _ in range(count):
        began, used = time.perf_counter(), time.process_time()
        core.step(batches)
        host.append(time.process_time() - used)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - began)
    return round(statistics.median(walls), 4), round(min(host), 4)


def gradients(core: TrainStep, batch: Batch) -> list[Tensor]:
    """Return the loss and the gradients of one micro-batch, without an update."""
    loss = core.compute(batch)
    found = [loss.clone(), *(parameter.grad.clone() for parameter in core.parameters if parameter.grad is not None)]
    core.losses = []
    if core.graphs is None:
        core.optimizer.zero_grad(set_to_none=True)
    else:
        core.graphs.end_step()
    return found


def differences(ours: list[Tensor], theirs: list[Tensor]) -> tuple[str, float]:
    """Return whether all tensors have equal bits (yes or no), and the largest relative difference of one."""
    pairs = list(zip(ours, theirs, strict=True))
    worst = max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)
    return "yes" if all(torch.equal(a, b) for a, b in pairs) else "no", worst


def device_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the device's seconds of a replay, of two in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(2):
        graph.replay()
    end.record()
    end.synchronize()
    return round(begin.elapsed_time(end) / 2000, 4)


def simulated_nodes() -> int:
    """Return how many kernels have been replayed so far on a simulated card (tests/gpu/dry_gpu); 0 on a real one."""
    count = getattr(ctypes.CDLL(None), "dry_count", None)
    if count is None:
        return 0
    count.restype = ctypes.c_longlong
    return int(count(b"replayed_nodes"))


def outside_torch(device: torch.device) -> int:
    """Return the bytes of the device that torch has not reserved."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def streamed_late(overrides: Sequence[str], device: torch.device) -> Json:
    """Train with streamed weights whose copies are late, and with resident ones."""
    clock, results = time.perf_counter(), []
    for more in ((), STREAMED):
        config = run_config((*overrides, "memory.modulation=resident", *more), capability_of(device))
        use_deterministic(config.speed.deterministic)
        torch.manual_seed(0)
        with random_steps(config, device) as steps, late_copies(bool(more)) as delayed:
            results.append(list(trained(steps)))
        free_memory(device)
    same, worst = differences(*results)
    seconds = time.perf_counter() - clock
    return {"same": same, "worst": worst, "note": f"{delayed()} copies delayed, {seconds:.0f} s"}


def trained(steps: OwnSteps) -> Iterator[Tensor]:
    """Train; yield every loss, then the trained weights, in host memory."""
    for number in range(LATE_STEPS):
        torch.manual_seed(number)
        yield steps.core.step(steps.batches(number))[0].detach().clone()
    for parameter in trained_parameters(steps.model).values():
        yield parameter.detach().float().cpu()


@contextmanager
def late_copies(on: bool) -> Iterator[Callable[[], int]]:
    """Delay each queued copy within this context by its own time; yields how many were delayed."""
    honest, numbers, count = CudaCopies.run, stream(0, "late copies"), 0

    def run(copies: CudaCopies, work: Callable[[], object], after: Sequence[CopyEvent]) -> CopyEvent:
        nonlocal count
        count += 1
        cycles = int(numbers.integers(LATEST))

        def late() -> None:
            torch.cuda._sleep(cycles)
            work()

        return honest(copies, late, after)

    if on:
        CudaCopies.run = run  # type: ignore[method-assign,assignment]
    try:
        yield lambda: count
    finally:
        CudaCopies.run = honest  # type: ignore[method-assign]
