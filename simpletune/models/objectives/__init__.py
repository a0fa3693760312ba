"""How is noise added, and what does a model predict? The union of ``objective.name``.

An objective draws noise levels; its process noises latents and gives target and loss, on the device and without
reading from it. A new one takes one file here and one line in ``Objective``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.models.objectives.ddpm import Ddpm
from simpletune.models.objectives.flow import Flow

Objective = Annotated[Flow | Ddpm, Field(discriminator="name")]
"""The type of ``objective``."""
