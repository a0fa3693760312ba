"""What every optimizer option offers, and how optimizer state goes to disk and back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from simpletune.options import Option

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

STATE_KEY = re.compile(r"^(\d+)\.(.+)$")


class OptimizerOption(Option):
    """Fields that every optimizer has. Members define ``name`` (the tag)."""

    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate after warm-up. In use: LoRA 1e-4; full fine-tuning 1e-5 to 5e-5 with a batch of 4 or more."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How bf16 weights are rounded after an update. Nearest loses small updates: full fine-tuning in bf16 stalls."""

    bytes_per_parameter: ClassVar[float]
    """Bytes of optimizer state per trained parameter, for parameters held in fp32."""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over some parameters; bf16 ones step in fp32, one at a time, and are rounded as asked."""
        from simpletune.optim.rounding import RoundedOptimizer

        parameters = list(parameters)
        if self.rounding == "stochastic" and any(parameter.itemsize < 4 for parameter in parameters):
            return RoundedOptimizer(parameters, self.make)
        return self.make(parameters)

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer itself. Its ``step`` must not read a tensor of the device from the host."""
        raise NotImplementedError


def state_to_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimizer state as flat named tensors and plain values.

    Tensors that several parameters share are written once.

    Returns:
        Tensors as ``{parameter}.{name}``, and a JSON object: plain values the same way, ``shared`` names.
    """
    import torch

    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    shared: dict[str, str] = {}
    seen: dict[tuple[int, int], str] = {}
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            key = f"{number}.{name}"
            if not isinstance(value, torch.Tensor):
                values[key] = value
                continue
            identity = (value.data_ptr(), value.numel())
            if value.numel() and identity in seen:
                shared[key] = seen[identity]
            else:
                seen[identity] = key
                tensors[key] = value
    return tensors, {"values": values, "shared": shared}


def load_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
    """Put back what ``state_to_tensors`` gave, bit for bit, each tensor on its parameter's device."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    merged: dict[str, Any] = {**tensors, **scalars["values"]}
    moved: dict[str, Tensor] = {}
    for key, source in {**{key: key for key in merged}, **scalars["shared"]}.items():
        match = STATE_KEY.match(key)
        if match is None:
            raise ValueError(f"optimizer state has an unreadable name: {key}")
        parameter = parameters[int(match[1])]
        value = merged[source]
        if source in tensors:
            home = "cpu" if match[2] == "step" else parameter.device
            value = moved.setdefault(f"{source}@{home}", value.to(home))
        optimizer.state[parameter][match[2]] = value
