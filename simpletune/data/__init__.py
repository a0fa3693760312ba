"""Data sources: the union of ``data.source``. A new source is one file here and one line in ``Data``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.data.folder import Folder
from simpletune.data.table import Table

Data = Annotated[Folder | Table, Field(discriminator="source")]
