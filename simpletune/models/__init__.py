"""Model families: the union of ``model.family``. A new one is one file here and one line in ``Model``."""

from __future__ import annotations

from simpletune.models.sd3 import SD3

Model = SD3
"""What ``model`` may be; a union told apart by ``family`` as soon as there are two."""
