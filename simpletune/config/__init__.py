"""The configuration: TrainConfig, reading it from JSON and overrides, describing its problems, and resolving names to
folders. Imports no torch.

May import the options (adapters, data, models, memory, quant, optim, profiling) and what is below them. Pipeline and
the packages above may import it.
"""
