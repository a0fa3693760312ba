"""Write TensorBoard event files under profiles/, next to the profiler's traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.training.trackers.tracker import Json

if TYPE_CHECKING:
    from PIL.Image import Image


class TensorBoard:
    """Write a run's event file.

    Args:
        folder: the run's folder under TensorBoard's logdir.
        start: step that a resumed run starts from; later entries are dropped.
    """

    def __init__(self, folder: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.start = folder, start
        self._writer = SummaryWriter(folder, purge_step=start or None)

    @property
    def place(self) -> str:
        """Return the command that shows the run."""
        return f"tensorboard --logdir {self.folder.parent}"

    def config(self, values: Json) -> None:
        """Log the run's configuration as text."""
        self._text("config", values, self.start)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log numbers at a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, step: int, name: str, image: Image) -> None:
        """Log a picture at a step."""
        import numpy as np

        pixels = np.asarray(image.convert("RGB"))
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def summary(self, values: Json) -> None:
        """Log the summary as text."""
        self._text("summary", values, values.get("steps", self.start))

    def report(self, file: Path) -> None:
        """Log the path of the run's report, because TensorBoard cannot show pages."""
        self._writer.add_text("report", f"`{file}`", self.start)

    def close(self, failed: bool) -> None:
        """Flush and close.

        Raises:
            OSError: the writer's thread failed, which closing alone would not report.
        """
        try:
            self._writer.flush()
        finally:
            self._writer.close()

    def _text(self, name: str, values: Json, step: int) -> None:
        lines = json.dumps(values, indent=2).splitlines()
        self._writer.add_text(name, "\n".join(f"    {line}" for line in lines), step)
