"""Is a run's result good, and which of its checkpoints: pictures by every checkpoint from the same noise, scored by
encoders.

`encoders/` knows nothing of the rest, so that drawing may use it. May import drawing, estimate, runs and what is below
them. The command line may import it.
"""
