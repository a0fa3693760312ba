"""The Hugging Face hub: choose files, download them, and explain every failure.

May import system and what is below it; models, data and runs import it.
"""
