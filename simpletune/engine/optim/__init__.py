"""How are weights updated? The union ``Optimizer``, discriminated by ``optimizer.name``.

A new one takes a class in ``options.py`` and a line in the union; steps of our own are in ``*_steps.py``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.engine.optim.options import (
    Adafactor,
    AdamW,
    AdamW8bit,
    AdamWBF16,
    Lion8bit,
    PagedAdamW8bit,
    Prodigy,
    ScheduleFreeAdamW,
)

Optimizer = Annotated[
    AdamW | AdamW8bit | PagedAdamW8bit | Lion8bit | Adafactor | AdamWBF16 | Prodigy | ScheduleFreeAdamW,
    Field(discriminator="name"),
]
