"""The training step: batches on the device, the step core, its attention kernel, and synthetic batches for simulations.

May import pipeline, config and the packages below them. Estimate and training may import this one.
"""
