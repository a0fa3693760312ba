"""How are tensors stored, multiplied and updated? Knows no diffusion."""
