"""Predict a run's peak memory of every stage by kind, host memory, disk and download.

Predictions are cached under ``<cache>/estimates/``, keyed by everything that they depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import NotRequired, TypedDict

from simpletune import __version__
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.attention_workspace import attention_kernel
from simpletune.engine.memory.snapshot import MemorySnapshot, OutOfMemory
from simpletune.estimate.host_needs import HostNeeds, needs_of
from simpletune.estimate.simulate.processes import simulated_processes
from simpletune.estimate.simulate.simulate import L4, StepReport
from simpletune.estimate.simulate.simulate_stages import JobReport, simulate_parts, with_workspaces
from simpletune.estimate.simulate.training_stage import SimulatedTraining
from simpletune.estimate.timing.recorder import StreamWork
from simpletune.models.shared.buckets import Size
from simpletune.runs.folder import read_json_or_none
from simpletune.system.atomic import write_json
from simpletune.system.environment import LIBRARIES
from simpletune.system.gpus import Card
from simpletune.system.options import Json

VERSION = 6  # increment when a change to model, step, levers or accounting changes a peak or the recorded operations
MIB = 2**20
CONTEXT = 500 * MIB  # the CUDA context and loaded kernels: an allowance, not measured
# Allowances for what torch's caching allocator reserves beyond the peak. They cover all but two rows of
# benchmarks/results/dry-l4, and those two run on a card of exactly that size, too.
FRAGMENTED = 0.05  # share of the peak
LEAST_FRAGMENTED = 256 * MIB
IRRELEVANT = ("name", "output", "tracking", "profile")  # sections that do not affect memory on the device


@dataclass(frozen=True)
class Estimate:
    """A prediction.

    Args:
        stages: the largest snapshot of ``text``, ``latents``, ``train`` and, if the run validates, ``validate``.
        needs: besides GPU memory.
        size: width and height of the training pictures in pixels.
        job: the simulation, from which the time follows.
    """

    stages: Mapping[str, MemorySnapshot]
    needs: HostNeeds
    size: Size
    job: JobReport | None = None

    @property
    def peak(self) -> MemorySnapshot:
        """The largest snapshot of the whole job."""
        return max(self.stages.values(), key=lambda snapshot: snapshot.bytes)

    @property
    def peak_stage(self) -> str:
        """The stage of the largest snapshot."""
        return max(self.stages, key=lambda name: self.stages[name].bytes)

    def needed(self) -> int:
        """Return the bytes that a card must have: the peak plus the allowances."""
        return needed(self.peak.bytes)

    def fits(self, card: Card, reserved: int = 0) -> bool:
        """Whether the whole job fits on a card.

        Args:
            card: card to check.
            reserved: bytes of the card that other programs use.
        """
        return self.needed() + reserved <= card.bytes

    def as_json(self, card: Card | None = None, reserved: int = 0) -> dict[str, object]:
        """Return what ``estimate --json`` prints: device memory in MiB (2^20); host, disk, download in GiB (2^30)."""
        figures: dict[str, object] = {
            "stages": {name: snapshot_json(snapshot) for name, snapshot in self.stages.items()},
            "peak_allocated_mib": to_mib(self.peak.bytes),
            "peak_stage": self.peak_stage,
            "allowances_mib": {
                "cuda_context": to_mib(CONTEXT),
                "fragmentation": to_mib(fragmentation(self.peak.bytes)),
            },
            "needed_mib": to_mib(self.needed()),
            "host_ram_gib": to_gib(sum(self.needs.host.values())),
            "host_ram_by_use_gib": {name: to_gib(size) for name, size in self.needs.host.items()},
            "host_ram_shared_gib": to_gib(self.needs.shared),
            "disk_gib": to_gib(sum(self.needs.disk.values()) + sum(self.needs.download.values())),
            "disk_by_use_gib": {name: to_gib(size) for name, size in self.needs.disk.items()},
            "download_gib": to_gib(sum(self.needs.download.values())),
            "download_by_part_gib": {name: to_gib(size) for name, size in self.needs.download.items()},
            "pictures": None if self.needs.counts is None else self.needs.counts.pictures,
            "prompts": None if self.needs.counts is None else self.needs.counts.prompts,
            "size": list(self.size),
        }
        if card is not None:
            free = card.bytes - reserved
            figures |= {"device": card.name, "device_mib": to_mib(card.bytes), "reserved_mib": to_mib(reserved)}
            figures |= {"fits": self.fits(card, reserved), "left_mib": to_mib(free - self.needed())}
        return figures


def needed(peak: int) -> int:
    """Return the bytes that a card must have for a peak of allocated bytes."""
    return peak + fragmentation(peak) + CONTEXT


def fragmentation(peak: int) -> int:
    """Return an allowance in bytes for what torch's allocator has reserved but cannot use at a peak.

    ``python -m benchmarks dry`` compares it with the real allocator.
    """
    return max(int(FRAGMENTED * peak), LEAST_FRAGMENTED)


def largest_peak(card: Card, reserved: int = 0) -> int:
    """Return the largest peak of allocated bytes that fits on a card where other programs use ``reserved`` bytes."""
    free = card.bytes - reserved - CONTEXT
    return min(int(free / (1 + FRAGMENTED)), free - LEAST_FRAGMENTED)


class SnapshotJson(TypedDict):
    """A memory snapshot as JSON."""

    peak_allocated_mib: float
    by_kind: dict[str, float]
    at: str
    measured_mib: NotRequired[float]
    error: NotRequired[float]
    """Error of the prediction as a fraction of the measurement."""


def snapshot_json(snapshot: MemorySnapshot) -> SnapshotJson:
    """Convert a snapshot to MiB."""
    kinds = {kind: to_mib(size) for kind, size in sorted(snapshot.by_kind.items(), key=lambda item: -item[1]) if size}
    return {
        "peak_allocated_mib": to_mib(snapshot.bytes),
        "by_kind": kinds,
        "at": f"{snapshot.phase} {snapshot.module}".strip(),
    }


def to_mib(size: int) -> float:
    """Convert bytes to MiB, rounded to 0.1."""
    return round(size / MIB, 1)


def to_gib(size: int) -> float:
    """Convert bytes to GiB, rounded to 0.01."""
    return round(size / 2**30, 2)


def estimate(
    config: TrainConfig, capability: tuple[int, int], size: Size | None = None, trained: SimulatedTraining | None = None
) -> Estimate:
    """Predict the whole job without weights, data or a GPU; use the cached prediction if there is one.

    Args:
        config: configuration of the run, demo names and ``checkpointing: auto`` resolved.
        capability: compute capability of the CUDA device, for its libraries' workspaces.
        size: width and height in pixels of the largest bucket; None: the square of ``data.resolution``.
        trained: the run's simulated training stage on this device, if it is available.

    Raises:
        UserError: a part's configuration cannot be read.
    """
    size = size or (config.data.resolution, config.data.resolution)
    file = config.output.cache_folder / "estimates" / f"{estimate_key(config, capability, size)}.json"
    cached = read_json_or_none(file)
    if cached is None:
        job = simulate_parts(config, size, capability, trained)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, _stored(job), shared=True)
    else:
        job = _restored(cached)
    job = with_workspaces(job, capability)  # the file serves all cards with the same attention kernel
    return Estimate(job.stages, needs_of(config, job), size, job)


def kept_step(config: TrainConfig, simulated: Callable[[], StepReport], limit: int | None = None) -> StepReport:
    """Predict the training stage for squares of ``data.resolution``; use the cached prediction if there is one.

    Args:
        config: configuration of the run.
        simulated: predicts the stage as on an L4, without library workspaces, or raises ``OutOfMemory`` at the limit.
        limit: peak in bytes above which the step counts as too large; None: the whole prediction is needed.

    Raises:
        OutOfMemory: the step is known to take more than the limit.
    """
    size = (config.data.resolution, config.data.resolution)
    file = config.output.cache_folder / "estimates" / f"{estimate_key(config, L4, size)}-step.json"
    cached = read_json_or_none(file) or {}
    if "peak" in cached:
        return _restored_step(cached)
    if limit is not None and "exceeds" in cached and cached["exceeds"] > limit:
        raise OutOfMemory(cached["exceeds"])
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        report = simulated()
    except OutOfMemory as error:
        write_json(file, {"exceeds": error.bytes}, shared=True)
        raise
    write_json(file, _stored_step(report), shared=True)
    return report


def _stored(job: JobReport) -> Json:
    """Return the report as plain values."""
    plain = asdict(replace(job, work={}, train=replace(job.train, sections=())))
    work = {name: [each.as_json() for each in part] for name, part in job.work.items()}
    return {**plain, "train": _stored_step(job.train), "work": work}


def _restored(data: Json) -> JobReport:
    """Rebuild the report from ``_stored``."""
    stages = {name: MemorySnapshot(**m) for name, m in data["stages"].items()}
    work = {name: [StreamWork.from_json(each) for each in part] for name, part in data["work"].items()}
    return JobReport(stages, _restored_step(data["train"]), data["part_bytes"], work)


def _stored_step(train: StepReport) -> Json:
    return {**asdict(replace(train, sections=())), "sections": [section.as_json() for section in train.sections]}


def _restored_step(train: Json) -> StepReport:
    names = ("host_bytes", "shared_bytes", "trained_bytes", "state_bytes", "average_bytes", "seconds")
    sizes = {name: train[name] for name in names}
    return StepReport(
        peak=MemorySnapshot(**train["peak"]),
        phases={name: MemorySnapshot(**snapshot) for name, snapshot in train["phases"].items()},
        steady=MemorySnapshot(**train["steady"]),
        trained={name: tuple(shape) for name, shape in train["trained"].items()},
        sections=[StreamWork.from_json(each) for each in train["sections"]],
        **sizes,
    )


def attention_of(config: TrainConfig, capability: tuple[int, int]) -> str:
    """Return the attention kernel of a device, all that a prediction without workspaces depends on."""
    return attention_kernel(capability, config.precision.product_dtype(), config.speed.attention)


def estimate_key(config: TrainConfig, capability: tuple[int, int], size: Size) -> str:
    """Hash everything that a prediction depends on."""
    options = config.model_dump(mode="json", by_alias=True, exclude=set(IRRELEVANT))
    if config.train.uses_fsdp(simulated_processes()):
        options["processes"] = simulated_processes()
    versions = [VERSION, __version__, *map(version, LIBRARIES)]
    attention = attention_of(config, capability)
    about = json.dumps([options, attention, size, versions], sort_keys=True)
    return hashlib.sha256(about.encode()).hexdigest()[:24]
