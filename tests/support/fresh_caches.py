"""Functions with a cache, as they were before their first call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any


def uncalled(function: Any) -> Callable[..., Any]:
    """A function with an empty cache of its own, for a test that counts calls and leaves the cache as it is."""
    return lru_cache(**function.cache_parameters())(function.__wrapped__)
