"""``simpletune import``: translate other trainers' configurations; report what was taken, changed and left out.

- importing.py: the steps in order; files.py: read JSON and TOML; command.py: the verb. - translation.py: record what
becomes of each key; table rows; parse values as trainers write them. - simpletuner.py, kohya.py, onetrainer.py:
translate each trainer's options; *_table.py: those with one meaning;
  **_data.py, *_concepts.py: data sets; left_out.py: options without a counterpart, and what they did.
- optimizers.py, lycoris.py, kohya_prompts.py: names and arguments that several trainers share; prompts to draw.

docs/import.md has a line for every key. Imports neither torch nor any trainer; opens no pickles. May import config and
what is below it. Only the command line and the web page import it.
"""
