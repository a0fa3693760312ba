"""Keep a run's folder in an object store: upload it while the run trains, fetch it where the run continues.

May import config, runs, system and options. Training may import this one.
"""
