"""Is a run's result good, and which of its checkpoints: pictures by every checkpoint from the same noise, scored by
encoders.

May import drawing, encoders, estimate, runs and what is below them. The command line may import it.
"""
