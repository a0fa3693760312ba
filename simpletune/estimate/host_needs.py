"""Predict what a run needs besides GPU memory: host memory, disk and download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletune.config.prior import ClassPictures
from simpletune.config.schema import TrainConfig
from simpletune.data.samples import drop_rejected
from simpletune.data.sources.multi_source import scan_sources, too_small
from simpletune.estimate.disk_needs import NOTHING, DataCounts, disk_needs
from simpletune.estimate.simulate.simulate_stages import JobReport
from simpletune.estimate.simulate.simulate_text import parts_in_steps
from simpletune.models.shared.sources import hub_parts
from simpletune.models.shared.t5_layers import CHUNK_BYTES
from simpletune.stages.plan_data import make_plan
from simpletune.stages.stream_plan import stream_plan
from simpletune.system.hub import in_cache
from simpletune.system.options import UserError

LIBRARIES = int(1.0 * 2**30)  # bytes: a process took 0.9 GiB after its imports (Python 3.11, torch 2.13.0 CPU)
CUDA_LIBRARIES = 2 * 2**30  # bytes of host memory for the CUDA libraries: an allowance, not measured


@dataclass(frozen=True)
class HostNeeds:
    """Needs of a run in bytes, by use.

    Args:
        host: host memory at its peak.
        disk: what the run writes.
        download: missing from the hub's cache, by part of the model.
        counts: counts of the data set; None: it could not be read.
        shared: part of ``host`` that all processes of a machine share.
    """

    host: Mapping[str, int]
    disk: Mapping[str, int]
    download: Mapping[str, int]
    counts: DataCounts | None
    shared: int = 0


def needs_of(config: TrainConfig, job: JobReport) -> HostNeeds:
    """Predict a run's needs.

    Args:
        config: configuration of the run; demo names may be unresolved.
        job: the simulated run.
    """
    counts = counts_of(config)
    trained, state = job.train.trained_bytes, job.train.state_bytes
    disk = {need.what: need.bytes for need in disk_needs(config, counts=counts or NOTHING)}
    host = {
        "libraries": LIBRARIES + CUDA_LIBRARIES,
        "levers (pinned)": job.train.host_bytes,
        "trained weights beside their average": trained if config.ema or config.optimizer.averages else 0,
        "prompts or a checkpoint in transit": max(min(CHUNK_BYTES, disk["cached prompts"]), trained, state),
    }
    disk["quantised base"] = quantised_base(config, job)
    return HostNeeds(
        {name: size for name, size in host.items() if size},
        {name: size for name, size in disk.items() if size},
        download(config, job),
        counts,
        job.train.shared_bytes,
    )


def counts_of(config: TrainConfig) -> DataCounts | None:
    """Count the pictures and prompts of the data set; None if it is missing or cannot be read."""
    paths = [source.path for source in config.data.members]
    try:
        if config.data.streamed:
            return DataCounts.of_stream(config, stream_plan(config))
        if any(path.startswith("demo:") or not Path(path).exists() for path in paths):
            return None
        pictures = scan_sources(config.data).pictures
        small = too_small(pictures, config.data, config.model.multiple)
        found = DataCounts.of(make_plan(config, drop_rejected(pictures, small)))
    except UserError:  # the run itself reports problems of the data
        return None
    if not isinstance(config.prior, ClassPictures):
        return found
    drawn, pixels = config.prior.count, config.data.resolution**2
    return DataCounts(found.pictures + drawn, found.prompts + 1, found.pixels + drawn * pixels, found.samples + drawn)


def quantised_base(config: TrainConfig, job: JobReport) -> int:
    """Estimate the size of the quantised base in the cache, about that of its weights on device and host."""
    if not (config.memory.cache_quantised and config.precision.cacheable):
        return 0
    wide = config.precision.encoder_dtype().itemsize
    text = sum(job.part_bytes[part] // 2 * wide for part in parts_in_steps(config))  # not part of the base
    return job.train.steady.by_kind.get("weights", 0) - text + job.train.host_bytes


def download(config: TrainConfig, job: JobReport) -> dict[str, int]:
    """Estimate the download of each missing part, at 2 bytes per parameter."""
    sizes = {**job.part_bytes, config.model.denoiser: 2 * config.model.parameter_count()}
    return {part.part: sizes[part.part] for part in hub_parts(config.model) if part.weights and in_cache(part) is None}
