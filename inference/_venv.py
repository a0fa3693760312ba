"""Let the scripts in this folder run from any shell: outside .venv they restart themselves inside it."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def enter() -> None:
    """Start the script again with the project's own Python, unless simpletune is installed here.

    If the current folder has no runs/, change to the project's folder.
    """
    if not Path("runs").is_dir() and "--runs" not in sys.argv and (ROOT / "runs").is_dir():
        print(f"paths are taken from {ROOT}")
        sys.argv[0] = str(Path(sys.argv[0]).resolve())
        os.chdir(ROOT)
    if all(importlib.util.find_spec(name) is not None for name in ("simpletune", "torch", "diffusers")):
        return
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists() or Path(sys.prefix) == ROOT / ".venv":
        sys.exit(
            "error: simpletune is not installed. Run ./train.sh once, which sets everything up (or pip install -e .)"
        )
    os.execv(python, [str(python), *sys.argv])
