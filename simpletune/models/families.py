"""Model families: the sources of their weights, their parts, shapes and operations; the union of ``model.family``.

A new family takes a folder here and a line in ``Model``. Its option provides data and pure functions, so that no other
package needs to ask for a family's name. May import objectives, models and what is below them. Adapters, data and the
packages above may import this one; a family imports no other.
"""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from simpletune.models.sd3.option import SD3
from simpletune.models.sd15.option import SD15
from simpletune.models.shared.family import Family

Model = Annotated[SD3 | SD15, Field(discriminator="family")]
"""The type of ``model``."""
FAMILIES: tuple[Family, ...] = tuple(member.model_validate({}) for member in get_args(get_args(Model)[0]))
"""One option of each family, with its defaults."""
