"""How long operations take: a device's measured constants, or data-sheet figures for cards without measurements.

- grid.py: seconds by shape, measured at points and interpolated between them.
- constants.py: a device's constants, and their file.
- work.py, recorder.py: a simulated step's work on device and host; speeds.py, stated.py: how long it takes, as measured
  or by a data sheet; timeline.py: the step's time, with the waits between streams.
- stopwatch.py, probes.py, probe_calls.py, host_probes.py, machine_probes.py, composite.py, calibrate.py: measure this
  device (``simpletune calibrate``). moment.py: measures this CPU if that has not run.

May import memory, quant and what is below them.
"""
