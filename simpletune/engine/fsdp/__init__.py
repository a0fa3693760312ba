"""Full fine-tuning with weights, gradients and optimizer state sharded over processes, by torch's FSDP2.

May import options, tensors, system and optim. Adapters, step, runs and the packages above may import this one.
"""
