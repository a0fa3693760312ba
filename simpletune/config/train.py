"""The section ``train``: length of a run, batch size, seed, clipping."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simpletune.system.options import Option


class Train(Option):
    """Length of the run, batch size, seed, gradient clipping and handling of NaN."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Number of optimizer steps. Set this or epochs."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Number of epochs. Each epoch uses every sample once: each picture ``data.repeats`` times. Set this or steps."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Number of pictures per forward pass, all of the same shape: a micro-batch. auto: the largest that divides
    global_batch and is predicted to fit; the run keeps the number."""
    gradient_accumulation: Annotated[int, Field(ge=1)] = 1
    """Micro-batches per step, over all processes; the effective batch size is batch_size times this. The last step of
    an epoch may have fewer."""
    global_batch: Annotated[int, Field(ge=1)] | None = None
    """Number of pictures per step, over all processes: a step has global_batch / batch_size micro-batches. Set this
    or gradient_accumulation."""
    reduce: Literal["fast", "exact"] = "fast"
    """Sum of the gradients of a step's micro-batches. fast: each process adds up its own, and all exchange the sums;
    the last bits depend on the number of processes. exact: by a fixed tree in fp32, so that 1, 2, 4 and 8 processes
    give the same bits (on GPUs with speed.deterministic), and their number may change during a run without changing its
    results; takes memory for one more sum of gradients for each doubling of a process's micro-batches."""
    fsdp: Literal["none", "full"] = "none"
    """How processes divide the weights in full fine-tuning. none: each holds all, with their gradients and optimizer
    state; full: each holds a part (FSDP2), and a block's whole weights only while it computes. One alone holds all."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of all random numbers, which depend only on it and the step."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Maximum gradient norm; null: do not clip."""
    clip: Literal["global", "per_parameter"] = "global"
    """Gradients that clip_norm limits. global: the norm over all gradients, as usual; per_parameter: the norm of each
    parameter's gradient, which changes the proportions between parameters. memory.optimizer_in_backward supports only
    per_parameter."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action when the loss or a gradient is NaN or infinite. stop: end the run and name the samples and parameters;
    skip: leave the weights unchanged, and end the run after five skipped steps in a row. skip waits for the loss before
    each update."""

    @property
    def micro_batch(self) -> int:
        """Pictures per forward pass; 1 while batch_size is auto."""
        return 1 if self.batch_size == "auto" else self.batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches per step, over all processes."""
        return self.gradient_accumulation if self.global_batch is None else self.global_batch // self.micro_batch

    def uses_fsdp(self, processes: int) -> bool:
        """Return whether this number of processes divides the weights among them."""
        return self.fsdp == "full" and processes > 1
