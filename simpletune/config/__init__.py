"""The configuration: TrainConfig, reading it from JSON and overrides, its problems in words, and the folders that its
names stand for. Imports no torch.

May import the options (adapters, data, models, memory, quant, optim, profiling) and what is below them. Pipeline and
the rooms above may import it.
"""
