"""How are weights updated? The union ``Optimizer``, discriminated by ``optimizer.name``.

A new one takes one file here and one line in the union.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.engine.optim.adafactor import Adafactor
from simpletune.engine.optim.adamw import AdamW
from simpletune.engine.optim.adamw_bf16 import AdamWBF16
from simpletune.engine.optim.eight_bit import AdamW8bit, Lion8bit, PagedAdamW8bit
from simpletune.engine.optim.prodigy import Prodigy
from simpletune.engine.optim.schedule_free import ScheduleFreeAdamW

Optimizer = Annotated[
    AdamW | AdamW8bit | PagedAdamW8bit | Lion8bit | Adafactor | AdamWBF16 | Prodigy | ScheduleFreeAdamW,
    Field(discriminator="name"),
]
