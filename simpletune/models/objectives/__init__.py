"""Training objectives: the union of ``objective.name``. Add one with a file here and a line in ``Objective``.

An objective draws noise levels, and its process noises latents, gives the target and the loss, on the device and
without reading from it. May import models and what is below it. Families, data and the packages above may import this
one.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, TypeAdapter

from simpletune.models.objectives.ddpm import Ddpm
from simpletune.models.objectives.flow import Flow

Objective = Annotated[Flow | Ddpm, Field(discriminator="name")]
"""The type of ``objective``."""


def default_objective(name: str) -> Flow | Ddpm:
    """Return an objective with its defaults by name; a family's ``objective`` is such a name."""
    return TypeAdapter[Flow | Ddpm](Objective).validate_python({"name": name})
