"""What does another trainer's configuration become here: what was taken, changed and left out?

docs/how-to/from-other-trainers.md has a line for every key. Imports neither torch nor any trainer; opens no pickles.
"""
