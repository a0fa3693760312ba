"""Stable Diffusion 1.5 and 2: the names of the U-Net's layers in LoRA files."""
