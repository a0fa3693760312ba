"""A run's folder kept in an object store: uploaded while it trains, fetched where it continues.

May import config, runs, system and options. Training may import this one.
"""
