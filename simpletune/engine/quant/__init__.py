"""In which precision are frozen weights stored and multiplied? The union ``Precision`` of ``precision.weights``.

A new one takes a class in ``precision.py`` and a line in the union. Quantised layers are in ``*_linear.py`` and
``int8_conv.py``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.engine.quant.precision import BF16, FP32, Int8, Int8Quanto, Nf4

Precision = Annotated[BF16 | FP32 | Int8 | Int8Quanto | Nf4, Field(discriminator="weights")]
