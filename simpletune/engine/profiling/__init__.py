"""Where does a step's time go? PyTorch Profiler traces of chosen epochs, with a summary beside each.

A failure of the profiler never fails the run. Importing this imports no torch.
"""

from simpletune.engine.profiling.epochs import EpochTraces, Facts
from simpletune.system.phases import phase

__all__ = ["EpochTraces", "Facts", "phase"]
