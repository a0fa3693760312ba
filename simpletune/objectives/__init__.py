"""Training objectives: the union of ``objective.name``. Add one with a file here and a line in ``Objective``.

An objective draws noise levels, and its process noises latents, gives the target and the loss, on the device and
without reading from it. May import models and what is below it. Families, data and the packages above may import this
one.
"""

from __future__ import annotations

from simpletune.objectives.flow import Flow

Objective = Flow
"""The type of ``objective``; a union discriminated by ``name`` once there are two."""
