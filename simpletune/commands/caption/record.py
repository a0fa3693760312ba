"""Record of the captions that a model wrote, to tell them from captions that a person wrote or edited.

A line of JSON is appended before each caption is written. A caption counts as a model's if its file's SHA-256 equals
that in the last line about it: an edited file no longer matches, and a crash between line and file leaves no caption
without a record.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from simpletune.data.sources.caption_files import CaptionFile
from simpletune.data.sources.source import UnusableImage
from simpletune.data.sources.walk import read_regular
from simpletune.system import strict_json
from simpletune.system.disk import room_for
from simpletune.system.options import UserError
from simpletune.system.portable import NOFOLLOW

RECORD = "captions.jsonl"
MAX_BYTES = 2**28  # of a record; a line takes about 400


@dataclass(frozen=True)
class WrittenCaption:
    """Record of one caption that a model wrote."""

    file: str  # path of the caption relative to the data folder
    sha256: str
    model: str  # fingerprint of the model's folder
    settings: str  # prompt, prefix, trigger, precision and length, as JSON


class Record:
    """Record file beside the pictures of a data folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.place = folder / RECORD
        self._made: dict[str, WrittenCaption] = {}
        if not os.path.lexists(self.place):
            return
        if self.place.is_symlink():
            raise UserError(f"{self.place} is a symbolic link. Remove it")
        try:
            lines = read_regular(self.place, MAX_BYTES).decode("utf-8", "replace").split("\n")
        except UnusableImage as reason:
            raise UserError(f"{self.place} {reason}. Remove it, and its captions count as written by hand") from None
        for line in lines:
            try:
                found = strict_json.parse(line)
            except strict_json.JsonError:  # the last may be cut off
                continue
            if not isinstance(found, dict):
                continue
            texts = {name: value for name, value in found.items() if isinstance(value, str)}
            if found.keys() == texts.keys() == WrittenCaption.__dataclass_fields__.keys():
                self._made[texts["file"]] = WrittenCaption(**texts)

    def find(self, caption: CaptionFile) -> WrittenCaption | None:
        """Return the record of a caption; None if a person wrote or edited it, or there is none."""
        made = self._made.get(self._name(caption))
        return made if made is not None and caption.text and made.sha256 == caption.digest else None

    def add(self, caption: CaptionFile, digest: str, model: str, settings: str) -> None:
        """Record a caption that is about to be written: SHA-256 of the file after writing, the model's fingerprint."""
        made = WrittenCaption(self._name(caption), digest, model, settings)
        with room_for(f"writing {RECORD}", self.folder, None, lambda: None):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | NOFOLLOW
            with os.fdopen(os.open(self.place, flags, 0o666), "rb+", buffering=0) as stream:
                line = json.dumps(asdict(made), ensure_ascii=False).encode() + b"\n"
                size = os.fstat(stream.fileno()).st_size
                stream.seek(max(0, size - 1))
                cut = size > 0 and stream.read(1) != b"\n"
                stream.write(b"\n" + line if cut else line)
        self._made[made.file] = made

    def _name(self, caption: CaptionFile) -> str:
        return caption.file.relative_to(self.folder).as_posix()
