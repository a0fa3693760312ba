"""TensorBoard: scalars, pictures and the configuration of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletune.config import TrainConfig

if TYPE_CHECKING:
    from PIL.Image import Image


class TensorBoard:
    """Writes a run's scalars and pictures; the library is loaded with the first of them.

    Args:
        folder: the run's folder under TensorBoard's logdir.
        config: shown as text.
        start: the step a resumed run starts from; what was logged beyond it is dropped.
    """

    def __init__(self, folder: Path, config: TrainConfig, start: int):
        self.folder, self.config, self.start = folder, config, start
        self._writer: Any = None

    @property
    def writer(self) -> Any:
        """The writer, made on first use."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.folder, purge_step=self.start or None)
            text = json.dumps(self.config.model_dump(mode="json", by_alias=True), indent=2)
            self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), self.start)
        return self._writer

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log numbers at a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def picture(self, step: int, name: str, image: Image) -> None:
        """Log a picture at a step."""
        import numpy as np

        self.writer.add_image(name, np.asarray(image), step, dataformats="HWC")

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
