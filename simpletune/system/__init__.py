"""The machine: files and disks, locks, signals, devices, the console, random streams.

Imports nothing else of the package but ``options``. Any room may import it.
"""
