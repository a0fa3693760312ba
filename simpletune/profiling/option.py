"""What can be chosen about traces. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from simpletune.options import Option


class Profile(Option):
    """PyTorch Profiler traces: one bounded window in each of some epochs. Steps outside of the windows cost nothing."""

    max_traces: Annotated[int, Field(ge=0)] = 5
    """How many epochs are traced, spread evenly; 0: none, and nothing of the profiler is loaded. Each costs the time of
    writing it, outside of the steps' own: about a second per 100,000 events."""
    wait: Annotated[int, Field(ge=0)] = 1
    """Steps of an epoch before the window; they cost nothing."""
    warmup: Annotated[int, Field(ge=0)] = 1
    """Steps in which the profiler runs and what it sees is thrown away; they are slower, as recorded ones are."""
    active: Annotated[int, Field(ge=1, le=20)] = 2
    """Steps that are recorded, one after another, without validation or saving between them. Events stay in host memory
    until they are written: about 1 KB each, of which SD3 Medium has tens of thousands a step."""
    with_stack: bool = False
    """Record the Python lines behind each operation: several times the events, and steps several times slower."""
    record_shapes: bool = False
    """Record the shapes of every operation's inputs: a larger trace, and a few per cent slower."""
    memory: bool = False
    """Record every allocation, for TensorBoard's memory view: an event each, about a third more of them."""
    blocks: bool = False
    """Name a range for each of the transformer's blocks in the forward pass, by hooks that are there only while the
    window is open: some microseconds a block."""
    snapshot: bool = False
    """On CUDA, write the allocator's history of the window (at most 100,000 entries, each with its Python stack) as
    memory_snapshot.pickle, for https://pytorch.org/memory_viz: slower allocations in the window, and tens of MB."""
    max_mb: Annotated[float, Field(gt=0)] = 200.0
    """A trace that is larger than this, gzipped, in MB, is dropped; its summary stays. TensorBoard's plugin needs some
    20 times a trace's size in memory."""
