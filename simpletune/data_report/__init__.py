"""A look at a data set before anything else: what is unusable, small, alike, uncaptioned, and how it is cut.

May import report, config and what is below them. Only the command line imports it.
"""
