"""Libraries of optional extras."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from simpletune.system.options import UserError
from simpletune.system.package import PACKAGE
from simpletune.system.shell import install_command


def install_extra(extra: str) -> str:
    """Return the command that installs an optional extra: of a checkout, which is installed in place, or of the
    package."""
    checkout = PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        return install_command("-e", f"{'.' if Path.cwd() == checkout else checkout}[{extra}]")
    return install_command(f"simpletune[{extra}]")


def require_extra(module: str, extra: str, needs: str) -> None:
    """Refuse what needs a module of an extra that is not installed; ``needs``: as in ``simpletune serve needs``."""
    if find_spec(module) is None:
        raise UserError(
            f"{needs} {module} from the optional extra {extra!r}. Run: {install_extra(extra)}",
            code=3,
        )
