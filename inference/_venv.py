"""Lets the scripts of this folder run from any shell: outside of .venv they start again inside it."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def enter() -> None:
    """Start the script again with the project's own Python, unless simpletune is installed here."""
    if all(importlib.util.find_spec(name) is not None for name in ("simpletune", "torch", "diffusers")):
        return
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists() or Path(sys.prefix) == ROOT / ".venv":
        sys.exit("error: simpletune is not installed. Run ./train.sh once: it sets everything up (or pip install -e .)")
    os.execv(python, [str(python), *sys.argv])
