"""The options for speed: none of them changes what is computed, but for the last bits."""

from __future__ import annotations

from typing import Literal

from simpletune.options import Option

Kernel = Literal["auto", "flash", "cudnn", "efficient", "math"]


class Speed(Option):
    """What makes a step faster and takes no memory on the device."""

    attention: Kernel = "auto"
    """Which of PyTorch's kernels computes attention, in training and drawing. auto: PyTorch chooses, and the run says
    what; another: that one alone, or an error where it cannot run; math takes memory by the square of the tokens."""
    prefetch: bool = True
    """The next step's pictures, embeddings and noise are read and drawn by a thread while a step is computed. Exact. On
    the CPU, where that thread would take a core from the step, nothing is fetched ahead."""
