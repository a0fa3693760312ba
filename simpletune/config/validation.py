"""The section ``validation``: pictures and loss by which a run is judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from simpletune.models.shared.buckets import STEP
from simpletune.system.options import Option, Problem


def _share_or_number(split: float) -> float:
    if split <= 0 or split >= 1 and not isinstance(split, int):
        raise ValueError(
            f"{split} is neither a share between 0 and 1 nor a whole number of pictures. Use 0.1, 20 or null"
        )
    return split


class EarlyStop(Option):
    """End training when the validation loss no longer falls."""

    patience: Annotated[int, Field(ge=1)] = 3
    """Evaluations in a row without a lower validation loss, after which training ends. An evaluation counts as lower if
    it is lower than the best so far by more than the standard error of their paired differences."""
    min_steps: Annotated[int, Field(ge=0)] = 0
    """Steps before which training does not end."""


class Validation(Option):
    """Draw pictures and compute the validation loss to show what the run has changed."""

    prompts: list[Annotated[str, Field(min_length=1)]] | None = None
    """Prompts to draw; null: the caption of the first sample; empty list: draw nothing."""
    images: list[Annotated[str, Field(min_length=1)]] | None = None
    """Inpainting: the picture to paint into for each of the prompts; null: with a model that inpaints, the pictures of
    the validation loss, held out if there are any."""
    masks: list[Annotated[str, Field(min_length=1)]] | None = None
    """The mask of each of the images, of its shape, white where it is painted; null: with a model that inpaints, the
    pictures' own masks if data.inpainting_mask is own, otherwise the middle half of each side."""
    negative_prompt: str | None = ""
    """Negative prompt for guidance. null, the default for SDXL: none, for which diffusers' pipeline takes zeros, unless
    the model's folder says that it takes the empty text, as other families do."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Steps between validations; null: validate only before and after training."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] = 0
    """Seed of the initial noise; prompt number n uses seed + n."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 20
    """Number of sampling steps. Default: 20, for FLUX.2 klein, Z-Image and Qwen-Image 50, for bases that draw in
    few steps theirs (Z-Image-Turbo 8)."""
    guidance: Annotated[float, Field(ge=1)] = 4.5
    """Classifier-free guidance scale; 1 disables guidance. Default: 4.5 for SD3, 5 for SDXL and Z-Image, 7.5 for SD
    1.5 and 2, 4 for FLUX.2 klein and Qwen-Image, 1 for bases that draw in few steps. diffusers' pipeline of Z-Image
    takes 1 less."""
    width: Annotated[int, Field(ge=STEP)] | None = None
    """Width in pixels; null: the training resolution."""
    height: Annotated[int, Field(ge=STEP)] | None = None
    """Height in pixels; null: the training resolution."""
    loss_samples: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] = "auto"
    """Number of fixed (picture, noise level, noise) samples on which the model is evaluated before training, at every
    validation and checkpoint, and at the end: eval_loss, and drift, the change of the prediction against the base.
    auto: as many as take at most 2% of the run's forward passes, from 4 to 16; 0: do not evaluate. Without a split,
    eval_loss is computed on training pictures and also falls while the model overfits; with one, it is the validation
    loss."""
    class_prompt: Annotated[str, Field(min_length=1)] | None = None
    """Prompt of the subject's class without the trigger, such as "a photo of a dog": drift is measured for it, too."""
    unrelated_prompts: list[Annotated[str, Field(min_length=1)]] = [
        "a street in the rain at night",
        "a bowl of fruit on a wooden table",
    ]
    """Prompts that have nothing to do with the training pictures, for which drift is measured; empty list: none."""
    split: Annotated[float | int, AfterValidator(_share_or_number)] | None = None
    """Pictures to hold out from training and compute eval_loss on. A share between 0 and 1 holds out each picture by
    the hash of its bytes: the number is close to the share, and adding pictures moves none. A whole number N holds out
    the N pictures with the lowest hashes; adding pictures may move some. Copies of a picture stay together. null: hold
    out none."""
    early_stop: EarlyStop | None = None
    """End training when the validation loss no longer falls, which needs a split; null: train all steps."""

    def rules(self) -> Iterator[Problem]:
        """Check that held-out pictures are evaluated, that early stopping has a validation loss, and that every prompt
        has its picture and mask."""
        count = len(self.prompts or ())
        for name, other in (("images", "masks"), ("masks", "images")):
            given = getattr(self, name)
            if given is not None and getattr(self, other) is None:
                yield Problem(f"validation.{name}", f"needs validation.{other}, one for each of them. Add {other}")
            elif given == []:
                yield Problem(f"validation.{name}", "is empty. Leave it out, or give one for each prompt")
            elif given is not None and len(given) != count:
                yield Problem(
                    f"validation.{name}",
                    f"{len(given)} of them for {count} in validation.prompts. Give one for each prompt, in order",
                )
        if self.split is not None and self.loss_samples == 0:
            yield Problem(
                "validation.split",
                f"{self.split} holds out pictures, but validation.loss_samples 0 computes no loss on them. "
                "Use a larger loss_samples, or split null",
            )
        if self.early_stop is not None and self.split is None:
            yield Problem(
                "validation.early_stop",
                "without validation.split there is no validation loss to decide by. Set split, such as 0.1, or remove "
                "early_stop",
            )
