"""PyTorch Profiler traces: record a short window in each chosen epoch, with a summary beside each trace.

``option``: settings; ``schedule``: choice of the steps; ``window``: one window; ``trace_file``: the file for
TensorBoard; ``events``, ``aggregate``, ``kinds``, ``summary``: content of the summary; ``epochs``: the windows of a
run. A failure of the profiler never fails the run. Importing this imports no torch.

May import memory, cards and system. Config and the packages above may import it.
"""

from simpletune.engine.profiling.epochs import EpochTraces, Facts
from simpletune.system.phases import phase

__all__ = ["EpochTraces", "Facts", "phase"]
