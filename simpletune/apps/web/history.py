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
from simpletune.data.sources.source import UnusableImage
from simpletune.data.sources.walk import read_regular
from simpletune.system.atomic import atomic_file, write_text
from simpletune.system.options import UserError

KEPT = 50  # changes of a data set
GONE = "This change cannot be undone any more. Reload the page"


@dataclass(frozen=True)
class Change:
    """A change that can be undone."""

    number: int  # when it was made, in ns
    what: str  # a description


class History:
    """The latest changes of a data set, each a file: a line that describes it, and a line for each changed file with
    what it held before, the SHA-256 of what was written, and that of what it held (version 0.1 wrote none)."""

    def __init__(self, roots: Roots, key: str):
        self._roots = roots
        self._folder = roots.own / "history" / key

    @contextmanager
    def change(self, what: str, contents: Mapping[Path, bytes]) -> Iterator[Change]:
        """Keep what files hold while they get these contents; a change that writes none of them is forgotten."""
        self._folder.mkdir(parents=True, exist_ok=True)
        made, lines = Change(time.time_ns(), what), [json.dumps(what)]
        after: dict[Path, str] = {}
        for file, content in contents.items():
            old, digest = _read_bytes(file), sha256(content)
            if old is None or sha256(old) != digest:
                after[file] = digest
                before = (None, None) if old is None else (b64encode(old).decode(), sha256(old))
                lines.append(json.dumps([str(file), before[0], digest, before[1]]))
        place = self._place(made.number)
        write_text(place, "\n".join(lines), shared=True)
        try:
            yield made
        finally:
            if not any(_has_digest(file, digest) for file, digest in after.items()):
                place.unlink()
            for old_place in self._places()[:-KEPT]:
                old_place.unlink(missing_ok=True)

    def last(self) -> Change | None:
        """Return the latest change; None if there is none."""
        for place in reversed(self._places()):
            try:
                with place.open(encoding="utf-8") as file:
                    return Change(int(place.stem), _parse_words(file.readline()))
            except (OSError, ValueError):  # damaged, as undo says
                continue
        return None

    def undo(self, number: int) -> tuple[str, list[str]]:
        """Give files what they held before a change. Return its description, and the reasons for those files that are
        left because something else has changed them since. Raises UserError if the change is not kept any more."""
        place = self._place(number)
        try:
            first, *lines = place.read_text(encoding="utf-8").splitlines()
            what = _parse_words(first)
        except (OSError, ValueError):
            raise UserError(GONE) from None
        left, kept = [], []
        for line in lines:
            try:
                name, before, digest = _parse_line(line)
                self._roots.resolve(name)  # a UserError if a link now leads out of the roots
            except ValueError:
                left.append("A damaged line of the history names no file with what it held, and is skipped")
                continue
            except UserError as reason:
                left.append(str(reason))
                continue
            file = Path(name)
            if not _has_digest(file, digest):
                kept.append(line)
                left.append(f"{file.name} was changed by something else since, and is left as it is")
            elif before is None:
                file.unlink()
            else:
                with atomic_file(file, shared=True) as part:
                    part.write_bytes(before)
        if kept and any(each.stem > place.stem for each in self._places()):  # a later change, which can be undone first
            write_text(place, "\n".join([first, *kept]), shared=True)
        else:
            place.unlink(missing_ok=True)
        return what, left

    def _place(self, number: int) -> Path:
        return self._folder / f"{number:020d}.jsonl"

    def _places(self) -> list[Path]:
        return sorted(self._folder.glob("[0-9]*.jsonl"))


def _parse_words(line: str) -> str:
    """Parse the first line of a change. Raises ValueError if it is damaged."""
    found = _parse_json(line)
    if not isinstance(found, str):
        raise ValueError
    return found


def _parse_line(line: str) -> tuple[str, bytes | None, str]:
    """Parse a line: a changed file, what it held before, if it was there, and the SHA-256 of what was written. Raises
    ValueError if the line is damaged, so that nothing is restored but what was kept."""
    found = _parse_json(line)
    if not (isinstance(found, list) and len(found) in (3, 4)):
        raise ValueError
    name, before, after, *held = found
    if not (isinstance(name, str) and isinstance(after, str) and isinstance(before, str | None)):
        raise ValueError
    content = None if before is None else b64decode(before, validate=True)
    if held and held[0] != (None if content is None else sha256(content)):
        raise ValueError
    return name, content, after


def _parse_json(line: str) -> object:
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError from None


def _read_bytes(file: Path) -> bytes | None:
    """Read a file; None if it cannot be read, or does not exist."""
    try:
        return read_regular(file)
    except UnusableImage:
        return None


def _has_digest(file: Path, digest: str) -> bool:
    return (data := _read_bytes(file)) is not None and sha256(data) == digest
