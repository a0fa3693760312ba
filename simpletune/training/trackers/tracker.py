"""What every tracker offers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from simpletune.options import Json

if TYPE_CHECKING:
    from PIL.Image import Image


class Tracker(Protocol):
    """Shows a run: any of its methods may fail, which switches it off (``Trackers``)."""

    @property
    def place(self) -> str:
        """Where to look, in words."""

    def config(self, values: Json) -> None:
        """Log the run's configuration, once."""

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log numbers at a step."""

    def picture(self, step: int, name: str, image: Image) -> None:
        """Log a picture at a step."""

    def summary(self, values: Json) -> None:
        """Log what the run was, at its end."""

    def report(self, file: Path) -> None:
        """Log the run's report, an HTML page of its own."""

    def close(self, failed: bool) -> None:
        """Flush and close."""
