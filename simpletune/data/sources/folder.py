"""A folder of pictures, captioned by text files, metadata.jsonl, file names or a single prompt."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from simpletune.data.sources.accounts import Accounts, FileClass
from simpletune.data.sources.captions import (
    METADATA,
    TEXTS,
    endings_of_texts,
    filename_caption,
    jsonl_caption,
    read_metadata,
    settle_lines,
    texts_beside,
    txt_caption,
)
from simpletune.data.sources.folder_names import (
    SPLITS,
    MissingCaption,
    explain_folder_names,
    hints_at_repeats,
    meaning,
    naming_folder,
    split_of_word,
)
from simpletune.data.sources.image_files import decoding_of, image_size
from simpletune.data.sources.masks import Kind, alpha_mask, mask_file, without_masks
from simpletune.data.sources.sidecars import CAPTION_LIKE, Sidecars
from simpletune.data.sources.source import RejectedEntry, Scan, Source, SourceImage, UnusableImage
from simpletune.data.sources.walk import (
    FOREIGN_FOLDERS,
    OTHER_IMAGES,
    OUTSIDE,
    SUFFIXES,
    USUAL,
    FoundFiles,
    Links,
    Reading,
    is_outside,
    is_text,
    read_regular,
    replace_surrogates,
    walk,
)
from simpletune.system.console import progress
from simpletune.system.options import Problem, UserError, join_names, plural

MANY = 2000  # pictures from which on a scan shows its progress
NO_CAPTIONS = f"the file names (no {METADATA}, no {' or '.join(TEXTS)} files, no data.prompt)"


@dataclass(frozen=True)
class CaptionReader:
    """How the captions of a folder are read."""

    caption_of: Callable[[Path], tuple[str, ...]]  # the captions of a picture; UnusableImage: none is usable
    files_of: Callable[[Path], list[Path]]  # the files that hold them
    described: str  # where captions come from
    rejected: list[RejectedEntry]  # lines that cannot be used
    left_over: Callable[[set[Path]], Mapping[Path, str]]
    """The files that may hold captions beside those used, with the reason why they were not read."""


def _accounts(root: Path, classes: Mapping[Path, tuple[FileClass, str]], rejected: Sequence[RejectedEntry]) -> Accounts:
    """Return the classes by name, with the links and folders that were not followed."""
    files = {replace_surrogates(file.relative_to(root).as_posix()): kind for file, kind in sorted(classes.items())}
    for each in rejected:
        files[f"{each.name}/" if each.kind == "folder" else each.name] = "left over", each.reason
    return Accounts(files)


class DamagedImage(UnusableImage):
    """A picture's file is damaged, or none that can be read."""


def split_names(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Group the pictures by split, if some folders are named like splits and others not, or like several; else return
    none. Those outside of all such folders are of ``train``."""
    found: dict[str, list[Path]] = {}
    for file in files:
        named = (split_of_word(part.lower()) for part in file.relative_to(root).parts[:-1][:2])
        found.setdefault(next((split for split in named if split in SPLITS), "train"), []).append(file)
    return {split: found[split] for split in SPLITS if split in found} if len(found) > 1 else {}


@dataclass(frozen=True)
class MissingFolder(Problem):
    """Pictures that are not there. Those of a shipped configuration never are: the command line says what to add."""

    folder: str


class Folder(Source):
    """Pictures in a folder and its subfolders."""

    source: Literal["folder"] = "folder"
    """A local folder of pictures."""
    captions: Literal["auto", "txt", "jsonl", "filename"] = "auto"
    """Source of captions when data.prompt is not set: NAME.txt or NAME.caption beside NAME.jpg, metadata.jsonl
    (file_name, text), or file names. auto uses metadata.jsonl if it exists, otherwise text files if there are any,
    otherwise file names."""
    reading: Reading = "0.1"
    """Which pictures and captions of the folder to recognise. any: pictures by all usual suffixes, and captions in
    every form that is known (.txt and .caption in any case, NAME.jpg.txt, UTF-16 with a mark, metadata.jsonl and .csv
    in any folder, a JSON for each picture or one of sd-scripts for all); init writes it. 0.1: only those that release
    0.1.0 knew, so that an older configuration trains what it trained; a hint says what it does not see."""
    missing_prompt: Annotated[str, Field(min_length=1)] | None = None
    """Prompt of pictures that have no caption, beside others that have one; caption_prefix and caption_suffix are not
    added. null: such pictures are unusable."""
    split: Annotated[str, Field(min_length=1)] | None = None
    """Use only the pictures of this split, train, validation or test: those below folders of that name (or training,
    valid, val, dev, eval, testing). null: all."""
    folder_names: Literal["plain", "kohya"] = "plain"
    """Meaning of sub-folders' names. plain: none; kohya: 10_sks dog repeats its pictures 10 times, beside data.repeats,
    and captions those without a caption "sks dog"."""
    mask: Kind | None = None
    """Learn only, or mostly, from parts of the pictures (masked training). alpha: from their opaque parts; files: from
    the white parts of a mask of each picture; null: from all of them."""
    mask_path: Annotated[str, Field(min_length=1)] | None = None
    """Folder of the masks, which have the names of the pictures (conditioning_data_dir); null: beside each NAME.jpg its
    mask NAME-masklabel.png."""
    links: Links = "inside"
    """Follow only symbolic links to targets inside the folder, or all of them, including linked folders."""

    def problems(self, path: Path) -> Iterator[Problem]:
        """Check the folder without opening a picture."""
        if not path.exists():
            place = "" if path.is_absolute() else f" in {Path.cwd()}"
            yield MissingFolder(
                "data.path", f"{self.path} does not exist{place}. Give a folder with pictures", self.path
            )
        elif not path.is_dir():
            yield Problem("data.path", f"{self.path} is a file. Give the folder that holds the pictures")
        else:
            found = walk(path, self.links, self.reading)
            if not found.images and not found.rejected:
                yield Problem("data.path", f"{self.path} contains no pictures ({USUAL}). Add some")
            elif self.split is not None and (
                split_of_word(self.split.lower()) not in (splits := split_names(path, found.images))
            ):
                known = f"Its splits: {', '.join(splits)}" if splits else "It has none"
                yield Problem("data.split", f"{self.path} has no pictures of the split {self.split!r}. {known}")
        if self.mask_path is not None and self.mask != "files":
            yield Problem("data.mask_path", f"{self.mask_path} is not read. Set data.mask=files, or remove it")
        elif self.mask_path is not None and not Path(self.mask_path).is_dir():
            yield Problem("data.mask_path", f"{self.mask_path} is not a folder. Give the folder of the masks")

    def scan(self, path: Path) -> Scan:
        """Scan as ``Source`` does. Raises UserError if metadata.jsonl cannot be read."""
        found = walk(path, self.links, self.reading)
        splits = split_names(path, found.images) if self.split is not None or self.reading == "0.1" else {}
        wanted = splits.get(split_of_word(self.split.lower()), []) if self.split is not None else found.images
        files, said = without_masks(wanted, self.mask, self.mask_path)
        chosen = set(files)
        apart = [file for file in found.images if file not in chosen]
        reader, hints = self._reader(path, files, found.others, apart)
        rejected = [*reader.rejected, *found.rejected]
        classes: dict[Path, tuple[FileClass, str]] = {file: ("mask", "") for file in wanted}
        classes |= dict.fromkeys(set(found.images) - set(wanted), ("left over", f"data.split is {self.split}"))
        images, used, refused = [], set[Path](), dict[Path, str]()
        with progress("scan", len(files), "pictures") if len(files) >= MANY else nullcontext(int) as advance:
            for file in files:
                try:
                    images.append(self._image(path, file, reader.caption_of))
                    classes[file] = "picture", ""
                    used.update(reader.files_of(file))
                except UnusableImage as reason:
                    name = replace_surrogates(file.relative_to(path).as_posix())
                    rejected.append(RejectedEntry(name, str(reason)))
                    classes[file] = ("damaged" if isinstance(reason, DamagedImage) else "left over", str(reason))
                    refused |= dict.fromkeys(reader.files_of(file), f"its picture is not used: {name} {reason}")
                advance()
        if self.prompt is None:
            several = self.caption_lines == "several"
            images, unsettled, described = settle_lines(images, reader.described, several)
            rejected += unsettled
            classes |= {path / each.name: ("left over", each.reason) for each in unsettled}
        else:
            described = reader.described
        names = [image.name for image in images]
        if self.folder_names == "kohya":
            notes = explain_folder_names(path, names)
        else:
            notes, said = [], [*said, *(hints_at_repeats(path, names) if self.repeats == 1 else ())]
        lacking = sum(image.as_it_is for image in images)
        if lacking:
            without = plural(lacking, "picture")
            notes = [*notes, f"{without} without a caption: {self.missing_prompt!r} (data.missing_prompt)"]
        if self.reading == "0.1":
            said += self._explain_unseen(path, found, splits)
        classes |= self._classify_others(found, reader, used, refused)
        return Scan(
            images,
            rejected,
            described,
            dict(found.left_alone),
            tuple([*said, *hints]),
            tuple(notes),
            _accounts(path, classes, found.rejected),
        )

    def _explain_unseen(self, path: Path, found: FoundFiles, splits: Mapping[str, Sequence[Path]]) -> Iterator[str]:
        """Say where a newer configuration would take other pictures."""
        suffixes = Counter(file.suffix.lower() for file in found.others if file.suffix.lower() in SUFFIXES)
        if suffixes:
            counted = ", ".join(f"{count} {suffix}" for suffix, count in sorted(suffixes.items()))
            yield f"{counted}: pictures that this configuration does not see. Set data.reading=any to train on them"
        parts = [{part.lower() for part in file.relative_to(path).parts[:-1]} for file in found.images]
        if count := sum(not each.isdisjoint(FOREIGN_FOLDERS) for each in parts):
            yield f"{plural(count, 'picture')} of another program's folder. Set data.reading=any to leave them out"
        if splits and self.split is None:
            counts = join_names([f"{name} ({plural(len(files), 'picture')})" for name, files in splits.items()])
            yield f"all splits of the folder are trained on: {counts}. Set data.split=train to use one"

    def _classify_others(
        self, found: FoundFiles, reader: CaptionReader, used: set[Path], refused: Mapping[Path, str]
    ) -> dict[Path, tuple[FileClass, str]]:
        """Classify the files that are no pictures."""
        classes: dict[Path, tuple[FileClass, str]] = {file: ("foreign", "") for file in found.foreign}
        classes |= dict.fromkeys(
            found.linked, ("not read", "a link to a folder whose files are counted where they are")
        )
        left = reader.left_over(used)
        for file in found.others:
            suffix = file.suffix.lower()
            if file in used:
                classes[file] = "caption", ""
            elif file in refused or file in left:
                classes[file] = "left over", left.get(file) or refused[file]
            elif suffix in SUFFIXES:
                classes[file] = "not read", f"{suffix} pictures are read with data.reading=any"
            elif suffix in OTHER_IMAGES:
                classes[file] = "not read", f"{suffix} pictures are not read. Convert them to jpg, png or webp"
            else:
                classes[file] = "not read", "neither a picture nor a caption"
        return classes

    def caption_reader(self, path: Path, files: Sequence[Path], others: Sequence[Path]) -> CaptionReader:
        """Return how the captions of these pictures are read; ``others``: the other files of the folder."""
        return self._reader(path, files, others)[0]

    def _reader(
        self, path: Path, files: Sequence[Path], others: Sequence[Path], apart: Sequence[Path] = ()
    ) -> tuple[CaptionReader, list[str]]:
        """Return how captions are read, and hints at files that are not seen; ``apart``: the pictures that are not to
        be used. Raises UserError if metadata.jsonl cannot be read."""
        if self.prompt is not None or self.captions == "filename":
            field = "data.captions is filename" if self.prompt is None else "data.prompt is set"
            unread = {file: f"{field}, so it is not read" for file in others if file.suffix.lower() in CAPTION_LIKE}
            caption_of, described = filename_caption, NO_CAPTIONS
            if (prompt := self.prompt) is not None:
                caption_of, described = (lambda file: (prompt,)), f"one prompt for all pictures: {prompt!r}"
            return CaptionReader(caption_of, lambda file: [], described, [], lambda used: unread), []
        sidecars = Sidecars(path, files, others, self.links, self.captions, apart)
        if self.reading == "0.1":
            return self._reader_of_first(path, files, sidecars, apart)
        by_names = self.captions == "auto" and not len(sidecars) and self.folder_names == "plain"
        if by_names and self.missing_prompt is None:
            return CaptionReader(
                filename_caption,
                lambda file: [],
                "the file names (no file with captions)",
                sidecars.rejected,
                sidecars.list_left_over,
            ), []
        described = self._with_folders(sidecars.describe() or "files beside the pictures")
        if self.folder_names == "kohya" and not len(sidecars):
            described = "the words of the folders' names"
        return CaptionReader(
            sidecars.caption_of, sidecars.files_of, described, sidecars.rejected, sidecars.list_left_over
        ), []

    def _with_folders(self, described: str) -> str:
        return described + (", else the words of the folders' names" if self.folder_names == "kohya" else "")

    def _reader_of_first(
        self, path: Path, files: Sequence[Path], sidecars: Sidecars, apart: Sequence[Path]
    ) -> tuple[CaptionReader, list[str]]:
        """Return how release 0.1.0 read captions, and hints at those that it does not see."""
        kind = self.captions
        rejected: list[RejectedEntry] = []
        caption_of: Callable[[Path], tuple[str, ...]]
        files_of: Callable[[Path], list[Path]]
        if kind == "auto":
            has_texts = bool(endings_of_texts(files)) or self.folder_names == "kohya"
            kind = "jsonl" if os.path.lexists(path / METADATA) else "txt" if has_texts else "filename"
        if kind == "jsonl":
            if self.links == "inside" and is_outside(path / METADATA, path):
                raise UserError(f"data.captions: {path / METADATA} {OUTSIDE}")
            metadata = read_metadata(path / METADATA)
            names = {file.relative_to(path).as_posix() for file in files}
            known = names | {file.relative_to(path).as_posix() for file in apart}
            rejected = [*metadata.rejected, *metadata.list_unmatched(path, known)]
            caption_of, described = partial(jsonl_caption, path, metadata.captions), METADATA
            files_of = lambda file: [path / METADATA]  # noqa: E731
            seen = len(names & metadata.captions.keys())
        elif kind == "txt":
            endings = " and ".join(endings_of_texts(files)) or TEXTS[0]
            caption_of, described = partial(txt_caption, path, self.links), f"{endings} files beside the pictures"
            files_of = texts_beside
            seen = sum(bool(texts_beside(file)) for file in files)
        else:
            caption_of, described, seen = filename_caption, NO_CAPTIONS, 0
            files_of = lambda file: []  # noqa: E731
        hints = []
        if len(sidecars) > seen:
            hints.append(
                f"{plural(len(sidecars) - seen, 'more picture')} would have captions, from {sidecars.describe()}. Set "
                "data.reading=any to read them"
            )

        def left_over(used: set[Path]) -> dict[Path, str]:
            taken = {each for file in files for each in sidecars.files_of(file)} - used
            taken -= {each for file in files for each in files_of(file)} if taken else set()
            return sidecars.list_left_over(used) | dict.fromkeys(taken, "it is read with data.reading=any")

        return CaptionReader(caption_of, files_of, self._with_folders(described), rejected, left_over), hints

    def _image(self, path: Path, file: Path, caption_of: Callable[[Path], tuple[str, ...]]) -> SourceImage:
        """Read one picture. Its size and digest come from the same read."""
        name = file.relative_to(path).as_posix()
        if not is_text(name):
            raise UnusableImage("its file name is not UTF-8 text. Rename it")
        known = meaning(naming_folder(path, name)) if self.folder_names == "kohya" else None
        repeats, words = (1, "") if known is None else known
        read = partial(read_regular, file)
        try:
            data = read()
            size, digest = image_size(data), hashlib.sha256(data).hexdigest()
        except UnusableImage as reason:  # said before a missing caption, which hides it
            raise DamagedImage(str(reason)) from None
        plain = False
        try:
            first, *more = caption_of(file)
        except MissingCaption:
            if known is None and self.missing_prompt is None:
                raise
            plain, more = known is None, []
            first = str(self.missing_prompt) if known is None else words
        mask = None
        if self.mask == "files":
            mask = mask_file(path, self.mask_path, self.links, file, size)
        elif self.mask == "alpha":
            mask = alpha_mask(data, digest, read)
        decoding = decoding_of(data, self.background)
        return SourceImage(
            name,
            first,
            size,
            digest,
            read,
            more=tuple(more),
            repeats=repeats,
            mask=mask,
            as_it_is=plain,
            decoding=decoding,
            background=self.background,
        )
