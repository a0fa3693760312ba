"""What can be chosen about traces. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.options import Option


class Profile(Option):
    """PyTorch Profiler traces: one bounded window in each of some epochs. Steps outside of the windows cost nothing."""

    max_traces: Annotated[int, Field(ge=0)] = 5
    """How many epochs are traced, spread evenly; 0: none, and nothing of the profiler is loaded. Each costs the time of
    writing it, outside of the steps' own: seconds for every 100,000 events. At the end of the run a step's memory is
    predicted once for all, which takes as long as `simpletune estimate`."""
    wait: Annotated[int, Field(ge=0)] = 1
    """Steps of an epoch before the window; they cost nothing."""
    warmup: Annotated[int, Field(ge=0)] = 1
    """Steps in which the profiler gets ready and what it sees is thrown away; the first of them is slow."""
    active: Annotated[int, Field(ge=1, le=20)] = 2
    """Steps that are recorded, one after another, without validation or saving between them. Events stay in host memory
    until they are written. A step of the demo's tiny model has 6,000 of them, 280 bytes each in the trace and 21
    after gzip; SD3 Medium's 24 blocks have several times that."""
    with_stack: bool = False
    """Record the Python calls behind each operation: on the demo 2.4 times the events and 2.5 times the trace; recorded
    steps are slower."""
    record_shapes: bool = False
    """Record the shapes of every operation's inputs: on the demo 1.3 times the trace."""
    memory: bool = False
    """Record every allocation, for TensorBoard's memory view, and the highest point for the summary: on the demo 1.3
    times the events."""
    blocks: bool = False
    """Name a range for each of the transformer's blocks in the forward pass, by hooks that are there only while the
    window is open: some microseconds a block."""
    snapshot: bool = False
    """On CUDA, write the allocator's history of the window (at most 100,000 entries, each with its Python stack) as
    memory_snapshot.pickle, for https://pytorch.org/memory_viz: slower allocations in the window, and tens of MB."""
    max_mb: Annotated[float, Field(gt=0)] = 200.0
    """A trace that is larger than this, gzipped, in MB of 10^6 bytes, is dropped; its summary stays. Meanwhile the disk
    holds it unpacked, about 14 times as large."""
