"""The state of optimizers as torch keeps it, and as a checkpoint saves and loads it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from simpletune.system.options import Json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STATE_KEY = re.compile(r"^(\d+)\.(.+)$")
State = dict[str, Any]
"""A parameter's optimizer state or a group's settings, as in torch: tensors and plain values by name."""


def begin_step(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer compute what the updates of the next step share; most share nothing and have no such method."""
    prepare = getattr(optimizer, "begin_step", None)
    if prepare is not None:
        prepare()


def state_to_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], Json]:
    """Flatten optimizer state to named tensors and plain values.

    Stores tables that several parameters share once. Waits for the device if the host reads paged state directly.

    Returns:
        Tensors by ``{parameter}.{name}``, and a JSON object with ``values``, the plain values by such names, and
        ``shared``, the names of shared tables.
    """
    import torch

    tensors: dict[str, Tensor] = {}
    values: Json = {}
    shared: dict[str, str] = {}
    seen: dict[bytes, str] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries: list[tuple[int, str, Tensor | int | float]] = [
        (number, name, value)
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
    ]
    if any(getattr(value, "is_paged", False) for _, _, value in entries):  # bitsandbytes' mark
        torch.cuda.synchronize()
    for number, name, value in entries:
        key = f"{number}.{name}"
        if not isinstance(value, torch.Tensor):
            values[key] = value
        elif not name.startswith("qmap"):
            tensors[key] = value
        else:  # bitsandbytes' look-up table, which every parameter's state repeats
            source = seen.setdefault(value.cpu().numpy().tobytes(), key)
            if source == key:
                tensors[key] = value
            else:
                shared[key] = source
    return tensors, {"values": values, "shared": shared}
