"""Judge a run's result and its checkpoints: draw with every checkpoint from the same noise, and score by encoders.

May import drawing, encoders, estimate, runs and what is below them. The command line may import it.
"""
