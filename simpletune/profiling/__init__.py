"""PyTorch Profiler traces: a fresh, bounded window in each chosen epoch, its summary beside it, never in the way.

option.py: what can be chosen; place.py: which steps; window.py: one window; trace_file.py: what TensorBoard reads;
events.py, figures.py, summary.py: what the summary says; epochs.py holds it all together. Importing this imports no
torch.
"""

from simpletune.profiling.epochs import EpochTraces, Facts
from simpletune.system.phases import phase

__all__ = ["EpochTraces", "Facts", "phase"]
