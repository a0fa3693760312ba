"""Benchmark grids: ``python -m benchmarks GRID`` measures, and writes JSON and Markdown tables.

A grid's row that is already in the JSON is not measured again, so that a grid can be done in portions. Not part of the
installed package: it may import every room, and no room imports it.
"""

from __future__ import annotations
