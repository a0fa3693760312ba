"""The stages around a step: encode prompts and pictures, load the base model, plan modulations ahead, sample pictures.

May import config and the packages below it. Step, runs and the packages above may import this one.
"""
