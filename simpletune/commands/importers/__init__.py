"""What does another trainer's configuration become here: what was taken, changed and left out?

docs/import.md has a line for every key. Imports neither torch nor any trainer; opens no pickles.
"""
