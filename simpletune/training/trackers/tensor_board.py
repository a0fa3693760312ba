"""Write TensorBoard event files under profiles/, next to the profiler's traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.system.options import Json
from simpletune.system.shell import quote_command

if TYPE_CHECKING:
    from PIL.Image import Image


class TensorBoard:
    """Write a run's event file.

    Args:
        folder: the run's folder under TensorBoard's logdir.
        start: step that a resumed run starts from; later entries are dropped.
        config: the run's configuration, logged as text.
    """

    def __init__(self, folder: Path, start: int, config: Json):
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.start = folder, start
        self._writer = SummaryWriter(folder, purge_step=start or None)
        self._text("config", config, start)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, image: Image) -> None:
        import numpy as np

        pixels = np.asarray(image.convert("RGB"))
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def report(self, file: Path) -> None:
        self._writer.add_text("report", f"`{file}`", self.start)  # its path: TensorBoard cannot show pages

    def summary(self, values: Json) -> str:
        self._text("summary", values, values.get("steps", self.start))
        return quote_command("tensorboard", "--logdir", self.folder.parent)

    def close(self, failed: bool) -> None:
        try:
            self._writer.flush()  # raises what failed in the writer's thread, which closing alone would not report
        finally:
            self._writer.close()

    def _text(self, name: str, values: Json, step: int) -> None:
        lines = json.dumps(values, indent=2).splitlines()
        self._writer.add_text(name, "\n".join(f"    {line}" for line in lines), step)
