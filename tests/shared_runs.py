"""Implements ``train_once`` and ``copy_run`` of conftest.py: from a configuration's JSON to a run's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

TrainOnce = Callable[[dict], Path]
