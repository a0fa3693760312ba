"""Benchmark grids: ``python -m benchmarks GRID`` measures and writes JSON and Markdown tables.

Rows that are already in the JSON are not measured again, so a grid can be measured in several sessions. This package is
not installed; it may import every folder of ``simpletune``, and none imports it. ``tiny_models`` is no grid: it trains
the models that ship with the package.
"""

from __future__ import annotations
