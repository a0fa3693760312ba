"""Define the interface of trackers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from simpletune.system.options import Json

if TYPE_CHECKING:
    from PIL.Image import Image


class Tracker(Protocol):
    """Log a run; ``Trackers`` disables a tracker whose method fails."""

    @property
    def place(self) -> str:
        """Describe where to view the run."""

    def config(self, values: Json) -> None:
        """Log the run's configuration, once."""

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log numbers at a step."""

    def picture(self, step: int, name: str, image: Image) -> None:
        """Log a picture at a step."""

    def summary(self, values: Json) -> None:
        """Log the summary at the end of the run."""

    def report(self, file: Path) -> None:
        """Log the run's HTML report."""

    def close(self, failed: bool) -> None:
        """Flush and close."""
