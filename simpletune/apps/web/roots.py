"""The folders that the pages may read and write: the runs' folder and the named roots, nothing else. In the roots they
write captions and masks, and new folders of uploaded pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simpletune.runs.folder import ATTEMPTS, CONFIG, METRICS
from simpletune.system.hub import HUB_NAME
from simpletune.system.options import UserError

LONGEST = 200  # characters of a wrong path that are repeated
UPLOADS = "data"  # where shipped configurations expect pictures; git ignores it
OWN = ".web"  # next to the runs: the pages' configurations, logs, stars and queue


@dataclass(frozen=True)
class Roots:
    """The folders that the pages may touch."""

    runs: Path
    named: tuple[Path, ...]  # with pictures and configurations; relative paths are relative to the first
    uploads: Path  # where new folders of pictures go, which need not exist

    @property
    def own(self) -> Path:
        """The folder for the pages' own files."""
        return self.runs / OWN

    def resolve(self, text: str) -> Path:
        """Resolve a path given by a user, including links. Raises UserError, with the remedy, if it leads out of the
        roots."""
        if "://" in text:
            raise UserError(f"{text} is an address, not a path of this machine. Give one below {self.named[0]}")
        try:
            given = Path(text).expanduser()
            path = (given if given.is_absolute() else self.named[0] / given).resolve()
        except (OSError, ValueError, RuntimeError):  # a null byte, a loop of links, an overlong name, an unknown ~user
            raise UserError(f"{text[:LONGEST]!r} is not a path") from None
        if not any(path.is_relative_to(root) for root in (self.runs, *self.named)):
            allowed = ", ".join(map(str, self.named))
            raise UserError(
                f"{text} is outside of the folders that this page may use ({allowed}). Start it with --root {path}"
            )
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            pass  # whoever asks says what should be there
        except OSError as error:  # what they do with it would fail, too
            raise UserError(f"{text[:LONGEST]!r} cannot be read ({error.strerror or error})") from None
        return path

    def is_on_hub(self, text: str) -> bool:
        """Return whether a text names a repository of the Hub (owner/name) rather than a path that exists here."""
        return (
            not text.startswith(".") and HUB_NAME.match(text) is not None and not os.path.exists(self.named[0] / text)
        )

    def run(self, name: str) -> Path | None:
        """Return the folder of the run with this name; None if there is none."""
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            return None
        folder = self.runs / name
        # a run has begun here, even if its configuration or its steps are missing or damaged
        try:
            begun = any((folder / file).is_file() for file in (CONFIG, ATTEMPTS, METRICS))
            return folder if begun and folder.resolve().parent == self.runs else None
        except (OSError, ValueError):  # too long for a name, or no text
            return None

    def all_runs(self) -> Iterator[Path]:
        """Yield the folders of all runs, by name."""
        if self.runs.is_dir():
            yield from (each for each in sorted(self.runs.iterdir()) if self.run(each.name) is not None)

    def find_inside(self, folder: Path, name: str) -> Path | None:
        """Return the file ``name`` below ``folder``; None if it is missing or a link leads out of the folder."""
        try:
            file = (folder / name).resolve()
            return file if file.is_relative_to(folder.resolve()) and file.is_file() else None
        except (OSError, ValueError, RuntimeError):
            return None


def make_roots(runs: Path, named: list[Path]) -> Roots:
    """Resolve the folders of ``simpletune web``: uploads go into the first root, or without one into ``data`` below the
    current folder. Raises UserError if a root is not a folder."""
    for root in named:
        if not root.is_dir():
            raise UserError(f"--root: {root} is not a folder. Give one that exists")
    if not named:  # the current folder is likely a checkout of this program
        here = Path.cwd().resolve()
        return Roots(runs.resolve(), (here,), here / UPLOADS)
    found = tuple(root.resolve() for root in named)
    return Roots(runs.resolve(), found, found[0])
