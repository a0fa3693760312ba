"""The command line: each verb is a function and what fills its parser. Nothing heavy is imported before a verb runs.

May import every room. Only ``__main__`` imports it.
"""
