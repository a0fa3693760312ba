"""A run's folder: opening, resuming, checkpoints, summary, model card, and finding weights by name.

May import pipeline, config, lora and what is below them. Report, estimate and the packages above may import it.
"""
