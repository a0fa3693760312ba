"""Optimizers: the union of ``optimizer.name``. A new one is one file here and one line in ``Optimizer``."""

from __future__ import annotations

from simpletune.optim.adamw import AdamW

Optimizer = AdamW
"""What ``optimizer`` may be; a union told apart by ``name`` as soon as there are two."""
