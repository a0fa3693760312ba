"""Stable Diffusion 3 and 3.5: its option, parameter shapes, files, text encoders, transformer and operations."""
