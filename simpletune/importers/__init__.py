"""``simpletune import``: other trainers' configurations as ours, with what was taken, changed and left out.

- translation.py: what became of each key; rows of a table; values as the trainers write them.
- simpletuner.py, kohya.py, onetrainer.py: what each trainer's keys mean here, as tables; *_data.py, *_concepts.py: their
  data sets. optimizers.py: names and arguments of optimizers and schedules, which they share.
- files.py: read JSON and TOML, and recognise the form; importing.py: all of it in order.

docs/import.md has a line for every key. Imports neither torch nor any trainer; opens no pickles. May import config and what
is below it. Only the command line and the web page import it.
"""
