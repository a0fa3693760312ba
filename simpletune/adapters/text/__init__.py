"""The text side: embeddings of a new token (textual inversion) and LoRA on CLIP: options, training and files.

option.py, rules.py, sizes.py and placeholders.py import no torch. May import adapters, families and what is below them.
Config and the packages above may import it.
"""
