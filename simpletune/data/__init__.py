"""Data sources: the union of ``data.source``. A new source is one file here and one line in ``Data``."""

from __future__ import annotations

from simpletune.data.folder import Folder

Data = Folder
"""What ``data`` may be; a union told apart by ``source`` as soon as there are two."""
