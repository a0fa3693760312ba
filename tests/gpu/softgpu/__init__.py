"""A GPU in software: PyTorch's CUDA build computes without a card, in an order that a seed chooses. See README.md."""
