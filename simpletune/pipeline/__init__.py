"""The stages around a step: encode prompts and pictures, load the base model, plan modulations ahead, sample pictures.

May import config and what is below it. Step, runs and the rooms above may import it.
"""
