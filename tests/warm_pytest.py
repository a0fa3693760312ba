"""A process that has imported torch and the other packages, and forks one that runs pytest for each line it reads.

``tests/mutants.py`` starts it with a copy of the project as ``PYTHONPATH``, because these imports take longer than most
tests. Nothing of the project is imported here, so each child imports that anew, with the fault that the copy then has.

A line is a JSON object: ``folder`` to run in, ``words`` for pytest, ``environment`` (all of it), and ``said``, the file
for the output. Two lines answer it: first the child's process ID, which is also its process group's; when the child has
ended, its exit code, or the negative number of the signal that ended it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
from typing import Any

BARE = "--bare"  # import nothing beforehand
BROKEN = 70  # exit code of a child in which pytest itself has failed


def preload() -> None:
    """Import what tests and runs use of other packages, including late imports."""
    import bitsandbytes  # noqa: F401
    import diffusers.training_utils  # noqa: F401
    import hypothesis  # noqa: F401
    import optimum.quanto  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import transformers  # noqa: F401
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel  # noqa: F401
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    from transformers import CLIPTextModelWithProjection, T5EncoderModel  # noqa: F401


def serve() -> None:
    """Take jobs from standard input until it is closed."""
    if BARE not in sys.argv:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        preload()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    for line in sys.stdin.buffer:
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
        pid = os.fork()
        if not pid:
            run(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run(job: dict[str, Any]) -> None:
    """Run pytest in this forked child, and exit."""
    code = BROKEN
    try:
        os.setsid()
        said = os.open(job["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), said, said)):
            os.dup2(file, number)
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        sys.dont_write_bytecode, tempfile.tempdir = True, None
        import pytest

        code = int(pytest.main(job["words"]))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
