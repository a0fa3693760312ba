"""``simpletune serve``: how are pictures generated over HTTP, in the format of Vertex AI's serving containers?

One thread runs the model (generator.py, worker.py); the others answer requests (requests.py, app.py, server.py).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from simpletune.system.options import UserError
from simpletune.system.package import PACKAGE

PACKAGES = ("prometheus_client",)


def require_packages() -> None:
    """Check that the optional packages are installed; the UserError has the command that installs a missing one."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        root = PACKAGE.parent
        raise UserError(
            f"simpletune serve needs {' and '.join(missing)} from the optional extra 'serve'. "
            f'Run: {sys.executable} -m pip install -e "{root}[serve]"',
            code=3,
        )
