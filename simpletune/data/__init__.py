"""Pictures and captions, the plan of which step trains on which, and the cache of latents and embeddings.

``data.source`` is the union ``Data``: a new source is one file here and one line in it. May import models and what is
below it. Config and the rooms above may import it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.data.folder import Folder
from simpletune.data.table import Table

Data = Annotated[Folder | Table, Field(discriminator="source")]
