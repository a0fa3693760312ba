"""How long operations take: measured constants of a device, and stated ones of cards without measurements.

- grid.py: seconds by shape, measured at points and interpolated between them.
- constants.py: what is known of a device, and its file.
- work.py, recorder.py: what a simulated step makes device and host do; speeds.py, stated.py: how long each takes, as
  measured or by a data sheet; timeline.py: the step's time, with the waits between streams.
- stopwatch.py, probes.py, probe_calls.py, host_probes.py, machine_probes.py, composite.py, calibrate.py: measure the
  device at hand (``simpletune calibrate``). moment.py: this CPU, where that has not run.

May import memory, quant and what is below them.
"""
