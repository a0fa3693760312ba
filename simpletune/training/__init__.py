"""Training: set-up, the loop, metrics of launched steps, validation, and the end of a run.

May import estimate, report, step and what is below them. Only the command line imports it.
"""
