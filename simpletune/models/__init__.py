"""Model families: where their weights come from, their parts, shapes and operations.

``Model`` is what ``model`` may be: a new family is one file here and one line in it. May import memory, quant and what
is below them. Adapters, data and the rooms above may import it.
"""

from __future__ import annotations

from simpletune.models.sd3 import SD3

Model = SD3
"""What ``model`` may be; a union told apart by ``family`` as soon as there are two."""
