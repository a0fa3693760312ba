"""The machine: files, disks, locks, signals, devices, the console and random streams.

Imports nothing else of the package but ``options``. Any room may import it.
"""
