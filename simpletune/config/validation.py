"""Options of the pictures and the loss that show what a run changes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from simpletune.models.buckets import STEP
from simpletune.options import Option


def _share_or_number(split: float) -> float:
    if split <= 0 or split >= 1 and not isinstance(split, int):
        raise ValueError(
            f"{split} is neither a share between 0 and 1 nor a whole number of pictures. Use 0.1, 20 or null"
        )
    return split


class Validation(Option):
    """Draw pictures and compute the evaluation loss to show what the run has changed."""

    prompts: list[Annotated[str, Field(min_length=1)]] | None = None
    """Prompts to draw; null: the caption of the first sample; empty list: draw nothing."""
    negative_prompt: str = ""
    """Negative prompt for guidance."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Steps between validations; null: validate only before and after training."""
    seed: int = 0
    """Seed of the initial noise; prompt number n uses seed + n."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 20
    """Number of sampling steps."""
    guidance: Annotated[float, Field(ge=1)] = 4.5
    """Classifier-free guidance scale; 1 disables guidance. Default: 4.5 for SD3, 7.5 for SD 1.5 and 2."""
    width: Annotated[int, Field(ge=STEP, multiple_of=STEP)] | None = None
    """Width in pixels; null: the training resolution."""
    height: Annotated[int, Field(ge=STEP, multiple_of=STEP)] | None = None
    """Height in pixels; null: the training resolution."""
    eval_samples: Annotated[int, Field(ge=0, le=4096)] = 16
    """Number of fixed (picture, noise level, noise) samples that eval_loss averages over; 0: compute no loss. Without
    a split, eval_loss is computed on training pictures and also falls while the model overfits; with one, it is the
    validation loss."""
    split: Annotated[float | int, AfterValidator(_share_or_number)] | None = None
    """Pictures to hold out from training and compute eval_loss on. A share between 0 and 1 holds out each picture by
    the hash of its bytes: the number is close to the share, and adding pictures moves none. A whole number N holds out
    the N pictures with the lowest hashes; adding pictures may move some. Copies of a picture stay together. null: hold
    out none."""
