"""The section ``speed`` of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from simpletune.system.options import Option, Problem

Kernel = Literal["auto", "flash", "cudnn", "efficient", "math"]


class Speed(Option):
    """Make steps faster without using device memory."""

    attention: Kernel = "auto"
    """PyTorch kernel for the denoiser's attention in training and validation. auto: PyTorch chooses among flash,
    efficient and math; --verbose prints its choice. Any other value forces that kernel, and is tried with all shapes of
    the run before it starts. cudnn runs only by name: its gradients have been wrong on Hopper. math needs memory
    quadratic in the number of tokens. Autoencoder and text encoders always use PyTorch's choice, without cudnn."""
    compile: bool = False
    """Compile the denoiser's blocks for training with torch.compile, which fuses element-wise operations. Delays the
    first step by half a minute or more and speeds up the others, so it suits long runs. Results differ only by
    rounding. Memory predictions assume the uncompiled model. Needs a C compiler, and Triton on a GPU; without them the
    run prints a note and continues uncompiled."""
    deterministic: bool = False
    """On a GPU, use only algorithms that sum in a fixed order, so that the same run on the same card gives the same
    bits. Otherwise attention and convolutions add up gradients in any order. Takes memory, which predictions count, and
    time, which they do not. An operation without such an algorithm ends the run. The CPU always sums in a fixed
    order."""
    graphs: Literal["auto"] | bool = "auto"
    """Replay the forward and backward pass of a micro-batch as one CUDA graph, so that no Python runs between its
    kernels. Speeds up steps where the machine queues kernels more slowly than the card computes them: fast cards at
    batch 1, small pictures, UNets. Exact. Takes 0.1 to 0.6 s for each size of pictures, a few percent more memory, and
    about 10 KB of the driver's for each kernel and size, which predictions count. true: wherever possible; otherwise
    the run says why not. auto: where a measurement at the start shows a gain; off until a card has shown that replayed
    passes have the bits of plain ones."""
    prefetch: bool = True
    """Load the next step's latents and embeddings and draw its noise in a background thread. Does not change results.
    Ignored on the CPU, where the thread would compete with the step for cores."""
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Number of CPU threads. auto: OMP_NUM_THREADS if set; otherwise one per core with a GPU, and on the CPU one per 50
    million parameters of the denoiser, at most one per core. A resumed run keeps its number, because another number
    changes rounding."""

    def rules(self) -> Iterator[Problem]:
        """Refuse a kernel without a fixed order."""
        if self.deterministic and self.attention == "cudnn":
            yield Problem(
                "speed.attention",
                "cudnn adds up gradients in any order. Use auto or flash, or speed.deterministic=false",
            )
