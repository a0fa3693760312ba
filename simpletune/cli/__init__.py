"""The command line. Each verb is a function plus one that fills its parser; heavy imports wait until a verb runs.

May import every room. Only ``__main__`` imports it.
"""
