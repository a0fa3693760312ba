"""What a run needs beside the card's memory: host memory, disk and download, by its configuration and a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletune.config.schema import TrainConfig
from simpletune.estimate.disk_needs import disk_needs
from simpletune.estimate.simulate_stages import JobReport
from simpletune.hub.fetch import in_cache
from simpletune.models.sd3_sources import hub_parts
from simpletune.models.t5_layers import CHUNK_BYTES
from simpletune.options import UserError

LIBRARIES = int(1.0 * 2**30)  # bytes: the process after its imports took 0.9 GiB (Python 3.11, torch 2.13.0 CPU)
CUDA_LIBRARIES = 2 * 2**30  # bytes that CUDA's libraries take in the host's memory: an allowance, not measured


@dataclass(frozen=True)
class Needs:
    """Bytes by what they are for.

    Args:
        host: of memory, as they come together at the worst moment.
        disk: that the run writes.
        download: by part of the model, what the hub has to give and its cache does not hold.
        pictures: of the data set; None: it is not here.
    """

    host: Mapping[str, int]
    disk: Mapping[str, int]
    download: Mapping[str, int]
    pictures: int | None


def needs_of(config: TrainConfig, job: JobReport) -> Needs:
    """What a run needs.

    Args:
        config: of the run, demo names resolved or not.
        job: of the simulation of it.
    """
    pictures = pictures_of(config)
    trained, state = job.train.trained_bytes, job.train.state_bytes
    disk = {need.what: need.bytes for need in disk_needs(config, pictures=pictures or 0)}
    host = {
        "libraries": LIBRARIES + CUDA_LIBRARIES,
        "levers (pinned)": job.train.host_bytes,
        "the weights beside their average": trained if config.ema else 0,
        "prompts or a checkpoint on their way": max(min(CHUNK_BYTES, disk["cached prompts"]), trained, state),
    }
    disk["quantised base"] = quantised_base(config, job)
    return Needs(
        {name: size for name, size in host.items() if size},
        {name: size for name, size in disk.items() if size},
        download(config, job),
        pictures,
    )


def pictures_of(config: TrainConfig) -> int | None:
    """How many pictures the data set has; None where it is not here, or cannot be read."""
    if config.data.path.startswith("demo:") or not Path(config.data.path).exists():
        return None
    try:
        return len(config.data.scan(Path(config.data.path)).pictures)
    except UserError:  # the run says what is wrong with it; here it is only counted
        return None


def quantised_base(config: TrainConfig, job: JobReport) -> int:
    """The quantised base that is kept for the next start: about what its weights take, wherever they are."""
    if not (config.memory.cache_quantised and config.precision.cacheable):
        return 0
    return job.train.steady.by_kind.get("weights", 0) + job.train.host_bytes


def download(config: TrainConfig, job: JobReport) -> dict[str, int]:
    """What the hub has to give, by part, in files of 2 bytes a parameter; nothing for parts that are here."""
    sizes = {**job.part_bytes, "transformer": 2 * config.model.parameter_count()}
    return {part.part: sizes[part.part] for part in hub_parts(config.model) if part.weights and in_cache(part) is None}
