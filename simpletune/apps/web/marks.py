"""Stars and hidden runs: ``runs/.web/marks.json``, beside the runs, so that a mark changes no run's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from simpletune.apps.web.roots import Roots
from simpletune.system.atomic import quarantine, write_json
from simpletune.system.locks import wait_for_lock
from simpletune.system.options import UserError

FILE, LOCK = "marks.json", ".marks.lock"
Mark = Literal["starred", "hidden"]


@dataclass(frozen=True)
class Marks:
    """The runs with each mark, by the keys of ``runs_page.run_row``."""

    starred: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()


def read_marks(roots: Roots) -> Marks:
    """Read the marks. Raises UserError if the file is damaged."""
    file = roots.own / FILE
    try:
        found = json.loads(file.read_bytes())
        lists = [found[mark] for mark in ("starred", "hidden")]
        if not all(isinstance(each, list) and all(isinstance(key, str) for key in each) for each in lists):
            raise TypeError("not two lists of texts")
    except FileNotFoundError:
        return Marks()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{file} is damaged ({str(error)[:200]}). The next star sets it aside as {FILE}.damaged; runs are not "
            "affected"
        ) from None
    return Marks(*map(frozenset, lists))


def mark(roots: Roots, key: str, which: Mark, on: bool) -> None:
    """Set or remove a run's mark, while no other page does."""
    roots.own.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(roots.own / LOCK, "waiting for another page to write the stars"):
        try:
            known = read_marks(roots)
        except UserError:
            quarantine(roots.own / FILE)
            known = Marks()
        keys = {"starred": set(known.starred), "hidden": set(known.hidden)}
        (keys[which].add if on else keys[which].discard)(key)
        write_json(roots.own / FILE, {name: sorted(each) for name, each in keys.items()})
