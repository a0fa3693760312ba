"""The command line. Each verb is one function, plus one that adds its arguments; heavy imports wait until a verb runs.

May import every package. Only ``__main__`` imports it.
"""
