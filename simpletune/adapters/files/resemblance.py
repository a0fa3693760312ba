"""What the names in a file are like, if no layout knows them: for the words about a file of an unknown kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from simpletune.models.families import FAMILIES
from simpletune.models.lora_registry import LAYOUTS
from simpletune.models.shared.lora_layout import Layout, LoraNames
from simpletune.system.shell import quote_command

MOST = 100  # names that are compared
RENAME = (
    "import sys; from safetensors import safe_open; from safetensors.torch import save_file; "
    "source, out, old, new = sys.argv[1:]; file = safe_open(source, 'pt'); "
    "save_file({new + k.removeprefix(old) if k.startswith(old) else k: file.get_tensor(k) for k in file.keys()}, "
    "out, file.metadata())"
)
"""Gives the keys of a file that start with one prefix another."""


class Resemblance(NamedTuple):
    """What names are like."""

    words: str
    """A clause: 'unknown kind; resembles most ...'."""
    cut: str = ""
    """The start of the names before those of layers; empty: they have no such layers."""
    layout: Layout | None = None
    """The layout that knows the names without it."""

    def remedy(self, file: Path) -> str:
        """Say how to get a file that is read."""
        assert self.layout is not None
        out = file.with_name(f"{file.stem}-renamed.safetensors")
        command = quote_command("python", "-c", RENAME, file, out, self.cut, self.layout.prefix)
        return f"After {self.cut!r} they are those of {self.layout.names.title}. To rename them: {command}"


def resemblance(modules: Iterable[str], families: Collection[LoraNames] = ()) -> Resemblance:
    """Return what names of modules are like: those of a layout behind another prefix, or else the family that has most
    of their words, if it has half of them. ``families``: the only ones to compare with; none: all."""
    names = list(islice(modules, MOST))
    found: Counter[tuple[str, Layout]] = Counter()
    for name in names:
        for place in re.finditer(r"[._]", name):
            cut, rest = name[: place.end()], name[place.end() :]
            known = (each for own, layouts in LAYOUTS.items() for each in layouts if not families or own in families)
            found.update((cut, layout) for layout in known if layout.layers(layout.prefix + rest))
    if found:
        (cut, layout), count = found.most_common(1)[0]
        like = f"unknown kind; resembles most {layout.names.title}, whose layers {count} of {len(names)} names are"
        like += f" after {cut!r}"
        return Resemblance(like, cut, layout)
    words = {word for name in names for word in _words(name)}
    shares = {
        family.lora[0].names.title: len(
            words & {word for name in family.architecture.known_shapes() for word in _words(name)}
        )
        for family in FAMILIES
    }
    title = max(shares, key=lambda each: shares[each])
    if 2 * shares[title] < len(words):
        return Resemblance("unknown kind of file")
    shared = f"{shares[title]} of {len(words)} words of its names"
    return Resemblance(f"unknown kind; resembles most {title}, with {shared}")


def _words(name: str) -> Iterable[str]:
    return (word for word in re.split(r"[._]", name) if word and not word.isdecimal())
