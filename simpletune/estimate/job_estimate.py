"""Predict a run's peak memory of every stage by kind, host memory, disk and download.

Predictions are cached under ``<cache>/estimates/``, keyed by everything that they depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune import __version__
from simpletune.config.prior import ClassImages
from simpletune.config.schema import TrainConfig
from simpletune.data.samples import drop_rejected
from simpletune.data.sources.multi_source import find_too_small, scan_sources
from simpletune.engine.memory.cuda_libraries import most_multiprocessors
from simpletune.engine.memory.snapshot import MemorySnapshot, OutOfMemory
from simpletune.engine.quant.precision import ITEM
from simpletune.estimate.disk_needs import NO_DATA, DataCounts, bytes_of_prompt, disk_needs
from simpletune.estimate.simulate.processes import simulated_process_count
from simpletune.estimate.simulate.reports import (
    L4,
    JobReport,
    StepReport,
    kernel_of,
    parts_in_steps,
    square_size,
    with_workspaces,
)
from simpletune.estimate.stored import other_versions, prediction_key, stored_job
from simpletune.models.shared.buckets import Size
from simpletune.models.text.encoder import CHUNK_BYTES
from simpletune.runs.folder import read_json_or_none
from simpletune.stages.plan_data import make_plan, prompt_lengths
from simpletune.stages.stream_plan import stream_plan
from simpletune.system.atomic import write_json
from simpletune.system.console import expecting
from simpletune.system.environment import LIBRARIES, version_or_none
from simpletune.system.gpus import Card
from simpletune.system.hub import cached_folder
from simpletune.system.options import Json, UserError
from simpletune.system.startup import ensure_libraries, libraries_loaded

if TYPE_CHECKING:
    from simpletune.estimate.simulate.simulate import SimulatedTraining

VERSION = 8  # increment when a change to model, step, levers or accounting changes a peak or the recorded operations
MIB = 2**20
CONTEXT = 500 * MIB  # the CUDA context and loaded kernels: an allowance, not measured
# Allowances for what torch's caching allocator reserves beyond the peak. Compared with the real allocator by
# ``python -m benchmarks dry``, they cover all but two rows of benchmarks/results/dry-l4, and those two run on a card of
# exactly that size, too.
FRAGMENTED = 0.05  # share of the peak
LEAST_FRAGMENTED = 256 * MIB
HOST_LIBRARIES = int(1.0 * 2**30)  # bytes: a process took 0.9 GiB after its imports (Python 3.11, torch 2.13.0 CPU)
CUDA_LIBRARIES = 2 * 2**30  # bytes of host memory for the CUDA libraries: an allowance, not measured
IRRELEVANT = ("name", "output", "tracking", "profile")  # sections that do not affect memory on the device


@dataclass(frozen=True)
class Estimate:
    """What a run needs, in bytes."""

    job: JobReport
    """The simulation: device memory by stage, and the work from which the time follows."""
    size: Size
    """Width and height of the training pictures in pixels."""
    counts: DataCounts | None = None
    """Counts of the data set; None: it could not be read."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Host memory at its peak, by use."""
    shared: int = 0
    """Part of ``host`` that all processes of a machine share."""
    disk: Mapping[str, int] = field(default_factory=dict)
    """What the run writes, by use."""
    download: Mapping[str, int] = field(default_factory=dict)
    """Missing from the hub's cache, by part of the model."""

    @property
    def stages(self) -> Mapping[str, MemorySnapshot]:
        """The largest snapshot of each stage (see ``JobReport``)."""
        return self.job.stages

    @property
    def peak(self) -> MemorySnapshot:
        """The largest snapshot of the whole job."""
        return self.stages[self.peak_stage]

    @property
    def peak_stage(self) -> str:
        """The stage of the largest snapshot."""
        return max(self.stages, key=lambda name: self.stages[name].bytes)

    def needed_bytes(self) -> int:
        """Return the bytes that a card must have: the peak plus the allowances."""
        return needed_bytes(self.peak.bytes)

    def fits(self, card: Card, reserved: int = 0) -> bool:
        """Return whether the whole job fits on a card of which other programs use ``reserved`` bytes."""
        return self.needed_bytes() + reserved <= card.bytes

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
            "needed_mib": to_mib(self.needed_bytes()),
            "host_ram_gib": to_gib(sum(self.host.values())),
            "host_ram_by_use_gib": {name: to_gib(size) for name, size in self.host.items()},
            "host_ram_shared_gib": to_gib(self.shared),
            "disk_gib": to_gib(sum(self.disk.values()) + sum(self.download.values())),
            "disk_by_use_gib": {name: to_gib(size) for name, size in self.disk.items()},
            "download_gib": to_gib(sum(self.download.values())),
            "download_by_part_gib": {name: to_gib(size) for name, size in self.download.items()},
            "pictures": None if self.counts is None else self.counts.images,
            "prompts": None if self.counts is None else self.counts.prompts,
            "size": list(self.size),
        }
        if card is not None:
            left = card.bytes - reserved - self.needed_bytes()
            figures |= {"device": card.name, "device_mib": to_mib(card.bytes), "reserved_mib": to_mib(reserved)}
            figures |= {"fits": self.fits(card, reserved), "left_mib": to_mib(left)}
        return figures


def needed_bytes(peak: int) -> int:
    """Return the bytes that a card must have for a peak of allocated bytes."""
    return peak + fragmentation(peak) + CONTEXT


def shortage(what: str, peak: int, card: Card, held: int) -> str:
    """Say that ``peak`` bytes do not fit on a card of which other programs use ``held``; empty if they do."""
    needed = needed_bytes(peak)
    if needed + held <= card.bytes:
        return ""
    others = f", {held / MIB:,.0f} of them in use by other programs" if held else ""
    return f"{what} needs {needed / MIB:,.0f} MiB (predicted) and {card.name} has {card.bytes / MIB:,.0f}{others}"


def fragmentation(peak: int) -> int:
    """Return an allowance in bytes for what torch's allocator has reserved but cannot use at a peak."""
    return max(int(FRAGMENTED * peak), LEAST_FRAGMENTED)


def largest_peak(card: Card, reserved: int = 0) -> int:
    """Return the largest peak of allocated bytes that fits on a card where other programs use ``reserved`` bytes."""
    free = card.bytes - reserved - CONTEXT
    return min(int(free / (1 + FRAGMENTED)), free - LEAST_FRAGMENTED)


def snapshot_json(snapshot: MemorySnapshot) -> Json:
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
    """Predict the whole job without weights, data or a GPU; use the cached prediction if there is one, or the one that
    ships.

    Args:
        config: configuration of the run, demo names and ``checkpointing: auto`` resolved.
        capability: compute capability of the CUDA device, for its libraries' workspaces.
        size: width and height in pixels of the largest bucket; None: the square of ``data.resolution``.
        trained: the run's simulated training stage on this device, if it is available.

    Raises:
        UserError: a part's configuration cannot be read.
    """
    size = size or square_size(config)
    job = known_job(config, capability, size)
    if job is None:
        usual = usual_seconds(config, trained is None)
        with expecting(f"predict {config.name}", usual) as begin:
            ensure_libraries()
            from simpletune.estimate.simulate.simulate_stages import simulate_parts

            job = simulate_parts(config, size, capability, trained, begin)
        file = cache_file(config, capability, size)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, job.as_json(), shared=True)
    # It serves all cards of an attention kernel.
    job = with_workspaces(job, capability, config.speed.deterministic)
    return needs_of(config, job, size)


def usual_seconds(config: TrainConfig, trains: bool = True) -> dict[str, float]:
    """Return the usual seconds of a simulation's parts, in order; ``trains``: whether the training stage is among them.

    Of one core of an Intel Xeon (29 November 2026): 1.2 s of training for SD3 Medium's 682 weights, 4.6 s for SDXL's
    1,680. Only their proportions matter once one part is done.
    """
    weights = len(config.model.architecture.known_shapes())
    generates = 1.0 * (config.validation.prompts != [])
    return {
        "libraries": 0.0 if libraries_loaded() else 3.7,
        "text": 0.7,
        "train": trains * 0.0025 * weights,
        "validate": 0.0003 * weights * bool(config.validation.loss_samples) + 0.0015 * weights * generates,
        "class": 0.0015 * weights * isinstance(config.prior, ClassImages),
        "latents": 0.2,
    }


def known_job(config: TrainConfig, capability: tuple[int, int], size: Size) -> JobReport | None:
    """Return the cached simulation of a job, or the one that ships if it is for the installed libraries; None if it is
    to be made."""
    cached = read_json_or_none(cache_file(config, capability, size))
    if cached is not None:
        return JobReport.from_json(cached)
    return None if other_versions() else shipped_job(config, capability, size)


def shipped_job(config: TrainConfig, capability: tuple[int, int], size: Size) -> JobReport | None:
    """Return the simulation that ships, of square images, by whatever versions of the libraries; None if there is
    none."""
    processes = simulated_process_count()
    sharding = processes if config.train.uses_fsdp(processes) else 1
    if size != square_size(config):
        return None
    return stored_job(prediction_key(config, attention_of(config, capability), sharding))


def needs_of(config: TrainConfig, job: JobReport, size: Size) -> Estimate:
    """Add to a simulated job what the run needs besides GPU memory; demo names may be unresolved."""
    counts, train = counts_of(config), job.train
    disk = {what: taken for what, _, taken in disk_needs(config, counts=counts or NO_DATA)}
    prompts = min(CHUNK_BYTES, (counts or NO_DATA).prompts * bytes_of_prompt(config))
    in_transit = max(prompts, train.trained_bytes, train.state_bytes)
    host = {
        "libraries": HOST_LIBRARIES + CUDA_LIBRARIES,
        "levers (pinned)": train.host_bytes,
        "trained weights beside their average": train.trained_bytes * bool(config.ema or config.optimizer.averages),
        "prompts or a checkpoint in transit": in_transit,
    }
    if config.memory.cache_quantised and config.precision.cacheable:  # about as large as on device and host
        wide = ITEM[config.precision.encoder_type]
        text = sum(job.part_bytes[part] // 2 * wide for part in parts_in_steps(config))  # not part of the base
        disk["quantised base"] = train.steady.by_kind.get("weights", 0) - text + train.host_bytes
        if config.memory.host_weights == "mapped" or config.tabulates_modulations:  # no levers' memory has them all
            parameters = config.model.architecture.parameter_count()
            disk["quantised base"] = int(parameters * config.precision.bytes_per_weight)
    denoiser = 2 * config.model.architecture.parameter_count()  # at 2 bytes per parameter
    sizes = {**job.part_bytes, config.model.denoiser: denoiser}
    files = config.model.files
    missing = (part.part for part in files.hub_parts() if part.weights and cached_folder(part) is None)
    return Estimate(
        job,
        size,
        counts,
        {name: size for name, size in host.items() if size},
        train.shared_bytes,
        {name: size for name, size in disk.items() if size},
        {part: (sizes[part] // 2 + files.unread.get(part, 0)) * files.hub_bytes for part in missing},
    )


def counts_of(config: TrainConfig) -> DataCounts | None:
    """Count the images and prompts of the data set; None if it is missing or cannot be read."""
    if config.concept is not None:
        return DataCounts.from_plan(config, make_plan(config, []))
    paths = [source.path for source in config.sources]
    try:
        if config.pictures.streamed:
            return DataCounts.from_plan(config, stream_plan(config))
        if any(path.startswith("demo:") or not Path(path).exists() for path in paths):
            return None
        images = scan_sources(config.pictures).images
        small = find_too_small(images, config.pictures, config.model.architecture.multiple)
        lengths = prompt_lengths(config, download=False)
        plan = make_plan(config, drop_rejected(images, small), config.model.inpaints, lengths)
        found = DataCounts.from_plan(config, plan)
    except UserError:  # the run itself reports problems of the data
        return None
    if not isinstance(config.prior, ClassImages):
        return found
    generated, pixels = config.prior.count, config.resolution**2
    entries = 1 + config.model.inpaints  # each with a hole
    return DataCounts(
        found.images + generated,
        found.prompts + 1,
        found.pixels + generated * pixels * entries,
        found.samples + generated,
    )


def cached_step(config: TrainConfig, simulated: Callable[[], StepReport], limit: int | None = None) -> StepReport:
    """Return the cached prediction of a step with square images, or make it, as on an L4, by ``simulated``.

    Where it ran out of memory is cached too; without a limit the whole prediction is needed. Raises OutOfMemory if the
    step takes more than ``limit`` bytes.
    """
    file = cache_file(config, L4, square_size(config), "-step")
    cached = read_json_or_none(file) or {}
    if "peak" in cached:
        return StepReport.from_json(cached)
    if limit is not None and "exceeds" in cached and cached["exceeds"] > limit:
        raise OutOfMemory(cached["exceeds"])
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        report = simulated()
    except OutOfMemory as error:
        write_json(file, {"exceeds": error.bytes}, shared=True)
        raise
    write_json(file, report.as_json(), shared=True)
    return report


def attention_of(config: TrainConfig, capability: tuple[int, int]) -> str:
    """Return the attention kernel of a device, all that a prediction without workspaces depends on, with what it does
    in the deterministic mode."""
    kernel = kernel_of(config, capability)
    return f"{kernel}, {most_multiprocessors(capability)}" if config.speed.deterministic else kernel


def cache_file(config: TrainConfig, capability: tuple[int, int], size: Size, kind: str = "") -> Path:
    """Name the file of a cached prediction by a hash of everything that it depends on; ``kind`` distinguishes
    predictions of parts of the job."""
    options = config.model_dump(mode="json", by_alias=True, exclude=set(IRRELEVANT))
    if config.train.uses_fsdp(simulated_process_count()):
        options["processes"] = simulated_process_count()
    versions = [VERSION, __version__, *map(version_or_none, LIBRARIES)]
    attention = attention_of(config, capability)
    about = json.dumps([options, attention, size, versions], sort_keys=True)
    key = hashlib.sha256(about.encode()).hexdigest()[:24]
    return config.output.cache_folder / "estimates" / f"{key}{kind}.json"
