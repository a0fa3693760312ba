"""A GPU in software: PyTorch's CUDA build computes without a card, and a seed owns the clock. See README.md."""
