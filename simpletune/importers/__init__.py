"""``simpletune import``: other trainers' configurations as ours, with what was taken, changed and left out.

- importing.py: all of it in order; files.py: read JSON and TOML; command.py: the verb.
- translation.py: what became of each key; rows of tables; values as the trainers write them.
- simpletuner.py, kohya.py, onetrainer.py: what each trainer's options mean here; *_table.py: those with one meaning;
  *_data.py, *_concepts.py: its data sets; left_out.py: what has no place here, and what it did.
- optimizers.py, lycoris.py, kohya_prompts.py: names and arguments that several share; prompts to draw.

docs/import.md has a line for every key. Imports neither torch nor any trainer; opens no pickles. May import config and
what is below it. Only the command line and the web page import it.
"""
