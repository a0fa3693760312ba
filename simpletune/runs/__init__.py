"""A run's folder: opened, resumed, its checkpoints, summary, model card, and the weights that a name stands for.

May import pipeline, config, lora and what is below them. Report, estimate and the rooms above may import it.
"""
