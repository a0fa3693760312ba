"""``python -m simpletune``."""

import sys

from simpletune.apps.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
