"""The LoRA that a command names: a file, a run, one of its checkpoints, or a name on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletune.commands.lora_tools.metadata import EMBEDDED
from simpletune.config.load import read_saved
from simpletune.config.schema import TrainConfig
from simpletune.runs.folder import CONFIG, SUMMARY, read_json_or_none
from simpletune.runs.weights_names import find_lora
from simpletune.system.console import say


@dataclass(frozen=True)
class NamedLora:
    file: Path
    run: Path | None  # that made it, if the name was a run
    weight: float = 1.0  # strength
    step: int | None = None  # step of the run's checkpoint; None for the run's result

    def config(self, metadata: Mapping[str, str]) -> TrainConfig | None:
        """The configuration that made the LoRA: the run's, else the one in the file's header, else None."""
        text: str | bytes | None = metadata.get(EMBEDDED)
        if self.run is not None and (self.run / CONFIG).is_file():
            text = (self.run / CONFIG).read_bytes()
        if text is None:
            return None
        try:
            return read_saved(text)
        except ValueError:
            say("this LoRA's configuration is from another version of simpletune: the header omits details of the run")
            return None

    @property
    def name(self) -> str:
        """The run's or the file's name, without a path."""
        return self.title if self.run else self.file.name

    @property
    def title(self) -> str:
        """A short name: the run's, with the checkpoint's step, or the file's."""
        at = f"-step-{self.step}" if self.step is not None else ""
        return f"{self.run.resolve().name}{at}" if self.run else self.file.stem

    @property
    def steps(self) -> int | None:
        """Number of training steps, if known."""
        summary = read_json_or_none(self.run / SUMMARY) if self.run else None
        return self.step if self.step is not None else summary["steps"] if summary else None


def named_lora(text: str, strength: bool = False) -> NamedLora:
    """Find a LoRA by file, run, checkpoint or hub name."""
    remedy = "Extract a LoRA from its difference from the base: simpletune extract BASE TUNED"
    named = find_lora(text, remedy=remedy, strength=strength)
    assert named.lora is not None
    return NamedLora(named.lora, named.run, 1.0 if named.scale is None else named.scale, named.step)
