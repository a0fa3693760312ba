"""A training run: set-up, the loop, what each step leaves, validation, and how a run ends.

May import every room but the command line and the server.
"""
