"""The options for speed: none of them changes what is computed, but for the last bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from simpletune.options import Option, Problem

Kernel = Literal["auto", "flash", "cudnn", "efficient", "math", "products"]


class Speed(Option):
    """What makes a step faster and takes no memory on the device."""

    attention: Kernel = "auto"
    """Which kernel computes attention, in training and drawing. auto: PyTorch's choice, on a CPU with bf16 instructions
    products for small pictures; the run says which. Another: that one alone, or an error where it cannot run. products
    is the project's own, for the CPU: the backward pass does not compute the probabilities again; it and math take
    memory by the square of the tokens."""
    compile: bool = False
    """The blocks' forward and backward passes in training are compiled by torch.compile, which joins their element-wise
    steps: half a minute or more before the first step, each later one faster; for long runs. Exact but for the last
    bits. Memory is predicted for the run that is not compiled. Needs a C compiler, on a GPU Triton; goes on without
    where they lack, and says so."""
    prefetch: bool = True
    """The next step's pictures, embeddings and noise are read and drawn by a thread while a step is computed. Exact. On
    the CPU, where that thread would take a core from the step, nothing is fetched ahead."""

    def rules(self) -> Iterator[Problem]:
        """Own kernels are not compiled."""
        if self.compile and self.attention == "products":
            yield Problem(
                "speed.attention", "products is not for compiled blocks. Use auto with speed.compile, or compile=false"
            )
