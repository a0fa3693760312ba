"""A step of a model that is too small to compute anything: what it takes is what the host needs to run the code.

Single operations in a loop find everything in the caches; the code of a step does not. The step's time over the sum of
its parts, counted by the same recorder that a prediction uses, scales them.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simpletune.memory.accounting import Accounting
from simpletune.system.phases import phase
from simpletune.timing.recorder import Recorder
from simpletune.timing.stopwatch import CpuStopwatch, CudaStopwatch

WIDTH, HEADS, TOKENS, BLOCKS = 32, 2, 16, 8


class _Layer(nn.Module):
    """A frozen linear layer with a trained update, as LoRA's."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 0.5


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (_Layer(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = _Layer(WIDTH, 2 * WIDTH), _Layer(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm_2(x)), approximate="tanh"))


def with_composite(watch: CpuStopwatch | CudaStopwatch, host: dict[str, float]) -> dict[str, float]:
    """Add the seconds of the step, and what it consists of, to the host's seconds.

    Args:
        watch: of the device.
        host: from ``host_seconds``.

    Returns:
        The same with ``composite``, the step's seconds, and ``composite.WHAT``, how often it does what.
    """
    with torch.enable_grad():
        model = nn.Sequential(*(_Block() for _ in range(BLOCKS))).to(watch.device)
        x = torch.zeros(1, TOKENS, WIDTH, device=watch.device)

        def step() -> None:
            with phase("forward"):
                loss = model(x).sum()
            with phase("backward"):
                loss.backward()
            for parameter in model.parameters():
                parameter.grad = None

        step()
        recorder, accounting = Recorder(cuda=False), Accounting()
        with accounting, recorder.watching(accounting):
            step()
        seconds = watch.host_seconds(step)
    counts: Counter[str] = Counter()
    for section in recorder.sections:
        counts.update(section.host)
        counts["kernel"] += sum(section.work.values())
    return {**host, "composite": seconds, **{f"composite.{name}": float(count) for name, count in counts.items()}}
