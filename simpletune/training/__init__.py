"""A training run: set-up, the loop, what each step leaves, validation, and how a run ends.

May import estimate, report, step and what is below them. Only the command line imports it.
"""
