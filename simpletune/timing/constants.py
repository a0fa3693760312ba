"""What is known of a device's speed, and the file that ``simpletune calibrate`` keeps it in. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from simpletune.options import Option, UserError
from simpletune.system.atomic import write_json
from simpletune.timing.grid import Grid

VERSION = 1
FOLDER = "calibrations"


class Composite(Option):
    """A whole step of a small model, timed, and what it consists of."""

    seconds: float
    """Of the step."""
    host: dict[str, int]
    """How often the host does what."""
    work: list[tuple[str, str, list[int], int]]
    """Kind, type, extents and number of the device's operations."""


class Constants(Option):
    """Measured speeds of one device."""

    version: int
    """Of this format."""
    device: str
    """The device's name: CUDA's, or the processor's."""
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
    """Seconds that the host takes beside the operation itself, by what it does: an operation, a module call, ..."""
    composites: list[Composite] = Field(default_factory=list)
    """Whole steps, that of the smallest model first."""
    rates: dict[str, float] = Field(default_factory=dict)
    """Single figures, such as slow-downs of copies and products beside each other, and the reference load's seconds."""
    failed: dict[str, str] = Field(default_factory=dict)
    """What could not be measured here, and why."""


def file_of(folder: Path, device: str, threads: int, kind: str) -> Path:
    """Name the file of a device's constants.

    Args:
        folder: of the cache.
        device: the device's name.
        threads: which tell apart a CPU's.
        kind: cuda or cpu.
    """
    name = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    return folder / FOLDER / f"{name}{f'-{threads}-threads' if kind == 'cpu' else ''}.json"


def write(file: Path, constants: Constants) -> None:
    """Write the file of a device's constants."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, constants.model_dump(mode="json"), shared=True)


def read(file: Path) -> Constants:
    """Read the file of a device's constants.

    Raises:
        UserError: it cannot be read, or was written in another format.
    """
    try:
        return Constants.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(f"{file}: not a calibration of this version ({reason}). Run simpletune calibrate") from None
