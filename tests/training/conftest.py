"""What the tests of trainings share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from parts_read_once import parts_read_once


@pytest.fixture(scope="module", autouse=True)
def each_part_is_read_once() -> Iterator[None]:
    with parts_read_once():
        yield
