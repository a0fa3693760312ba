"""The base class of optimizer options, and saving and loading optimizer state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.engine.optim.state import State
from simpletune.system.options import Json, Option, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from simpletune.engine.optim.ema import Average
    from simpletune.engine.optim.place import ParameterRange

STATE_KEY = re.compile(r"^(\d+)\.(.+)$")


class OptimizerOption(Option):
    """Fields shared by all optimizers. Members define ``name`` (the tag)."""

    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate after warm-up. Common values: 1e-4 for LoRA; 1e-5 to 5e-5 for full fine-tuning with batch size 4 or
    more."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Rounding of bf16 weights after an update. nearest loses small updates, so full fine-tuning in bf16 stalls."""

    bytes_per_parameter: ClassVar[float]
    """Bytes of optimizer state per trained fp32 parameter."""

    draws: ClassVar[bool] = False
    """Whether the optimizer itself draws random numbers."""
    steps_in_backward: ClassVar[bool] = True
    """Whether a parameter's update needs no other parameter's gradient."""
    undoes: ClassVar[bool] = True
    """Whether an update can be undone on the device, as a step with fp16 products needs."""
    averages: ClassVar[bool] = False
    """Whether the optimizer itself averages the weights, and takes no other schedule than a constant one."""
    no_fsdp_reason: ClassVar[str | None] = None
    """Why it cannot update a shard of a parameter by itself; None: it can."""

    def rules(self) -> Iterator[Problem]:
        """Check the options on their own."""
        yield from ()

    def build(
        self,
        parameters: Iterable[nn.Parameter],
        in_backward: bool = False,
        ratios: Sequence[float] | None = None,
        places: Sequence[ParameterRange] | None = None,
    ) -> torch.optim.Optimizer:
        """Build the optimizer. With stochastic rounding, bf16 parameters step in fp32, a few at a time.

        Args:
            parameters: the parameters to train.
            in_backward: whether each is updated separately (``RoundedOptimizer.update``).
            ratios: a factor on each parameter's learning rate; None: 1 for all.
            places: the place of each parameter in the whole one, if the parameters are shards.
        """
        from simpletune.engine.optim.rounding import RoundedOptimizer

        parameters = list(parameters)
        rounded = self.rounding == "stochastic" and any(parameter.itemsize < 4 for parameter in parameters)
        if rounded or self.draws or in_backward or set(ratios or ()) - {1.0}:
            return RoundedOptimizer(parameters, self.make, rounded, ratios, places)
        return self.make(parameters)

    def place(self, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
        """Move a loaded state tensor to its parameter's device, except for step counters."""
        return value if name == "step" else value.to(parameter.device)

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the underlying optimizer. Its ``step`` must neither read device tensors from the host nor wait for the
        device."""
        raise NotImplementedError

    def average(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Average | None:
        """Return the average of the weights that the optimizer keeps for drawing, evaluating and exporting, or None."""
        return None


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


def load_state(
    option: OptimizerOption, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], scalars: Json
) -> None:
    """Restore the result of ``state_to_tensors`` bit for bit, moving each tensor to where the optimizer needs it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    merged: State = {**tensors, **scalars["values"]}
    moved: dict[str, Tensor] = {}
    for key, source in {**{key: key for key in merged}, **scalars["shared"]}.items():
        match = STATE_KEY.match(key)
        if match is None:
            raise ValueError(f"optimizer state has an invalid name: {key}")
        parameter = parameters[int(match[1])]
        value = merged[source]
        if key in scalars["shared"] or source in scalars["shared"].values():
            value = moved.setdefault(f"{source}@{parameter.device}", value.to(parameter.device))
        elif source in tensors:
            value = option.place(parameter, match[2], value)
        optimizer.state[parameter][match[2]] = value
