"""Duplicates and near-duplicates for the page: a bounded number of thumbnails side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL import Image

from simpletune.commands.inspect_data.scan import DatasetReport, ScannedImage
from simpletune.data.sources.pictures import decode
from simpletune.data.sources.source import UnusablePicture
from simpletune.data.sources.walk import printable_name

SIDE = 112  # pixels of a thumbnail's longer side
GROUPS, EACH = 24, 6  # groups shown, and thumbnails in each
LISTED = 200  # further groups listed by name


@dataclass(frozen=True)
class Group:
    """Pictures that look alike."""

    # (names, thumbnail as a data URI); the URI is empty if the file has changed since the scan
    shown: list[tuple[str, str]]
    others: list[str]  # names of the pictures without a thumbnail


@dataclass(frozen=True)
class DuplicateGroups:
    """All groups of one kind: identical or nearly identical."""

    title: str  # the title of the section
    says: str  # explanation of the groups
    groups: list[Group]  # the groups, those with thumbnails first
    more: int  # how many groups are omitted


def look_alikes(found: DatasetReport, embed: Callable[[Image.Image], str]) -> list[DuplicateGroups]:
    """Group identical and nearly identical pictures. Decodes the shown ones again."""
    by_name = {seen.picture.name: seen for seen in found.usable}

    def group(names: list[str], same: bool, show: bool) -> Group:
        if not show:
            return Group([], [printable_name(name) for name in names])
        one = ["\n".join(printable_name(name) for name in names)]
        labels = one if same else [printable_name(name) for name in names]
        shown = [(label, _small(by_name[name], embed)) for label, name in zip(labels[:EACH], names, strict=False)]
        return Group(shown, labels[EACH:])

    kinds: list[tuple[str, str, Sequence[list[str]], bool]] = [
        ("Identical files", "training sees these pictures more often than others", found.exact, True),
        ("Nearly identical", "found by difference hash and colours; check them by eye", found.near, False),
    ]
    return [
        DuplicateGroups(
            title,
            says,
            [group(names, same, number < GROUPS) for number, names in enumerate(groups[: GROUPS + LISTED])],
            max(0, len(groups) - GROUPS - LISTED),
        )
        for title, says, groups, same in kinds
        if groups
    ]


def _small(seen: ScannedImage, embed: Callable[[Image.Image], str]) -> str:
    """Return a thumbnail of the whole picture, as a data URI."""
    try:
        image = decode(seen.picture.read_same(), at_least=2 * SIDE)
    except UnusablePicture:  # changed since the scan: show only its name
        return ""
    image.thumbnail((SIDE, SIDE))
    return embed(image)
