"""A configuration's form, made from its option classes: what can be set, what a user has set, and the consequences.

- fields.py: the fields that a configuration has, with the text and help of each; edit.py: a user's changes on top of a
  base; presets.py: bases by card; paths.py: which files a form may name.

Knows nothing of HTTP and imports no torch. May import init, config and what is below them. Only ``web`` imports it.
"""
