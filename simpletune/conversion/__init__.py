"""LoRA files from one form to another: export, merge, mix, extract, resize, with what their headers say.

May import lora, runs and what is below them. Only the command line and the web page import it.
"""
