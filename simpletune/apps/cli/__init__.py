"""Which verbs and arguments does the command line have?

Each verb is one function, plus one that adds its arguments; heavy imports wait until a verb runs.
"""
