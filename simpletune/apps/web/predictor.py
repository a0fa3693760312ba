"""Predict for the page in a process that stays, whose next prediction need not import torch again and begins with what
it knows of the last one.

Reads a line of JSON from standard input for each prediction, the words of ``simpletune estimate``. Writes lines of
JSON: ``[share, part, seconds left]`` meanwhile, and ``{"code": ..., "out": ..., "err": ...}`` at the end. Ends with its
input, or when it has had nothing to do for a while.
"""

from __future__ import annotations

import io
import json
import select
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout

from simpletune.apps.cli.main import main
from simpletune.system.console import watch_progress

IDLE = 120.0  # seconds, after which it gives its half GiB of memory back
MOST = 50  # predictions, which each leave some results in its memory


def serve() -> None:
    """Answer requests until there are none."""
    requests, answers = sys.stdin, sys.stdout

    def write(answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    for _ in range(MOST):
        if not select.select([requests], [], [], IDLE)[0] or not (line := requests.readline()):
            return
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), watch_progress(lambda *progress: write(progress)):
            try:
                code = main(json.loads(line))
            except Exception:  # a defect of ours, which the page shows; the next request may not meet it
                code = 1
                traceback.print_exc()
        write({"code": code, "out": out.getvalue(), "err": err.getvalue()})


if __name__ == "__main__":
    serve()
