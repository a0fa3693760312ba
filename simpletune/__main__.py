"""``python -m simpletune``."""

import sys

from simpletune.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
