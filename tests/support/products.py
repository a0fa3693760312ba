"""Runs with products in int8, and a count of the project's own operators."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tiny_runs import merged
from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.config.load import validate
from simpletune.runs.folder import read_metrics
from simpletune.training.train import train


class Counted(TorchDispatchMode):
    """Counts the project's own operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "simpletune":
            self.calls[function.name()] += 1
        return function(*args, **(kwargs or {}))

    @property
    def quantised(self) -> int:
        return self.calls["simpletune::int8_rows"]


def with_products(tiny_config: dict, **changes: Any) -> dict:
    # 32 image tokens: more than the rows that are dequantised
    data = merged(tiny_config, data={"resolution": 64}, train={"batch_size": 2})
    data["precision"] = {"weights": "int8", "compute": "bf16", "products": "int8", "input_gradient": "int8"}
    return merged(data, **changes)


def losses(data: dict) -> list[float]:
    return [row["loss"] for row in read_metrics(train(validate(data, "run")))]
