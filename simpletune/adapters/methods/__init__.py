"""Which weights does ``adapter.method`` train? The union of training methods.

A new one takes one file here and one line in ``Adapter``.
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
