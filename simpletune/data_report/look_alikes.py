"""Duplicates and near-duplicates as the page shows them: small pictures side by side, a bounded number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL import Image

from simpletune.data.pictures import decode
from simpletune.data.source import UnusablePicture
from simpletune.data.walk import printable
from simpletune.data_report.scan import DatasetReport, ScannedImage

SIDE = 112  # pixels of a small picture's longer side
GROUPS, EACH = 24, 6  # groups that are shown, and pictures of each
LISTED = 200  # further groups whose names stand on the page


@dataclass(frozen=True)
class Group:
    """Pictures that look alike.

    Args:
        shown: (names, the picture as a data URI); empty where the file has changed since it was scanned.
        others: names of those that are not shown.
    """

    shown: list[tuple[str, str]]
    others: list[str]


@dataclass(frozen=True)
class LookAlikes:
    """A kind of likeness.

    Args:
        title: of its section.
        says: what it means.
        groups: shown ones first.
        more: how many groups are left out.
    """

    title: str
    says: str
    groups: list[Group]
    more: int


def look_alikes(found: DatasetReport, embed: Callable[[Image.Image], str]) -> list[LookAlikes]:
    """The groups of pictures that are the same, and nearly the same. Those shown are decoded again.

    Args:
        found: the look at the data set.
        embed: makes a data URI of a small picture.
    """
    by_name = {seen.picture.name: seen for seen in found.usable}

    def group(names: list[str], same: bool, show: bool) -> Group:
        if not show:
            return Group([], [printable(name) for name in names])
        one = ["\n".join(printable(name) for name in names)]
        labels = one if same else [printable(name) for name in names]
        shown = [(label, _small(by_name[name], embed)) for label, name in zip(labels[:EACH], names, strict=False)]
        return Group(shown, labels[EACH:])

    kinds: list[tuple[str, str, Sequence[list[str]], bool]] = [
        ("The same bytes", "trained on more often than others", found.exact, True),
        ("Nearly the same", "by difference hash and colours: look at them", found.near, False),
    ]
    return [
        LookAlikes(
            title,
            says,
            [group(names, same, number < GROUPS) for number, names in enumerate(groups[: GROUPS + LISTED])],
            max(0, len(groups) - GROUPS - LISTED),
        )
        for title, says, groups, same in kinds
        if groups
    ]


def _small(seen: ScannedImage, embed: Callable[[Image.Image], str]) -> str:
    """The whole picture, small."""
    try:
        image = decode(seen.picture.read_same(), at_least=2 * SIDE)
    except UnusablePicture:  # it has changed since: its name stays
        return ""
    image.thumbnail((SIDE, SIDE))
    return embed(image)
