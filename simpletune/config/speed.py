"""Options for speed; they change results only by rounding."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simpletune.system.options import Option

Kernel = Literal["auto", "flash", "cudnn", "efficient", "math"]


class Speed(Option):
    """Make steps faster without using device memory."""

    attention: Kernel = "auto"
    """PyTorch kernel for the transformer's attention in training and validation. auto: PyTorch chooses; the run prints
    its choice. Any other value forces that kernel, and is tried with all shapes of the run before it starts. math needs
    memory quadratic in the number of tokens. Autoencoder and text encoders always use PyTorch's choice."""
    compile: bool = False
    """Compile the transformer blocks for training with torch.compile, which fuses element-wise operations. Delays the
    first step by half a minute or more and speeds up the others, so it suits long runs. Results differ only by
    rounding. Memory predictions assume the uncompiled model. Needs a C compiler, and Triton on a GPU; without them the
    run prints a note and continues uncompiled."""
    prefetch: bool = True
    """Load the next step's latents and embeddings and draw its noise in a background thread. Does not change results.
    Ignored on the CPU, where the thread would compete with the step for cores."""
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Number of CPU threads. auto: OMP_NUM_THREADS if set; otherwise one per core with a GPU, and on the CPU one per 50
    million parameters of the transformer, at most one per core. A resumed run keeps its number, because another number
    changes rounding."""
