"""Benchmark grids: ``python -m benchmarks GRID`` measures and writes JSON and Markdown tables.

Rows that are already in the JSON are not measured again, so a grid can be measured in several sessions. Each grid is a
module with ``run(folder, minutes, only, ...)``: it measures the missing rows whose names ``only`` selects, starts none
after ``minutes``, writes what it found into ``folder`` and returns the page. This package is not installed; it may
import every folder of ``simpletune``, and none imports it. ``tiny_models`` is no grid: it trains the models that ship
with the package. README.md lists the pages of results.
"""

from __future__ import annotations
