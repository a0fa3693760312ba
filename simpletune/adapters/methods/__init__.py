"""Training methods: the union of ``adapter.method``. Add one with a file here and a line in ``Adapter``.

May import models and what is below it. Config, lora and the packages above may import it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.adapters.methods.adapter import NoAdapter
from simpletune.adapters.methods.dora import Dora
from simpletune.adapters.methods.full import Full
from simpletune.adapters.methods.hypernetwork import Hypernetwork
from simpletune.adapters.methods.loha import Loha
from simpletune.adapters.methods.lokr import Lokr
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.oft import Oft
from simpletune.adapters.methods.partial import Partial

Adapter = Annotated[
    Lora | Dora | Full | Partial | Lokr | Loha | Oft | Hypernetwork | NoAdapter, Field(discriminator="method")
]
