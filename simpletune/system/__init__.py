"""The machine: files, disks, locks, signals, devices, the console and random streams.

Imports only ``options`` from the rest of the package. Any package may import this one.
"""
