"""The section ``tracking``: where metrics and pictures are logged."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simpletune.system.options import Option


class Tracking(Option):
    """Log metrics and pictures to trackers. A failing tracker never fails the run."""

    tensorboard: bool = True
    """Write TensorBoard event files under output.profiles."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases. offline: write into the run's folder for a later `wandb sync`; online: upload during training,
    or continue offline without an API key, which it never asks for."""
    wandb_project: Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")] = "simpletune"
    """Project in wandb."""
    trackio: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    """Project in trackio, on this machine or in the Space that TRACKIO_SPACE_ID names; null: none. Needs trackio."""
    notify: Literal["end", "pictures"] = "end"
    """What is posted to the URL in SIMPLETUNE_NOTIFY_URL, if set. end: that the run finished, stopped or failed;
    pictures: the validation pictures, too."""
