"""A system that refuses locks."""

from __future__ import annotations

import fcntl
import os

import pytest


def fail_with(call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a call of the module fcntl, flock or fcntl, answers with an error."""

    def fail(*words: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, call, fail)
