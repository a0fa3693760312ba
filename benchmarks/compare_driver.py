"""Run commands of one tree's ``python -m simpletune``, each in a fork of a process that has imported torch.

A program for ``python -P``, started by ``compare_trees.py`` with a tree as ``PYTHONPATH``. It knows no module of the
package: it runs the package itself, and imports beforehand whatever the first commands turned out to import.

Each line of standard input is a job, a JSON object: ``commands``, lists of words to run one after another until one
fails; ``processes``, how many run each command together, as torchrun starts them; ``log``, the file for what they
print; ``seconds``, after which a command is killed. A line answers each: ``code``, the first exit code that is not 0,
and ``seconds``.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from contextlib import redirect_stdout, suppress
from pathlib import Path

PACKAGE = "simpletune"
HEAVY = ("torch", "diffusers", "transformers", "peft")
STARTS_THREADS = "pyarrow"  # what a command that used it has imported is not imported beforehand


def serve(tree: Path) -> None:
    """Take jobs from standard input until it is closed.

    Raises:
        SystemExit: Python finds the package in another place than the tree.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None or not Path(spec.origin).resolve().is_relative_to(tree.resolve()):
        sys.exit(f"{PACKAGE} comes from {spec and spec.origin}, not from {tree}")
    os.fsync = os.fstat  # type: ignore[assignment]  # what a machine that loses power keeps is not compared
    tried = set(sys.modules)
    preload(HEAVY, tried)
    for line in sys.stdin:
        job, began = json.loads(line), time.monotonic()
        imported = Path(job["log"]).with_suffix(".imported")
        codes = (run(words, job, imported) for words in job["commands"])
        answer = {"code": next((code for code in codes if code), 0), "seconds": time.monotonic() - began}
        print(json.dumps(answer), flush=True)
        if imported.exists():
            preload(imported.read_text().split("\n"), tried)


def preload(names: tuple[str, ...] | list[str], tried: set[str]) -> None:
    """Import modules, each tried once; what they print goes to standard error."""
    with redirect_stdout(sys.stderr):
        for name in names:
            if name not in tried:
                tried.add(name)
                with suppress(Exception):  # made while its parent runs, or bound to another process
                    importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page


def run(words: list[str], job: dict[str, object], imported: Path) -> int:
    """Run one command in as many processes as the job says; the first exit code that is not 0."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world, late = int(str(job["processes"])), time.monotonic() + float(str(job["seconds"]))
    running, failed = {start(words, rank, world, port, (str(job["log"]), imported)) for rank in range(world)}, 0
    try:
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            running.discard(pid)
            failed = failed or (os.waitstatus_to_exitcode(status) if pid else 0)
            if failed or time.monotonic() > late:
                end(running)
            if not pid:
                time.sleep(0.01)
    finally:
        end(running)
    return failed


def end(running: set[int]) -> None:
    """Kill commands and what they have started."""
    for group in running:
        os.killpg(group, signal.SIGKILL)


def start(words: list[str], rank: int, world: int, port: int, files: tuple[str, Path]) -> int:
    """Fork a process that runs the package with these words and exits; its number."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        with suppress(OSError):  # the child has done it, or has ended
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        log, imported = files
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), said, said)):
            os.dup2(file, number)
        if world > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
        sys.argv = [PACKAGE, *words]
        code = exit_code()
        if rank == 0 and STARTS_THREADS not in sys.modules:
            imported.write_text("\n".join(name for name in sys.modules if "__main__" not in name))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_code() -> int:
    """Run ``python -m simpletune`` with ``sys.argv`` in this process."""
    try:
        runpy.run_module(PACKAGE, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
