"""A folder of pictures, captioned by text files, by metadata.jsonl, by the file names, or by one prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal

from simpletune.data.pictures import UnusablePicture, picture_size
from simpletune.data.source import Picture, Rejected, Scan, Source
from simpletune.options import Problem, UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
METADATA = "metadata.jsonl"


class Folder(Source):
    """Pictures in a folder and its sub-folders (jpg, jpeg, png, webp)."""

    source: Literal["folder"] = "folder"
    """A local folder of pictures."""
    captions: Literal["auto", "txt", "jsonl", "filename"] = "auto"
    """Where captions come from when there is no prompt: NAME.txt beside NAME.jpg, metadata.jsonl (file_name, text), or
    the file names; auto takes metadata.jsonl if there is one, else .txt files if there are any, else file names."""

    def problems(self, path: Path) -> Iterator[Problem]:
        """What can be said about the folder without opening a picture.

        Args:
            path: the folder, with ``demo:`` names resolved.
        """
        if not path.exists():
            yield Problem("data.path", f"{self.path} does not exist. Give a folder with pictures")
        elif not path.is_dir():
            yield Problem("data.path", f"{self.path} is a file. Give the folder that holds the pictures")
        elif next(_picture_files(path), None) is None:
            yield Problem("data.path", f"{self.path} holds no picture ({', '.join(SUFFIXES)}). Put some there")

    def scan(self, path: Path) -> Scan:
        """Find the pictures and their captions.

        Args:
            path: the folder, with ``demo:`` names resolved.

        Raises:
            UserError: metadata.jsonl cannot be read.
        """
        files = sorted(_picture_files(path), key=lambda file: file.relative_to(path).as_posix())
        caption_of, described = self._caption_reader(path, files)
        pictures, rejected = [], []
        for file in files:
            name = file.relative_to(path).as_posix()
            if not _is_text(name):
                readable = name.encode("utf-8", "replace").decode()
                rejected.append(Rejected(readable, "its file name is not UTF-8 text. Rename it"))
                continue
            try:
                caption = caption_of(file)
                data = file.read_bytes()
                size = picture_size(data)
            except UnusablePicture as reason:
                rejected.append(Rejected(name, str(reason)))
            except OSError as error:
                rejected.append(Rejected(name, f"cannot be read ({error.strerror or error})"))
            else:
                pictures.append(Picture(name, caption, size, hashlib.sha256(data).hexdigest(), file.read_bytes))
        return Scan(pictures, rejected, described)

    def _caption_reader(self, path: Path, files: list[Path]) -> tuple[Callable[[Path], str], str]:
        """The function that gives a file's caption, and where captions come from in words."""
        prompt = self.prompt
        if prompt is not None:
            return (lambda file: prompt), f"one prompt for all: {prompt!r}"
        kind = self.captions
        if kind == "auto":
            has_txt = any(file.with_suffix(".txt").exists() for file in files)
            kind = "jsonl" if (path / METADATA).exists() else "txt" if has_txt else "filename"
        if kind == "jsonl":
            return partial(_jsonl_caption, path, read_metadata(path / METADATA)), METADATA
        if kind == "txt":
            return _txt_caption, ".txt files beside the pictures"
        return _filename_caption, f"the file names (no {METADATA}, no .txt files, no data.prompt)"


def _picture_files(path: Path) -> Iterator[Path]:
    """The picture files below a folder; hidden files and folders are left out, dangling links are not."""
    for file in path.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.suffix.lower() in SUFFIXES and not hidden and (file.is_file() or file.is_symlink()):
            yield file


def _is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8: lone surrogates (of file names in other encodings) cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _txt_caption(file: Path) -> str:
    text_file = file.with_suffix(".txt")
    if not text_file.exists():
        raise UnusablePicture(f"has no caption: {text_file.name} is missing")
    try:
        caption = text_file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError:
        raise UnusablePicture(f"its caption {text_file.name} is not UTF-8 text") from None
    if not caption:
        raise UnusablePicture(f"its caption {text_file.name} is empty")
    return caption


def _filename_caption(file: Path) -> str:
    caption = " ".join(file.stem.replace("_", " ").replace("-", " ").split())
    if not any(character.isalpha() for character in caption):
        raise UnusablePicture(
            f"has no caption, and its file name has no words. Set data.prompt, or write {file.with_suffix('.txt').name}"
        )
    return caption


def _jsonl_caption(path: Path, captions: dict[str, str], file: Path) -> str:
    name = file.relative_to(path).as_posix()
    if name not in captions:
        raise UnusablePicture(f"has no line in {METADATA}")
    if not captions[name].strip():
        raise UnusablePicture(f"its text in {METADATA} is empty")
    return captions[name].strip()


def read_metadata(file: Path) -> dict[str, str]:
    """The captions in a metadata.jsonl (the Hugging Face imagefolder convention), by relative file name.

    Raises:
        UserError: a line is not a JSON object with ``file_name`` and ``text``, names a file outside the folder, or a
            file twice.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # JSON strings may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.captions: {file} cannot be read as UTF-8 text ({error}). It is needed here") from None
    captions: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, text = row["file_name"], row["text"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f'{file}:{number}: not a JSON object with "file_name" and "text". Mend that line') from None
        if not isinstance(name, str) or not isinstance(text, str):
            raise UserError(f"{file}:{number}: file_name and text must be strings. Mend that line")
        if not _is_text(name + text):
            raise UserError(f"{file}:{number}: holds half of a surrogate pair, which is no text. Mend that line")
        name = PurePosixPath(name).as_posix()
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UserError(f"{file}:{number}: file_name {name!r} leads out of the folder. Use paths inside it")
        if name in captions:
            raise UserError(f"{file}:{number}: {name!r} has a line already. Keep one")
        captions[name] = text
    return captions
