"""Libraries of optional extras."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from simpletune.system.options import UserError
from simpletune.system.package import PACKAGE


def require_extra(module: str, extra: str, needs: str) -> None:
    """Refuse what needs a module of an optional extra that is not installed.

    Args:
        module: to find.
        extra: that installs it.
        needs: what needs it, such as ``simpletune serve needs``.
    """
    if find_spec(module) is None:
        raise UserError(
            f"{needs} {module} from the optional extra {extra!r}. "
            f'Run: {sys.executable} -m pip install -e "{PACKAGE.parent}[{extra}]"',
            code=3,
        )
