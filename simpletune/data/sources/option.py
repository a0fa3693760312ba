"""The union of data sources.

A new one takes one file here and one line in the union, plus one in ``One`` (``multi_source.py``) if it may be mixed.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.data.sources.folder import Folder
from simpletune.data.sources.multi_source import MultiSource
from simpletune.data.sources.stream import Stream
from simpletune.data.sources.table import Table

Data = Annotated[Folder | Table | Stream | MultiSource, Field(discriminator="source")]
