"""What a run's page shows, read from the run's files: progress, charts, pictures, comparisons; and its forms' fields.

May import report, runs and what is below them, and no other part of the pages. Only those import it.
"""
