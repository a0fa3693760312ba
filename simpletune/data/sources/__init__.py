"""Pictures and captions, the plan of what each step trains on, and the cache of latents and embeddings.

``data.source`` selects a member of the union ``Data``; a new source takes one file here and one line in the union, plus
one in ``One`` (``several.py``) if it may be mixed with others. May import models and the packages below it. Config and
the packages above may import this one.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.data.sources.folder import Folder
from simpletune.data.sources.several import Several
from simpletune.data.sources.stream import Stream
from simpletune.data.sources.table import Table

Data = Annotated[Folder | Table | Stream | Several, Field(discriminator="source")]
