"""Training methods: the union of ``adapter.method``. Add one with a file here and a line in ``Adapter``.

May import models and what is below it. Config, lora and the packages above may import it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.adapters.adapter import NoAdapter
from simpletune.adapters.dora import Dora
from simpletune.adapters.full import Full
from simpletune.adapters.hypernetwork import Hypernetwork
from simpletune.adapters.loha import Loha
from simpletune.adapters.lokr import Lokr
from simpletune.adapters.lora import Lora
from simpletune.adapters.oft import Oft
from simpletune.adapters.partial import Partial

Adapter = Annotated[
    Lora | Dora | Full | Partial | Lokr | Loha | Oft | Hypernetwork | NoAdapter, Field(discriminator="method")
]
