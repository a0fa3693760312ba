"""The training step: batches on the device, the step core, its attention kernel, and synthetic batches for simulations.

May import pipeline, config and what is below them. Estimate and training may import it.
"""
