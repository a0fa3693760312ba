"""Weights, gradients and optimizer state of full fine-tuning divided among processes, by torch's FSDP2.

May import options, tensors, system and optim. Adapters, step, runs and the packages above may import this one.
"""
