"""The section ``concept``: train a slider, or erase a concept, from prompts alone.

At a strength s of the adapter, of 1 or -1, the model learns to predict for the target prompt what the base predicts
for ``neutral``, plus s guidance times the difference of its predictions for the two ends of the direction
(arXiv:2311.12092, eq. 8; with one end, the erasure of arXiv:2303.07345, eq. 7). Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from simpletune.system.options import Option, Problem, join_names

if TYPE_CHECKING:
    from simpletune.data.sources.source import Source

Prompt = Annotated[str, Field(min_length=1)]


class Direction(Option):
    """A direction between two prompts, along which the strength of the adapter moves pictures of a third."""

    target: str
    """Prompt whose pictures change, such as "a person"; the empty text ("") for all pictures."""
    positive: Prompt | None = None
    """What strength 1 moves the target towards, such as "a person, smiling"; null: unconditional."""
    negative: Prompt | None = None
    """What strength -1 moves it towards, such as "a person, frowning"; null: unconditional. With both, strengths 1 and
    -1 are trained in every step. With one, strength 1 alone: it adds what positive names, or erases what negative
    names."""
    unconditional: str = ""
    """Prompt in place of positive or negative where that is null."""
    neutral: str | None = None
    """Prompt that a target's prediction starts from; null: the target. An erasure that starts from the empty text ("")
    leaves less of the concept (LECO, ESD)."""
    preserved: list[Prompt] = []
    """Prompts for which the adapter must predict what the base does, at every strength. Each micro-batch takes one of
    them."""
    preserved_weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor of the loss for the preserved prompts."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor of the direction's loss, beside other directions."""
    guidance: Annotated[float, Field(gt=0, le=100)] = 1.0
    """How far strength 1 goes: the factor on the difference of the base's predictions for positive and negative."""

    @property
    def ends(self) -> tuple[str, str]:
        """The prompts that strengths 1 and -1 move towards."""
        return (self.positive or self.unconditional, self.negative or self.unconditional)

    @property
    def start(self) -> str:
        """The prompt whose prediction by the base the direction begins at."""
        return self.target if self.neutral is None else self.neutral

    @property
    def strengths(self) -> tuple[float, ...]:
        """The strengths that are trained."""
        return (1.0,) if self.positive is None or self.negative is None else (1.0, -1.0)

    @property
    def prompts(self) -> list[str]:
        """The distinct prompts that training reads; the unconditional is also what drawing is guided away from."""
        return list(dict.fromkeys([self.target, *self.ends, self.start, self.unconditional, *self.preserved]))

    def describe(self) -> str:
        """Describe the direction in words."""
        first, second = self.ends
        if len(self.strengths) == 2:
            text = f"{self.target!r}: strength 1 towards {first!r}, -1 towards {second!r}"
        elif self.negative is not None:
            text = f"{self.target!r}: strength 1 erases {second!r}"
        else:
            text = f"{self.target!r}: strength 1 adds {first!r}"
        start = "" if self.neutral is None else f", from {self.neutral!r}"
        kept = f"; preserves {join_names([repr(each) for each in self.preserved])}" if self.preserved else ""
        return f"{text}{start}, guidance {self.guidance:g}{kept}"

    def problems(self) -> Iterator[Problem]:
        """Check what would teach nothing, or cannot be learned; paths are fields."""
        first, second = self.ends
        if self.positive is None and self.negative is None:
            yield Problem("positive", "null, like negative, so there is no direction. Name one of them, or both")
        elif first == second:
            field = "positive" if self.negative is None else "negative"
            other = "positive" if None not in (self.positive, self.negative) else "unconditional"
            yield Problem(field, f"{first!r} equals {other}: between equal prompts there is no direction. Change one")
        if self.unconditional and None not in (self.positive, self.negative):
            yield Problem(
                "unconditional",
                f"{self.unconditional!r} stands in place of a prompt that is null, and both are given. Leave it out",
            )
        if self.neutral == self.target:
            yield Problem("neutral", f"{self.neutral!r} is the target, which it is without this. Leave it out")
        if self.target in self.preserved:
            yield Problem(
                "preserved", f"{self.target!r} is the target: it cannot both change and stay. Name other prompts"
            )
        if len(set(self.preserved)) < len(self.preserved):
            twice = next(each for each in self.preserved if self.preserved.count(each) > 1)
            yield Problem("preserved", f"{twice!r} is listed twice. Name each prompt once")
        if self.preserved_weight != 1 and not self.preserved:
            yield Problem(
                "preserved_weight",
                f"{self.preserved_weight:g} has no effect without preserved prompts. Name some, or leave this out",
            )


class Concept(Option):
    """Train directions between prompts, on latents that the model draws itself."""

    directions: Annotated[list[Direction], Field(min_length=1, max_length=64)]
    """What to train, such as [{"target": "a person", "positive": "a person, smiling", "negative": "a person,
    frowning"}]. Several are trained in turn, into one adapter."""
    resolutions: Annotated[list[Annotated[int, Field(ge=16, le=4096)]], Field(min_length=1, max_length=16)] = [1024]
    """Sides in pixels of the squares to draw, in turn. Default: the resolution of the family's models."""
    drawing_steps: Annotated[int, Field(ge=2, le=1000)] = 20
    """Sampling steps of a drawing. A training step stops it after a number of them, drawn uniformly from 0 to this -
    1, and trains there. Default: 20, for bases that draw in few steps theirs."""
    drawing_guidance: Annotated[float, Field(ge=1, le=100)] = 3.0
    """Guidance scale (CFG) of the drawings; 1: no guidance, which halves their time. Default: 3, for bases that draw in
    few steps 1."""

    streamed: ClassVar[bool] = False
    """As of sources of pictures, of which it has none."""

    @property
    def members(self) -> tuple[Source, ...]:
        """No sources of pictures."""
        return ()

    @property
    def prompts(self) -> list[str]:
        """The distinct prompts of all directions."""
        return list(dict.fromkeys(prompt for direction in self.directions for prompt in direction.prompts))

    @property
    def passes(self) -> int:
        """The largest number of passes with gradients in a micro-batch."""
        return max(len(each.strengths) * (1 + bool(each.preserved)) for each in self.directions)

    def digest(self, direction: Direction) -> str:
        """Return the SHA-256 of all that a direction's samples depend on, beside the run's seed and sizes."""
        drawn = {"drawing_steps": self.drawing_steps, "drawing_guidance": self.drawing_guidance}
        about = json.dumps([direction.model_dump(mode="json"), drawn], sort_keys=True)
        return hashlib.sha256(about.encode()).hexdigest()

    def rules(self) -> Iterator[Problem]:
        """Check the directions and the sizes."""
        for number, direction in enumerate(self.directions):
            for problem in direction.problems():
                yield Problem(f"concept.directions.{number}.{problem.path}", problem.message)
        for number, side in enumerate(self.resolutions):
            if side in self.resolutions[:number]:
                yield Problem(f"concept.resolutions.{number}", f"{side} is listed twice. Name each side once")
