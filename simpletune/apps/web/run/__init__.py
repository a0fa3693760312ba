"""The content of a run's page, read from the run's files: progress, charts, pictures, comparisons; and its forms'
fields.

May import report, runs and what is below them, but no other part of the pages. Only the pages import it.
"""
