"""Settings of the profiler's traces. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.system.options import Option


class Profile(Option):
    """PyTorch Profiler traces: one short window in each chosen epoch. Steps outside the windows cost nothing."""

    max_traces: Annotated[int, Field(ge=0)] = 5
    """Number of epochs to trace, evenly spread; 0: none, and the profiler is not loaded. Writing a trace takes seconds,
    not counted in the steps' times. At the end of the run the memory of one step is predicted for all traces, which
    takes as long as `simpletune estimate`."""
    wait: Annotated[int, Field(ge=0)] = 1
    """Steps to skip at the start of an epoch; they cost nothing."""
    warmup: Annotated[int, Field(ge=0)] = 1
    """Steps for the profiler to warm up, recorded but discarded; the first one is slow."""
    active: Annotated[int, Field(ge=1, le=20)] = 2
    """Consecutive steps to record, without validation or saving between them. Events stay in host memory until they are
    written."""
    with_stack: bool = False
    """Record the Python stack of each operation: more than twice the events and the trace's size; recorded steps are
    slower."""
    record_shapes: bool = False
    """Record the input shapes of every operation."""
    memory: bool = False
    """Record every allocation for TensorBoard's memory view, and the peak for the summary."""
    blocks: bool = False
    """Add a named range for the forward pass of each of the model's blocks, by hooks that exist only while the window
    is open: some microseconds per block."""
    snapshot: bool = False
    """On CUDA, write the allocator's history of the window (at most 100,000 entries, each with its Python stack) to
    memory_snapshot.pickle for https://pytorch.org/memory_viz: tens of MB, and slower allocations in the window."""
    max_mb: Annotated[float, Field(gt=0)] = 200.0
    """Drop a trace whose gzipped size exceeds this many MB (10^6 bytes); its summary is kept. While it is written, the
    disk also holds the uncompressed trace, which is many times as large."""
