"""simpletune: fine-tune Stable Diffusion, FLUX.2 klein, Z-Image and Qwen-Image on one graphics card."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("simpletune")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0.2.0"  # as in pyproject.toml
