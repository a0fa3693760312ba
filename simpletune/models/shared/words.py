"""What people and files are told of a model family: its names, its defaults and its licence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypedDict


class Licence(TypedDict, total=False):
    """Licence fields of a model card's front matter, with the Hub's names."""

    license: str
    license_name: str
    license_link: str


class DiffusersPipeline(NamedTuple):
    """diffusers' pipeline of a family."""

    name: str  # of its class
    tag: str  # on the Hub
    inpainting: str | None = None  # class of the pipeline of models that inpaint; None: the family has none
    negative_prompt: bool = True  # whether it takes one; if not, guidance leads away from the empty text
    reads_embeddings: bool = False  # whether it loads embeddings of new tokens (textual inversion)
    guidance: str = "guidance_scale"  # the argument of its call that has the scale of guidance
    guidance_offset: float = 0.0  # what its scale is more than that of classifier-free guidance


class FewSteps(NamedTuple):
    """Models that draw in a few steps, which ordinary training undoes. Nothing in their files tells them."""

    pattern: str  # occurs in the last part of their names; a group ``steps`` has their number, where names have it
    title: str
    steps: int  # that pictures are drawn in
    guidance: float = 1.0  # and with; 1: none
    assistant: str | None = None  # the Hub name of a LoRA to train under, if one is published


class PublicBase(NamedTuple):
    """A public model of a family, as a person chooses one."""

    name: str  # on the Hub
    title: str
    parameters: float  # of its denoiser, in billions
    parts_gib: tuple[float, float, float]  # of what training downloads: text encoders, denoiser, autoencoder
    licence: str  # its name
    commercial: Literal["yes", "no", "limit"]  # whether its licence allows commercial use
    terms: str  # of commercial use, as the predicate of a sentence
    gated: bool = False  # whether the Hub lets only accounts that have accepted the licence download it
    templates: Mapping[str, str] | None = None  # its own instead of the family's
    measured: bool = True  # whether a training of it ran on a card, so that it may be suggested first

    @property
    def download_gib(self) -> float:
        """What training downloads."""
        return sum(self.parts_gib)


@dataclass(frozen=True)
class Words:
    """A family's words.

    Args:
        title: its name for messages.
        pipeline: diffusers' pipeline.
        resolution: the default of ``data.resolution``, in pixels.
        guidance: the default of ``validation.guidance``.
        negative_prompt: the default of ``validation.negative_prompt``.
        steps: the default of ``validation.steps``.
        few_steps: its models that draw in few steps, for ``few_steps_of``.
        edits: whether its published models also draw after reference pictures, which nothing here trains.
        published_as: a pattern of the last part of names under which its models are published, where nothing else tells
            the family.
        no_hypernetwork: why no hypernetwork is trained on it, and what to use instead; None: one can be.
        templates: the shipped configuration that ``init`` starts from, by what the pictures teach (subject, style,
            general); ``{card}`` stands for the size of a card, such as 8gb. Empty: none ships.
        licence: returns the licence of a known Hub name, as fields of a model card; None for another.
        bases: the public models to choose from, the recommended one first.
    """

    title: str
    pipeline: DiffusersPipeline
    resolution: int
    guidance: float
    negative_prompt: str | None = ""
    steps: int = 20
    few_steps: tuple[FewSteps, ...] = ()
    edits: bool = False
    published_as: str = "(?!)"
    no_hypernetwork: str | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    licence: Callable[[str], Licence | None] = lambda hub_name: None
    bases: tuple[PublicBase, ...] = ()

    def templates_of(self, pretrained: str) -> Mapping[str, str]:
        """Return the ``templates`` for a base of the family."""
        base = next((base for base in self.bases if base.name == pretrained), None)
        return self.templates if base is None or base.templates is None else base.templates

    def few_steps_of(self, name: str, said: bool | None = None) -> FewSteps | None:
        """Return what is known of a base that draws in few steps; None for another. It tells by the base's name, if
        nobody ``said`` whether it does."""
        last = re.split(r"[/\\]", name.rstrip("/\\"))[-1]
        found = [(each, re.search(each.pattern, last)) for each in self.few_steps if said is not False]
        kind, match = next(((each, match) for each, match in found if match), (None, None))
        if kind is None or match is None:
            return self.few_steps[0] if said else None
        return kind._replace(steps=int(match.groupdict().get("steps") or kind.steps))


def by_card(name: str) -> Mapping[str, str]:
    """Return ``templates`` that are the same for whatever the pictures teach."""
    return dict.fromkeys(("subject", "style", "general"), name)
