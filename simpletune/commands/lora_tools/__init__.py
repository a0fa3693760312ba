"""Convert LoRA files and their headers: export, merge, mix, extract, resize.

May import lora, runs and what is below them. Only the command line and the web page import it.
"""
