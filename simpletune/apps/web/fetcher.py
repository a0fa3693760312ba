"""Download a base for the page: ``python -m simpletune.apps.web.fetcher CONFIG STATE``. Writes how far it is to a file,
``{"done": MiB, "total": MiB}``, and prints what the command line prints. SIGTERM ends it: files that are complete stay,
and a part of a file, which no later download would continue, does not.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from simpletune.config.load import read_json, validate
from simpletune.system.atomic import write_json
from simpletune.system.console import print_any_text, progress_to, say
from simpletune.system.hub import MIB, listing, needed_files
from simpletune.system.options import UserError
from simpletune.system.signals import Stopped, handle_signals

EVERY = 0.5  # seconds between two writes


def fetch(config: Path, state: Path) -> None:
    """Download what a configuration's model needs from the Hub."""
    files = validate(read_json(config), "the base", needs_data=False, needs_model=False).model.files
    wanted = [file for part in files.hub_parts() for file in needed_files(part, listing(part.repository))]
    total = sum(file.bytes_to_fetch for file in wanted if not file.place.exists()) // MIB
    told = 0.0

    def count(done: int, _: int) -> None:
        nonlocal told
        if time.monotonic() < told + EVERY:
            return
        told = time.monotonic()
        left = sum(file.bytes_to_fetch for file in wanted if not file.place.exists()) // MIB
        write_json(state, {"done": max(0, min(total, total - left + done)), "total": total}, shared=True)

    write_json(state, {"done": 0, "total": total}, shared=True)
    with progress_to(count):
        files.fetch()


def main() -> int:
    """Run as the module's docstring says; exit code 2 after an error, which is printed, and 143 after SIGTERM."""
    print_any_text()
    try:
        with handle_signals():
            fetch(Path(sys.argv[1]), Path(sys.argv[2]))
    except (UserError, Stopped) as error:
        if isinstance(error, UserError):
            say(f"error: {error}")
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
