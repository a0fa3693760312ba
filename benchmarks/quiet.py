"""The configuration of a run that a grid measures: in a scratch folder, without pictures, traces and TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simpletune.config.load import read_config
from simpletune.config.schema import TrainConfig

QUIET = ("profile.max_traces=0", "validation.prompts=[]", "tracking.tensorboard=false")
ALONE = (*QUIET, "validation.every=null", "checkpoint.every=null", "output.report=false")
"""Nothing but the training, and what is evaluated before and after it."""


def quiet_config(
    file: Path, scratch: Path | str, name: str, options: Sequence[str], more: Sequence[str] = QUIET
) -> TrainConfig:
    """Read a run's configuration.

    Args:
        file: the configuration.
        scratch: folder for runs and traces.
        name: of the run.
        options: overrides of the grid and of the user.
        more: overrides that have the last word.
    """
    places = [f"output.{part}={scratch}/{part}" for part in ("runs", "profiles")]
    return read_config(file, [*options, *more, *places, f"name={name}"])[0]
