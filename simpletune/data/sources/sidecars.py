"""Captions in files beside pictures, in every form that other programs write (``data.reading=any``)."""

from __future__ import annotations

import codecs
import csv
import io
import json
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from simpletune.data.sources.captions import MAX_BYTES, METADATA, TEXTS, Metadata, read_lines, validate_caption
from simpletune.data.sources.folder_names import MissingCaption
from simpletune.data.sources.source import RejectedEntry, UnusableImage
from simpletune.data.sources.walk import OUTSIDE, Links, is_outside, is_text, read_regular, replace_surrogates
from simpletune.system.options import join_names
from simpletune.system.portable import name_inside

METADATA_CSV = "metadata.csv"
KEYS = ("text", "caption", "prompt")  # fields of a caption; the first that is there counts
CAPTION_LIKE = (*TEXTS, ".json", ".jsonl", ".csv", ".tsv", ".text", ".cap", ".captions", ".tags", ".tag", ".prompt",
                ".prompts", ".desc", ".description", ".xml", ".yaml", ".yml", ".parquet")  # fmt: skip
"""Extensions of files that may hold captions."""
TELLING = ("caption", "captions", "prompt", "prompts", "label", "labels", "tags", "metadata", "descriptions")
"""Names of text files that may hold the captions of many pictures."""
MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"),
         (codecs.BOM_UTF16_BE, "utf-16"))  # fmt: skip
NO_IMAGE = "no picture has this name"
ELSEWHERE = "the picture of this name lies in another folder. Put both into one"
UNKNOWN = "may hold captions, in a form that is not read. Write a .txt beside each picture"
SECOND = "its picture has its caption from another file"
UNUSED = "its picture is not used"
NOT_TEXT = "is not UTF-8 text, nor UTF-16 with a mark"


def decode_text(data: bytes) -> str:
    """Decode UTF-8, or UTF-16 or UTF-32 with a mark. Raises UnusableImage if it is none of them."""
    try:
        return data.decode(next((encoding for mark, encoding in MARKS if data.startswith(mark)), "utf-8-sig"))
    except UnicodeDecodeError:
        raise UnusableImage(NOT_TEXT) from None


def fold_name(name: str) -> str:
    """Fold a name as most file systems compare it: composed (NFC), in any case of letters."""
    return unicodedata.normalize("NFC", name).casefold()


class Sidecars:
    """The captions of the pictures of a folder. A picture has those of the first of:

    - its line in the nearest ``metadata.jsonl`` or ``metadata.csv``, with names relative to that file (file_name) and a
      field text, caption or prompt;
    - ``NAME.txt``, ``NAME.caption`` or ``NAME.jpg.txt``;
    - ``NAME.json`` or ``NAME.jpg.json`` with one of these fields;
    - its entry in a JSON of sd-scripts: an object of names or paths, each with caption, tags, or both.

    Names are equal if they are after composition (NFC) and in any case of letters; an exact one is preferred.

    Args:
        root: the data folder.
        pictures: its pictures, without masks.
        others: its other files.
        links: whether files may be links that lead out of it.
        kind: ``txt`` reads text files alone, ``jsonl`` only metadata.
        apart: masks, and pictures of other splits: their captions are no fault.
    """

    def __init__(
        self,
        root: Path,
        images: Sequence[Path],
        others: Iterable[Path],
        links: Links,
        kind: str = "auto",
        apart: Sequence[Path] = (),
    ) -> None:
        self.root, self.links = root, links
        self.rejected: list[RejectedEntry] = []  # lines of metadata that cannot be used
        self.damaged: dict[Path, str] = {}  # files of many captions that cannot be read, and why
        self._images, self._apart = _Names(root, images), _Names(root, apart)
        self._of_apart: set[Path] = set()  # metadata of pictures that are apart
        self._likely = [file for file in others if file.suffix.lower() in CAPTION_LIKE]
        self._lines: dict[Path, tuple[Path, tuple[str, ...], str]] = {}  # by picture: file, captions, what they are
        self._beside: dict[Path, list[Path]] = {}  # text files by picture
        if kind != "txt":
            self._read_metadata()
        if kind != "jsonl":
            self._find_texts(images)
        if kind == "auto":
            self._read_json([each for each in images if each not in self._lines and each not in self._beside])

    def __len__(self) -> int:
        """Count the pictures that have a caption, usable or not."""
        return len(self._lines.keys() | self._beside.keys())

    def describe(self) -> str:
        """Describe where the captions come from."""
        lines = dict.fromkeys(file.name for file, _, _ in self._lines.values())
        ends = dict.fromkeys(_ending(image, file) for image, files in self._beside.items() for file in files)
        texts = [f"{join_names(sorted(ends))} files beside the pictures"] if ends else []
        return " and ".join([*(list(lines) if len(lines) < 4 else [f"{len(lines):,} .json files"]), *texts])

    def files_of(self, image: Path) -> list[Path]:
        """Return the files that hold a picture's captions."""
        line = self._lines.get(image)
        return [*([line[0]] if line else []), *self._beside.get(image, [])]

    def caption_of(self, image: Path) -> tuple[str, ...]:
        """Return the captions of a picture. Raises UnusableImage if none is usable, or two files differ, MissingCaption
        if there is none."""
        texts = {file: self._text(file) for file in self._beside.get(image, [])}
        found: set[tuple[str, ...]] = {(text,) for text in texts.values()}
        if image in self._lines:
            _, captions, what = self._lines[image]
            found.add(tuple(validate_caption(caption, what) for caption in captions))
        if not found:
            raise MissingCaption(f"has no caption: {image.with_suffix(TEXTS[0]).name} is missing")
        if len(found) > 1:
            names = " and ".join(replace_surrogates(file.name) for file in self.files_of(image))
            raise UnusableImage(f"has two different captions: {names}. Keep one")
        return found.pop()

    def list_left_over(self, used: set[Path]) -> dict[Path, str]:
        """List the files that may hold captions and were not used, with the reason."""
        taken = {file for image in self._beside.keys() | self._lines.keys() for file in self.files_of(image)}
        left = {}
        for file in self._likely:
            if file in used:
                continue
            if file in self.damaged:
                left[file] = self.damaged[file]
            elif file in taken or file in self._of_apart or self._apart.find_beside(file) is not None:
                left[file] = UNUSED
            elif file.suffix.lower() in TEXTS and fold_name(file.stem) not in TELLING:
                left[file] = ELSEWHERE if self._images.has_anywhere(file.stem) else NO_IMAGE
            else:
                image = self._images.find_beside(file)
                left[file] = SECOND if image is not None and self.files_of(image) else UNKNOWN
        return left

    def _text(self, file: Path) -> str:
        what = f"its caption {replace_surrogates(file.name)}"
        if self.links == "inside" and file.is_symlink() and is_outside(file, self.root):
            raise UnusableImage(f"{what} {OUTSIDE}")
        try:
            text = decode_text(read_regular(file, MAX_BYTES))
        except UnusableImage as reason:
            raise UnusableImage(f"{what} {reason}") from None
        return validate_caption(text.replace("\r\n", "\n"), what)

    def _find_texts(self, images: Sequence[Path]) -> None:
        by_name: dict[tuple[Path, str], list[Path]] = {}
        for file in self._likely:
            if file.suffix.lower() in TEXTS:
                by_name.setdefault((file.parent, fold_name(file.stem)), []).append(file)
        for image in images:
            found = [
                *by_name.get((image.parent, fold_name(image.stem)), ()),
                *by_name.get((image.parent, fold_name(image.name)), ()),
            ]
            exact = [file for file in found if file.stem in (image.stem, image.name)]
            if found:
                self._beside[image] = exact or found

    def _read_metadata(self) -> None:
        files = [file for file in self._likely if file.name.lower() in (METADATA, METADATA_CSV)]
        jsonl = {file.parent for file in files if file.name.lower() == METADATA}
        for file in sorted(files, key=lambda file: (-len(file.parts), file.name.lower() == METADATA_CSV, file)):
            if file.name.lower() == METADATA_CSV and file.parent in jsonl:
                self.damaged[file] = f"{METADATA} beside it is read instead"
                continue
            try:
                if self.links == "inside" and file.is_symlink() and is_outside(file, self.root):
                    raise UnusableImage(OUTSIDE)
                text = decode_text(read_regular(file))
                found = read_lines(text, KEYS) if file.name.lower() == METADATA else _read_csv(text)
            except UnusableImage as reason:
                self.damaged[file] = str(reason)
                continue
            self._take_lines(file, found)

    def _take_lines(self, file: Path, found: Metadata) -> None:
        place = file.relative_to(self.root).as_posix()
        self.rejected += [
            RejectedEntry(f"{place}:{each.name.rpartition(':')[2]}", each.reason, "line") for each in found.rejected
        ]
        for name, captions in found.captions.items():
            image = self._images.find_named(file.parent, name)
            if image is None and self._apart.find_named(file.parent, name) is not None:
                self._of_apart.add(file)
            elif image is None:
                why = f"names {name!r}, which is no picture here"
                self.rejected.append(RejectedEntry(f"{place}:{found.lines[name]}", why, "line"))
            elif image not in self._lines:
                self._lines[image] = file, captions, f"its text in {place}"

    def _read_json(self, images: Sequence[Path]) -> None:
        """Read the JSON of each picture, then those for many."""
        files = {(file.parent, fold_name(file.stem)): file for file in self._likely if file.suffix.lower() == ".json"}
        wanted = set(images)
        for image in images:
            for name in (image.stem, image.name):
                file = files.get((image.parent, fold_name(name)))
                if file is not None and (captions := _captions_in(_load(file))):
                    self._lines[image] = file, captions, f"its text in {replace_surrogates(file.name)}"
                    wanted.discard(image)
        taken = {file for file, _, _ in self._lines.values()}
        for file in files.values() if wanted else ():
            if file not in taken:
                self._take_many(file, wanted)

    def _take_many(self, file: Path, wanted: set[Path]) -> None:
        entries = _load(file, most=2**30)
        if not isinstance(entries, dict):
            return
        for name, entry in entries.items():
            captions = _kohya_captions(entry)
            image = self._images.find_any_form(file.parent, name) if captions else None
            if image in wanted:
                self._lines[image] = file, captions, f"its entry in {replace_surrogates(file.name)}"
                wanted.discard(image)


class _Names:
    """Pictures by name: exact, composed, or in another case."""

    def __init__(self, root: Path, images: Sequence[Path]) -> None:
        self.root = root
        self._exact, self._folded = {str(each): each for each in images}, dict[str, Path | None]()
        self._stems, self._bare = dict[str, Path | None](), dict[str, Path | None]()
        for each in images:
            for index, key in (
                (self._folded, fold_name(str(each))),
                (self._stems, fold_name(str(each.with_suffix("")))),
                (self._bare, fold_name(each.stem)),
                (self._bare, fold_name(each.name)),
            ):
                index[key] = None if key in index else each  # None: several

    def find_exact(self, path: Path) -> Path | None:
        """Return the picture of a path; None: there is none, or there are several in other cases."""
        return self._exact.get(str(path)) or self._folded.get(fold_name(str(path)))

    def find_named(self, folder: Path, name: str) -> Path | None:
        """Return the picture in a folder by its path from there, or from the root."""
        found = self.find_exact(folder / name) or self.find_exact(self.root / name)
        return found if found is not None and found.is_relative_to(folder) else None

    def find_beside(self, file: Path) -> Path | None:
        """Return the picture of the same name as a file, NAME or NAME.jpg."""
        return self.find_stem(file.with_suffix("")) or self.find_exact(file.with_suffix(""))

    def find_stem(self, path: Path) -> Path | None:
        """Return the picture of a path without its suffix."""
        return self._stems.get(fold_name(str(path)))

    def has_anywhere(self, stem: str) -> bool:
        """Return whether a picture in any folder has this name, with or without suffix."""
        return fold_name(stem) in self._bare

    def find_any_form(self, folder: Path, name: str) -> Path | None:
        """Return the picture of a key of sd-scripts: a path or a name, with or without suffix, perhaps of another
        machine."""
        if not is_text(name) or "\0" in name:
            return None
        plain = name.replace("\\", "/")
        inside = name_inside(plain)
        for base in (folder, self.root) if inside else ():
            if found := self.find_exact(base / str(inside)) or self.find_stem(base / str(inside)):
                return found
        return self._bare.get(fold_name(PurePosixPath(plain).name))


def _ending(image: Path, file: Path) -> str:
    return file.suffix if file.stem != image.name else f"{image.suffix}{file.suffix}"


def _load(file: Path, most: int = MAX_BYTES) -> Any:
    """Read a file's JSON; None: it is none, or cannot be read."""
    try:
        return json.loads(decode_text(read_regular(file, most)))
    except (UnusableImage, ValueError, RecursionError):  # left over, and named
        return None


def _captions_in(entry: object) -> tuple[str, ...]:
    """Return the captions of an object with one of the fields of a caption; empty: it has none."""
    value = next((entry[key] for key in KEYS if key in entry), None) if isinstance(entry, dict) else None
    values = value if isinstance(value, list) else [value]
    texts = tuple(text for text in values if isinstance(text, str) and text.strip() and is_text(text))
    return texts if len(texts) == len(values) else ()


def _kohya_captions(entry: object) -> tuple[str, ...]:
    """Caption and tags of an entry, joined as sd-scripts does (FineTuningDataset)."""
    if not isinstance(entry, dict):
        return ()
    parts = [entry.get("caption"), entry.get("tags")]
    texts = [part.strip() for part in parts if isinstance(part, str) and part.strip() and is_text(part)]
    return (", ".join(texts),) if texts else ()


def _read_csv(text: str) -> Metadata:
    """Read a metadata.csv. Raises UnusableImage if it lacks a column."""
    rows = csv.DictReader(io.StringIO(text, newline=""))
    columns = list(rows.fieldnames or [])
    key = next((key for key in KEYS if key in columns), None)
    if "file_name" not in columns or key is None:
        known = join_names([repr(column) for column in columns]) or "none"
        raise UnusableImage(f"has no columns file_name and text (or caption, prompt). Its columns are {known}")
    found = Metadata()
    try:
        for number, row in enumerate(rows, 2):
            name = name_inside(str(row["file_name"] or "").replace("\\", "/"))
            if not name or name in found.captions:
                why = "names no picture of the folder" if not name else f"repeats {name!r}. Keep one"
                found.rejected.append(RejectedEntry(f"{METADATA_CSV}:{number}", why, "line"))
                continue
            if None in row:
                why = "has more cells than the first line. Put quotes around a text with commas"
                found.rejected.append(RejectedEntry(f"{METADATA_CSV}:{number}", why, "line"))
                continue
            found.captions[name], found.lines[name] = (row[key] or "",), number
    except csv.Error as error:
        raise UnusableImage(f"is not CSV ({error})") from None
    return found
