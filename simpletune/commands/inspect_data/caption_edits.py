"""Change many captions at once: preview the changes, then write exactly those."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from simpletune.data.sources.caption_files import CaptionFile, ChangedCaption, caption_file, write_caption
from simpletune.data.sources.captions import one_line
from simpletune.data.sources.source import UnusableImage
from simpletune.data.sources.walk import is_text, replace_surrogates
from simpletune.system.options import UserError

LONGEST_TAG = 60  # characters; longer text between two separators is a sentence


@dataclass(frozen=True)
class CaptionedImage:
    name: str  # relative to the data folder
    file: Path
    caption: CaptionFile | None  # None if it cannot be read
    problem: str = ""  # why the caption cannot be read or written

    @property
    def text(self) -> str:
        return "" if self.caption is None else self.caption.text


def read_captions(root: Path, images: Iterable[Path]) -> list[CaptionedImage]:
    """Read the caption of every picture without opening pictures."""
    entries = []
    for file in images:
        name = file.relative_to(root).as_posix()
        if not is_text(name):
            entries.append(
                CaptionedImage(replace_surrogates(name), file, None, "its file name is not UTF-8 text. Rename it")
            )
            continue
        try:
            entries.append(CaptionedImage(name, file, caption_file(root, file)))
        except UnusableImage as reason:
            entries.append(CaptionedImage(name, file, None, str(reason)))
    return entries


@dataclass(frozen=True)
class Edit:
    """A change to every caption that it applies to."""

    # ``replace``: every occurrence of ``find``; ``prefix``: put ``text`` before captions that lack it
    kind: Literal["replace", "prefix"]
    find: str  # exact, case-sensitive
    text: str

    def __post_init__(self) -> None:
        if self.kind == "replace" and not self.find:
            raise UserError("Find is empty. Type the text to replace")
        if self.kind == "prefix" and not self.text.strip():
            raise UserError("The prefix is empty. Type the text to put before captions")

    def apply(self, caption: str) -> str:
        """Return the caption after the change."""
        if self.kind == "replace":
            return caption.replace(self.find, self.text).strip()
        prefix = self.text.strip()
        return caption if caption.startswith(prefix) else f"{prefix} {caption}"


@dataclass(frozen=True)
class Preview:
    """Effect that an edit would have."""

    changes: list[tuple[CaptionedImage, str]]  # captions that would change, and what they would become
    emptied: list[str]  # names of captions that would become empty, which are left unchanged
    fingerprint: str  # digest of the current text of all captions that would change


def preview(edit: Edit, entries: Sequence[CaptionedImage]) -> Preview:
    """Determine what an edit would do, without writing."""
    changes: list[tuple[CaptionedImage, str]] = []
    emptied: list[str] = []
    texts: set[Path] = set()
    for entry in entries:
        if entry.caption is None or not entry.text or entry.caption.file in texts:
            continue  # if two pictures share a caption file, the first counts
        texts.add(entry.caption.file)
        after = edit.apply(entry.text)
        if not after:
            emptied.append(entry.name)
        elif after != entry.text:
            changes.append((entry, after))
    digest = hashlib.sha256()
    for entry, _ in changes:
        assert entry.caption is not None
        digest.update(f"{entry.name}\0{entry.caption.digest}\0".encode())
    return Preview(changes, emptied, digest.hexdigest())


def apply(found: Preview, fingerprint: str) -> tuple[int, list[str]]:
    """Write an edit that a person has previewed. Return the number of written captions, and the reasons for those that
    changed meanwhile or cannot be written."""
    if found.fingerprint != fingerprint:
        raise ChangedCaption("Captions have changed since the preview, and nothing was written. Look again")
    written, left = 0, []
    for entry, after in found.changes:
        assert entry.caption is not None
        try:
            write_caption(entry.caption, after)
            written += 1
        except ChangedCaption as reason:
            left.append(str(reason))
    return written, left


def tag_counts(captions: Iterable[str], separator: str = ",") -> list[tuple[str, int]]:
    """Count the tags of captions, most frequent first: each at most once per caption, and no sentences."""
    counts: Counter[str] = Counter()
    for caption in captions:
        parts = {part.strip() for part in one_line(caption).split(separator)}
        counts.update(part for part in parts if part and len(part) <= LONGEST_TAG)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
