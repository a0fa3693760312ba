"""simpletune: fine-tune Stable Diffusion 3, 3.5, 1.5 and 2 on one graphics card."""

__version__ = "0.1.0"
