"""simpletune: fine-tune Stable Diffusion 3 Medium on one graphics card."""

__version__ = "0.1.0"
