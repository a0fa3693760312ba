"""What people and files are told of a model family: its names, its defaults and its licence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict


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


@dataclass(frozen=True)
class Words:
    """A family's words.

    Args:
        title: its name for messages.
        pipeline: diffusers' pipeline.
        resolution: the default of ``data.resolution``, in pixels.
        guidance: the default of ``validation.guidance``.
        negative_prompt: the default of ``validation.negative_prompt``.
        published_as: a pattern of the last part of names under which its models are published, where nothing else tells
            the family.
        no_hypernetwork: why no hypernetwork is trained on it, and what to use instead; None: one can be.
        templates: the shipped configuration that ``init`` starts from, by what the pictures teach (subject, style,
            general); ``{card}`` stands for the size of a card, such as 8gb. Empty: none ships.
        licence: returns the licence of a known Hub name, as fields of a model card; None for another.
    """

    title: str
    pipeline: DiffusersPipeline
    resolution: int
    guidance: float
    negative_prompt: str | None = ""
    published_as: str = "(?!)"
    no_hypernetwork: str | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    licence: Callable[[str], Licence | None] = lambda hub_name: None
