"""Where the package and the files that ship with it are."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
ASSETS = PACKAGE / "assets"
