"""Tell which family a base belongs to, from its name or its files."""

from __future__ import annotations

from pathlib import Path

from simpletune.models.families import FAMILIES
from simpletune.models.shared.family import Family
from simpletune.models.shared.single_file import open_file
from simpletune.models.shared.sources import is_single_file
from simpletune.system.options import UserError

DENOISERS = tuple(family.denoiser for family in FAMILIES)
"""Folders of the denoisers in pipelines."""


def denoiser_in(folder: Path) -> Path | None:
    """Return the folder of a whole transformer or UNet inside a folder."""
    return next((folder / name for name in DENOISERS if (folder / name).is_dir()), None)


def family_of(source: str) -> Family | None:
    """Return the family of a base, with its defaults; None if only a download could tell.

    Args:
        source: a Hub name, a folder in diffusers' layout, or a single file.
    """
    return next((family for family in FAMILIES if _is_of(source, family)), None)


def _is_of(source: str, family: Family) -> bool:
    if is_single_file(source) and Path(source).is_file():
        try:
            return open_file(Path(source), family.layout).has(family.denoiser)
        except UserError:
            return False  # not a file of this family
    return (Path(source) / family.denoiser).is_dir() or family.bundled_config(source) is not None
