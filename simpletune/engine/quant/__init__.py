"""In which precision are frozen weights stored and multiplied? The union ``Precision`` of ``precision.weights``.

A new one takes one file here and one line in the union.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.engine.quant.int8 import Int8
from simpletune.engine.quant.int8_quanto import Int8Quanto
from simpletune.engine.quant.nf4 import Nf4
from simpletune.engine.quant.plain import BF16, FP32

Precision = Annotated[BF16 | FP32 | Int8 | Int8Quanto | Nf4, Field(discriminator="weights")]
