"""How long operations take: measured constants of a device, and stated ones of cards without measurements.

- grid.py: seconds by shape, measured at points and interpolated between them.
- constants.py: what is known of a device, and its file.
- stopwatch.py, probes.py, host_probes.py, calibrate.py: measure the device at hand (``simpletune calibrate``).

May import memory, quant and what is below them.
"""
