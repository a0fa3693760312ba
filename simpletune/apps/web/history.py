"""What the files of a data folder held before the page changed them, so that a change can be undone."""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from simpletune.apps.web.roots import Roots
from simpletune.data.sources.caption_files import sha256
from simpletune.data.sources.source import UnusablePicture
from simpletune.data.sources.walk import read_regular
from simpletune.system.atomic import atomic_file, write_text
from simpletune.system.options import UserError

KEPT = 50  # changes of a data set
GONE = "This change cannot be undone any more. Reload the page"


@dataclass(frozen=True)
class Change:
    """A change that can be undone."""

    number: int  # when it was made, in ns
    what: str  # in words


class History:
    """The latest changes of a data set, each a file: a line in words, and a line for each changed file with what it
    held before and the SHA-256 of what was written."""

    def __init__(self, roots: Roots, key: str):
        self._roots, self._folder = roots, roots.own / "history" / key

    @contextmanager
    def change(self, what: str, contents: Mapping[Path, bytes]) -> Iterator[Change]:
        """Keep what files hold while they get these contents; a change that writes none of them is forgotten."""
        self._folder.mkdir(parents=True, exist_ok=True)
        made, lines = Change(time.time_ns(), what), [json.dumps(what)]
        after: dict[Path, str] = {}
        for file, content in contents.items():
            old, digest = _bytes(file), sha256(content)
            if old is None or sha256(old) != digest:
                after[file] = digest
                lines.append(json.dumps([str(file), None if old is None else b64encode(old).decode(), digest]))
        place = self._place(made.number)
        write_text(place, "\n".join(lines), shared=True)
        try:
            yield made
        finally:
            if not any(_has(file, digest) for file, digest in after.items()):
                place.unlink()
            for old_place in self._places()[:-KEPT]:
                old_place.unlink(missing_ok=True)

    def last(self) -> Change | None:
        """The latest change; None: there is none."""
        for place in reversed(self._places()):
            try:
                with place.open(encoding="utf-8") as file:
                    return Change(int(place.stem), str(json.loads(file.readline())))
            except (OSError, ValueError):
                continue
        return None

    def undo(self, number: int) -> tuple[str, list[str]]:
        """Give files what they held before a change. Return the change in words, and the reasons for those files that
        are left because something else has changed them since. UserError: it is not kept any more."""
        place = self._place(number)
        try:
            what, *files = (json.loads(line) for line in place.read_text(encoding="utf-8").splitlines())
        except (OSError, ValueError):
            raise UserError(GONE) from None
        left, kept = [], []
        for name, before, digest in files:
            file = Path(name)
            self._roots.resolve(name)  # a UserError if a link now leads out of the roots
            if not _has(file, digest):
                kept.append([name, before, digest])
                left.append(f"{file.name} was changed by something else since, and is left as it is")
            elif before is None:
                file.unlink()
            else:
                with atomic_file(file, shared=True) as part:
                    part.write_bytes(b64decode(before))
        if kept and any(each.stem > place.stem for each in self._places()):  # a later change, which can be undone first
            write_text(place, "\n".join(map(json.dumps, [what, *kept])), shared=True)
        else:
            place.unlink(missing_ok=True)
        return what, left

    def _place(self, number: int) -> Path:
        return self._folder / f"{number:020d}.jsonl"

    def _places(self) -> list[Path]:
        return sorted(self._folder.glob("[0-9]*.jsonl"))


def _bytes(file: Path) -> bytes | None:
    """What a file holds; None if it cannot be read, or does not exist."""
    try:
        return read_regular(file)
    except UnusablePicture:
        return None


def _has(file: Path, digest: str) -> bool:
    return (data := _bytes(file)) is not None and sha256(data) == digest
