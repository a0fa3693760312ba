"""CLIP encoders and autoencoders that are read from their files once, and copied where they are loaded again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from simpletune.models.shared import autoencoder
from simpletune.models.shared.parts import Part
from simpletune.models.text import clip

KNOWN: dict[object, nn.Module] = {}
READ = {clip: "load_text_model", autoencoder: "load_autoencoder"}
"""Names of the functions that read a part, by the modules that call them."""


@contextmanager
def parts_read_once() -> Iterator[None]:
    """Reading takes most of a tiny run's preparation. Files that change are read again."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in READ.items():
            patch.setattr(module, name, _remembering(getattr(module, name)))
        yield


def _remembering(read: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @wraps(read)
    def remembered(part: Part, dtype: torch.dtype, *more: Any) -> nn.Module:
        place = part.file or part.folder
        files = [place] if part.file else sorted(Path(str(place)).iterdir())
        state = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        key = str((read.__name__, part.name, place, state, part.config(), dtype, more))
        if key not in KNOWN:
            KNOWN[key] = read(part, dtype, *more)
        return copy.deepcopy(KNOWN[key])

    return remembered
