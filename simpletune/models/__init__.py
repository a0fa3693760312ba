"""Model families: the sources of their weights, their parts, shapes and operations.

``Model`` is the type of ``model``; a new family takes one file here and one line in it. May import memory, quant and
the packages below them. Adapters, data and the packages above may import this one.
"""

from __future__ import annotations

from simpletune.models.sd3 import SD3

Model = SD3
"""The type of ``model``; becomes a union discriminated by ``family`` once there are two families."""
