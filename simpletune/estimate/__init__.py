"""What a run takes, known before it runs, and the settings that fit.

job.py: the whole job's prediction, kept by its configuration; needs.py: host memory, disk, download. planning.py: of
the levers' combinations those that fit and should be fastest; pace.py: seconds by arithmetic. forecast.py: a run's
prediction before it starts, and beside what was measured. ask.py, ask_plan.py, text.py, picture.py: the verbs.
"""
