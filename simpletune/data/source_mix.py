"""Contribution of each data source to an epoch, for the screen, the run's files and pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simpletune.system.options import plural
from simpletune.system.printable import printable_name


@dataclass(frozen=True)
class SourceShare:
    """One source's part of a plan.

    Args:
        path: as the configuration names it.
        pictures: different pictures that are trained on.
        passes: how often each picture appears in an epoch; a range if folder names repeat some more often.
        samples: samples of the source in an epoch.
        held_out: pictures that ``validation.split`` holds out.
        prompts: different prompts over all variants, without the empty one of caption dropout; None: not counted.
        crops: different crops, flips and augmentations over all variants; None: not counted.
        masks: how many of the pictures have a mask.
        holes: different crops with a hole to inpaint, over all variants; None: not counted.
        weight: factor of the loss.
        regularization: whether it is for prior preservation.
        shape: a description of resolution and aspect.
    """

    path: str
    images: int
    passes: str
    samples: int
    held_out: int
    prompts: int | None
    crops: int | None
    masks: int
    weight: float
    regularization: bool
    shape: str
    holes: int | None = 0


def source_lines(found: list[SourceShare]) -> Iterator[str]:
    """Describe each source in a numbered line; nothing for a single source without options of its own."""
    if len(found) == 1:
        (only,) = found
        if not (only.masks or only.holes or only.weight != 1 or (only.prompts or 0) > only.images):
            return
    for index, share in enumerate(found):
        parts = [f"{plural(share.images, 'picture')} x {share.passes} = {plural(share.samples, 'sample')} per epoch"]
        parts += [share.shape, *([] if share.prompts is None else [plural(share.prompts, "prompt")])]
        if share.crops is not None and share.crops != share.images + share.held_out:
            parts.append(plural(share.crops, "crop"))
        parts += [plural(share.masks, "mask")] if share.masks else []
        parts += format_holes(share)
        parts += [f"loss weight {share.weight:g}"] if share.weight != 1 else []
        parts += ["for regularization"] if share.regularization else []
        parts += [f"{share.held_out} held out"] if share.held_out else []
        number = f"source {index}: " if len(found) > 1 else ""
        yield f"{number}{printable_name(share.path)}: {', '.join(parts)}"


def format_holes(share: SourceShare) -> list[str]:
    return [plural(share.holes, "hole")] if share.holes else []


SOURCE_COLUMNS = (
    "source",
    "pictures",
    "passes",
    "samples per epoch",
    "size",
    "prompts",
    "crops",
    "masks",
    "loss weight",
    "use",
)


def source_rows(found: Sequence[SourceShare]) -> list[tuple[str, ...]]:
    """Return the rows of a table of sources, under ``SOURCE_COLUMNS``."""
    return [
        (
            f"{index}: {printable_name(share.path)}",
            f"{share.images:,}" + (f" and {share.held_out:,} held out" if share.held_out else ""),
            share.passes,
            f"{share.samples:,}",
            share.shape,
            "not counted" if share.prompts is None else f"{share.prompts:,}",
            "not counted" if share.crops is None else ", ".join([f"{share.crops:,}", *format_holes(share)]),
            f"{share.masks:,}",
            f"{share.weight:g}",
            "regularization" if share.regularization else "training",
        )
        for index, share in enumerate(found)
    ]
