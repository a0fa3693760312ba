"""simpletune: fine-tune Stable Diffusion 3, 3.5, XL, 1.5 and 2 on one graphics card."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("simpletune")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0.1.0"  # as in pyproject.toml
