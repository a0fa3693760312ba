"""Model families: the sources of their weights, their parts, shapes and operations; the union of ``model.family``.

A new family takes a folder here and a line in ``Model``. Its option is composed of data and pure functions
(``Family``), so that no other package needs to ask for a family's name. May import objectives, models and what is below
them. Adapters, data and the packages above may import this one; a family imports no other.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, get_args

from pydantic import Field

from simpletune.models.flux2.flux2_option import Klein
from simpletune.models.qwen_image.qwen_image_option import QwenImage
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.shared.family import Family
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.single_file import is_single_file
from simpletune.models.shared.words import PublicBase
from simpletune.models.zimage.zimage_option import ZImage
from simpletune.system.hub import cached_folder
from simpletune.system.hub_account import Access, access_to
from simpletune.system.options import UserError

Model = Annotated[SD3 | SD15 | SDXL | Klein | ZImage | QwenImage, Field(discriminator="family")]
"""The type of ``model``."""
FAMILIES: tuple[Family, ...] = tuple(member.model_validate({}) for member in get_args(get_args(Model)[0]))
"""One option of each family, with its defaults."""
DENOISERS = tuple(dict.fromkeys(family.denoiser for family in FAMILIES))
"""Folders of the denoisers in pipelines."""


def denoiser_in(folder: Path) -> Path | None:
    """Return the folder of a whole denoiser inside a folder; None if there is none."""
    return next((folder / name for name in DENOISERS if (folder / name).is_dir()), None)


def family_of(source: str) -> Family | None:
    """Return the family, with its defaults, of a base: a Hub name, a folder in diffusers' layout, or a single file.

    Returns:
        None if only a download could tell, or if several families have such a part and none can train this one.
    """
    single = is_single_file(source) and Path(source).is_file()
    candidates = [family for family in FAMILIES if _may_be(family, source, single)]
    for family in candidates if len(candidates) > 1 or single else ():
        with suppress(UserError, KeyError, TypeError):  # it is of another family, or damaged
            config, own = (
                family.model_copy(update={"pretrained": source}).files.denoiser_config(False),
                family.architecture.diffusers_class,
            )
            if config is not None and config.get("_class_name", own) == own:
                return family
    return candidates[0] if len(candidates) == 1 and not single else None


def family_of_config(config: ModelConfig) -> Family:
    """Return the family of a denoiser's ``config.json``: of those with its class, the first that can train it, else the
    first. A configuration without a class is of the first family, whose files have none. Raises UserError if no family
    has its class."""
    name = str(config.get("_class_name", FAMILIES[0].architecture.diffusers_class))
    fitting = [family for family in FAMILIES if family.architecture.diffusers_class == name]
    for family in fitting if len(fitting) > 1 else ():
        with suppress(UserError, KeyError, TypeError):
            family.files.require_supported({**config, "_class_name": name}, "")
            return family
    if fitting:
        return fitting[0]
    wanted = " or ".join(dict.fromkeys(family.architecture.diffusers_class for family in FAMILIES))
    raise UserError(f"{name} is not the class of a known model. Use {wanted}")


def family_by_name(source: str) -> Family | None:
    """Return the family, with its defaults, that the last part of a base's name suggests (``published_as``)."""
    last = re.split(r"[/\\]", source.rstrip("/\\"))[-1]
    return next((family for family in FAMILIES if re.search(family.words.published_as, last)), None)


def likely_family(source: str) -> Family:
    """Return the family, with its defaults, that a base's files or else its name tell; the first if neither does."""
    return family_of(source) or family_by_name(source) or FAMILIES[0]


def public_base(name: str) -> PublicBase | None:
    """Return the public model with a Hub name; None if it is none of the families'."""
    return next((base for family in FAMILIES for base in family.words.bases if base.name == name), None)


def is_downloaded(name: str) -> bool:
    """Return whether all parts that training needs of a base on the Hub are in the Hub's cache."""
    parts = likely_family(name).model_copy(update={"pretrained": name}).files.hub_parts()
    return all(cached_folder(part) is not None for part in parts)


def base_access(name: str) -> Access:
    """Return whether a base on the Hub is here, or else what ``access_to`` says."""
    return Access("here") if is_downloaded(name) else access_to(name)


def family_suggested(source: str) -> Family | None:
    """Return the family that a base's name suggests, where neither its files nor a known Hub name tell it."""
    return family_by_name(source) if family_of(source) is None else None


def _may_be(family: Family, source: str, single: bool) -> bool:
    """Return whether a base has a part of the family's name, or is known by its Hub name."""
    try:
        if single:
            return family.files.single_file(source).has(family.denoiser)
    except UserError:
        return False  # not a file of this family
    return os.path.isdir(Path(source) / family.denoiser) or family.files.bundled_config(source) is not None
