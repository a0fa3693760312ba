"""A device's speed constants, and the file in which ``simpletune calibrate`` stores them. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from simpletune.estimate.timing.grid import Grid
from simpletune.system.atomic import write_json
from simpletune.system.options import Option, UserError

VERSION = 1
FOLDER = "calibrations"


class Composite(Option):
    """A timed whole step of a small model, and its operations."""

    seconds: float
    """Seconds of the step."""
    host: dict[str, int]
    """How often the host does each of its tasks."""
    work: list[tuple[str, str, list[int], int]]
    """The device's operations: kind, type, extents and number."""


class Constants(Option):
    """Measured speeds of one device."""

    version: int
    """Version of this format."""
    device: str
    """The device's name, from CUDA or the processor."""
    kind: str
    """cuda or cpu."""
    capability: list[int] | None
    """CUDA compute capability; null on a CPU."""
    memory_bytes: int | None
    """The card's memory; null on a CPU."""
    threads: int
    """Threads that torch computes with on the CPU."""
    date: str
    """When it was measured: YYYY-MM-DD."""
    versions: str
    """Versions of the libraries."""
    seconds: float
    """How long measuring took."""
    grids: dict[str, Grid]
    """Seconds on the device by kind of operation and type, such as product.bf16."""
    host: dict[str, float] = Field(default_factory=dict)
    """The host's overhead in seconds, by task: an operation, a module call, ..."""
    composites: list[Composite] = Field(default_factory=list)
    """Whole steps, the smallest model's first."""
    rates: dict[str, float] = Field(default_factory=dict)
    """Single figures, such as how much concurrent copies and products slow down, and the reference load's seconds."""
    failed: dict[str, str] = Field(default_factory=dict)
    """What could not be measured here, and why."""


def constants_file(folder: Path, device: str, threads: int, kind: str) -> Path:
    """Name the file of a device's constants.

    Args:
        folder: the cache's folder.
        device: the device's name.
        threads: the number of threads, part of the name for a CPU.
        kind: cuda or cpu.
    """
    name = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    return folder / FOLDER / f"{name}{f'-{threads}-threads' if kind == 'cpu' else ''}.json"


def write_constants(file: Path, constants: Constants) -> None:
    """Write the file of a device's constants."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, constants.model_dump(mode="json"), shared=True)


def read_constants(file: Path) -> Constants:
    """Read the file of a device's constants.

    Raises:
        UserError: it cannot be read, or was written in another format.
    """
    try:
        return Constants.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(f"{file}: not a calibration of this version ({reason}). Run simpletune calibrate") from None
