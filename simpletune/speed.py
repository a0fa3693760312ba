"""The options for speed: none of them changes what is computed, but for the last bits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simpletune.options import Option

Kernel = Literal["auto", "flash", "cudnn", "efficient", "math"]


class Speed(Option):
    """What makes a step faster and takes no memory on the device."""

    attention: Kernel = "auto"
    """Which of PyTorch's kernels computes attention, in training and drawing. auto: PyTorch's choice; the run says
    which. Another: that one alone, or an error where it cannot run. math takes memory by the square of the tokens."""
    compile: bool = False
    """The blocks' forward and backward passes in training are compiled by torch.compile, which joins their element-wise
    steps: half a minute or more before the first step, each later one faster; for long runs. Exact but for the last
    bits. Memory is predicted for the run that is not compiled. Needs a C compiler, on a GPU Triton; goes on without
    where they lack, and says so."""
    prefetch: bool = True
    """The next step's pictures, embeddings and noise are read and drawn by a thread while a step is computed. Exact. On
    the CPU, where that thread would take a core from the step, nothing is fetched ahead."""
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """CPU threads. auto: what OMP_NUM_THREADS says; without it, on the CPU one for each 50 million parameters of the
    transformer, at most one a core, and with a GPU one a core. A resumed run keeps its number: with another one the
    last bits differ."""
