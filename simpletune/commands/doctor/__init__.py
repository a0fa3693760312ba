"""Can this machine train? Checks, 20 steps in each precision, and a file for bug reports.

The parent process imports no torch; what may crash runs in a child (probe.py, probe_steps.py).
"""
