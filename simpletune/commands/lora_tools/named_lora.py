"""The LoRA that a command names: a file, a run, one of its checkpoints, or a name on the hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletune.commands.lora_tools.metadata import find_run_config
from simpletune.config.schema import TrainConfig
from simpletune.runs.folder import SUMMARY, read_json_or_none
from simpletune.runs.weights_names import find_lora


@dataclass(frozen=True)
class NamedLora:
    """Describe a LoRA that a command names."""

    file: Path  # weights file
    run: Path | None  # folder of the run that made it, if the name was a run
    weight: float = 1.0  # strength
    step: int | None = None  # step of the run's checkpoint; None for the run's result

    def config(self, metadata: Mapping[str, str]) -> TrainConfig | None:
        """Return the configuration that made the LoRA, if known."""
        return find_run_config(self.run, metadata)

    @property
    def name(self) -> str:
        """Return the run's or the file's name, without a path."""
        return self.title if self.run else self.file.name

    @property
    def title(self) -> str:
        """Return a short name: the run's, with the checkpoint's step, or the file's."""
        at = f"-step-{self.step}" if self.step is not None else ""
        return f"{self.run.resolve().name}{at}" if self.run else self.file.stem

    @property
    def steps(self) -> int | None:
        """Return the number of training steps, if known."""
        summary = read_json_or_none(self.run / SUMMARY) if self.run else None
        return self.step if self.step is not None else summary["steps"] if summary else None


def named_lora(text: str, strength: bool = False) -> NamedLora:
    """Find a LoRA by file, run, checkpoint or hub name."""
    remedy = "Extract a LoRA from its difference from the base: simpletune extract BASE TUNED"
    named = find_lora(text, remedy=remedy, strength=strength)
    assert named.lora is not None
    return NamedLora(named.lora, named.run, 1.0 if named.scale is None else named.scale, named.step)
