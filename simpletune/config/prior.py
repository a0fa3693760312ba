"""Prior preservation: keep what the base knows about a class while a subject of it is learned (arXiv:2208.12242)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.system.options import Option, Problem

if TYPE_CHECKING:
    from simpletune.adapters.methods import Adapter
    from simpletune.data.sources.multi_source import Data
    from simpletune.engine.memory import Memory

Weight = Annotated[float, Field(gt=0, le=1000)]
Prompt = Annotated[str, Field(min_length=1)]


class PriorOption(Option):
    """Fields and capabilities of all kinds. Members define ``method`` (the tag)."""

    if TYPE_CHECKING:  # every member declares it, so that its tag comes first in JSON
        method: str

    predicts: ClassVar[bool] = False
    """Whether a training step also computes the base's predictions, with the adapter off."""

    def class_prompt(self, caption: str) -> str:
        """Return the prompt of the class for a picture with this caption; ``TypeError`` if there is none."""
        raise TypeError(f"{self.method} has no class prompt")

    @property
    def second_pass(self) -> bool:
        """Whether every micro-batch has a second pass, with the prompt of the class."""
        return False

    @property
    def prediction_weights(self) -> tuple[float, float]:
        """The factor of the loss against the base's predictions, and of that loss outside of masks."""
        return 0.0, 0.0

    def rules(self, adapter: Adapter, data: Data, memory: Memory) -> Iterator[Problem]:
        """Check what the method needs of other options."""
        yield from ()


class NamedClass(PriorOption):
    """Shared by the members that have a class prompt."""

    prompt: Prompt | None
    trigger: Prompt | None

    def class_prompt(self, caption: str) -> str:
        """Put the class prompt in place of the trigger; without a trigger in the caption, in place of the whole
        caption."""
        assert self.prompt is not None
        known = self.trigger is not None and self.trigger in caption
        return caption.replace(self.trigger or "", self.prompt) if known else self.prompt

    def rules(self, adapter: Adapter, data: Data, memory: Memory) -> Iterator[Problem]:
        """Refuse a class prompt that also names the subject: it cannot both change and stay."""
        if self.prompt is None:
            if self.trigger is not None:
                yield Problem(
                    "prior.trigger", f"{self.trigger!r} is replaced by prior.prompt, which is null. Name the class"
                )
            return
        of_subject = {source.prompt for source in data.members if not source.regularization} - {None}
        if self.prompt in of_subject:
            yield Problem(
                "prior.prompt",
                f"{self.prompt!r} is also the prompt of the pictures to learn. Name the class without the subject's "
                "rare word",
            )
        if self.trigger is not None and self.trigger in self.prompt:
            yield Problem(
                "prior.trigger",
                f"{self.trigger!r} is in prior.prompt {self.prompt!r}, so the class would be that of the subject "
                "alone. Name the class without it",
            )


class NoPrior(PriorOption):
    """Train on sources with ``regularization`` as on all others."""

    method: Literal["none"] = "none"
    """No prior preservation beyond data sources with regularization."""


class BasePrediction(NamedClass):
    """Train towards the base's own prediction, with the adapter off. Needs no class pictures and causes no drift."""

    method: Literal["base_prediction"] = "base_prediction"
    """Prior preservation by the base's own prediction, with the adapter off (differential output preservation, prior
    prediction). Needs no class pictures. For adapters such as LoRA only."""
    prompt: Prompt | None = None
    """Class prompt, such as "a photo of a dog". Every picture gets a second pass with it, in which the adapter must
    predict what the base does. null: no second pass; only data sources with regularization count, whose pictures then
    give the inputs, and the base's predictions the targets."""
    trigger: Prompt | None = None
    """Words in the captions that the class prompt replaces, such as "sks dog" by "dog"; null: it replaces captions as
    a whole."""
    weight: Weight = 1.0
    """Factor of this loss (prior loss weight, lambda); of a regularization source it multiplies the source's own."""
    outside_mask: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Factor of this loss outside of the pictures' masks, with their own prompts (masked prior preservation weight):
    the background stays as the base would draw it."""

    predicts: ClassVar[bool] = True

    @property
    def second_pass(self) -> bool:
        return self.prompt is not None

    @property
    def prediction_weights(self) -> tuple[float, float]:
        return self.weight, self.outside_mask

    def rules(self, adapter: Adapter, data: Data, memory: Memory) -> Iterator[Problem]:
        """Refuse what changes the base, what has no effect, and a second pass where gradients are freed."""
        if adapter.trains_base:
            yield Problem(
                "prior.method",
                f"base_prediction needs the base, which adapter.method {adapter.method} overwrites; a frozen "
                "copy would take the memory of the whole model again. Use class_pictures, or adapter.method lora",
            )
        masked = any(source.mask is not None and source.inpainting_mask == "random" for source in data.members)
        if self.outside_mask and not masked:
            own = any(source.inpainting_mask == "own" for source in data.members)
            why = "the masks are the holes, and weigh no loss. Use 0"
            why = why if own else "no data source has masks. Set data.mask, or use 0"
            yield Problem("prior.outside_mask", f"{self.outside_mask:g}, but {why}")
        elif not (self.prompt or self.outside_mask or any(source.regularization for source in data.members)):
            yield Problem(
                "prior.prompt",
                "null, and no data source has regularization, so nothing would be preserved. Name the class, such as "
                '"a photo of a dog"',
            )
        if self.second_pass and memory.optimizer_in_backward:
            yield Problem(
                "prior.prompt",
                "the second pass accumulates gradients, but memory.optimizer_in_backward keeps none. Use "
                "optimizer_in_backward false, or prior.method class_pictures",
            )
        yield from super().rules(adapter, data, memory)


class ClassImages(NamedClass):
    """Train on class pictures, which the base draws before training, beside the subject's pictures."""

    method: Literal["class_pictures"] = "class_pictures"
    """Prior preservation by pictures of the class (regularization images, DreamBooth), which the base draws before
    training and which are kept in output.cache. For every adapter, and for full fine-tuning."""
    prompt: Prompt
    """Class prompt to draw and to train with, such as "a photo of a dog"."""
    trigger: Prompt | None = None
    """Words in the captions that the class prompt replaces, such as "sks dog" by "dog": the class pictures then cycle
    through the subject's captions. null: they all have the class prompt."""
    count: Annotated[int, Field(ge=1, le=100_000)] = 100
    """Number of class pictures (num_class_images); missing ones are drawn. An epoch shows each of them once: choose
    data.repeats so that it shows equally many of the subject."""
    weight: Weight = 1.0
    """Factor of their loss (prior loss weight, lambda)."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 28
    """Sampling steps of a class picture."""
    guidance: Annotated[float, Field(ge=1, le=100)] = 7.0
    """Guidance scale (CFG) of a class picture; 1: no guidance."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the first class picture; each next one has the next seed."""


Prior = Annotated[NoPrior | BasePrediction | ClassImages, Field(discriminator="method")]
