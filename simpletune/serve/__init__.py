"""``simpletune serve``: images over HTTP, in the format of Vertex AI's serving containers, and a page to try it.

One thread drives the model (generator.py, worker.py); the rest answers requests (requests.py, app.py, server.py).

May import drawing and what is below it. Only the command line imports it.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from simpletune.options import UserError

PACKAGES = ("starlette", "uvicorn", "prometheus_client")


def require_packages() -> None:
    """Whether the optional packages are installed.

    Raises:
        UserError: one is missing; with the command that installs them.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        root = Path(__file__).resolve().parents[2]
        raise UserError(
            f"simpletune serve needs {' and '.join(missing)}, which the optional extra 'serve' brings. "
            f'Run: {sys.executable} -m pip install -e "{root}[serve]"',
            code=3,
        )
