"""PyTorch Profiler traces: a fresh, bounded window in each chosen epoch, its summary beside it, never in the way.

``option``: what can be chosen; ``windows``: which steps; ``window``: one window; ``trace_file``: what TensorBoard
reads; ``events``, ``aggregate``, ``summary``: what the summary says; ``epochs`` holds it all together; ``phases``
and ``kinds``: the names. Importing this imports no torch.

May import memory, cards and system. Config and the rooms above may import it.
"""

from simpletune.profiling.epochs import EpochTraces, Facts
from simpletune.system.phases import phase

__all__ = ["EpochTraces", "Facts", "phase"]
