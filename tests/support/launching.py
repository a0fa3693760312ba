"""Fork processes from one that has imported everything: runs of several, started as torchrun does, and programs.

The launcher is a fork, too: of the process that asks for jobs, before that has threads. It reads jobs from a socket,
one JSON object per line, and answers each with a line.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import failpoints

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120  # seconds that a job may take


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        codes: of the processes, by rank; negative: the signal that ended one.
        said: what each wrote.
        after: seconds from the first end to that of each.
    """

    codes: list[int]
    said: list[str]
    after: list[float]


class Launcher:
    """Starts jobs, one at a time. Use it as a context: its process ends with it.

    Args:
        folder: for configurations and logs.
    """

    def __init__(self, folder: Path | None = None):
        self.folder, self.jobs = folder, 0
        preload()
        ours, theirs = socket.socketpair()
        self.process = os.fork()
        if not self.process:
            be_launcher(theirs)
        theirs.close()
        self.link = ours.makefile("rw")
        ours.close()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
        os.waitpid(self.process, 0)

    def train(
        self,
        *configs: dict[str, Any],
        resume: str | None = None,
        moments: dict[int, str] | None = None,
        kills: dict[int, float] | None = None,
        alone: bool = False,
    ) -> Outcome:
        """Run ``simpletune train`` in one process per configuration.

        Args:
            configs: one for each process, of which the first is rank 0; they differ only in tests of what differs.
            resume: ``latest`` or ``auto``.
            moments: by rank, what failpoints do.
            kills: by rank, after how many seconds to kill it.
            alone: leave the others to themselves when one has failed, unlike a launcher, for ``PATIENCE`` seconds.
        """
        place = self._place()
        for rank, config in enumerate(configs):
            (place / f"{rank}.json").write_text(json.dumps(config))
        job = {"place": str(place), "processes": len(configs), "moments": moments or {},
               "kills": kills or {}, "alone": alone, "arguments": ["--resume", resume] if resume else []}  # fmt: skip
        return self._outcome(place, job)

    def programs(
        self,
        code: str,
        *words: list[str],
        environment: dict[str, str] | None = None,
        limit: float = PATIENCE,
        patience: float = PATIENCE,
    ) -> Outcome:
        """Run ``python -c`` with the heavy libraries imported, at once in one process per list of words.

        Args:
            code: of all of them.
            words: the arguments of each.
            environment: beside the launcher's own.
            limit: seconds that the others may go on after one has ended badly.
            patience: seconds that all may take.
        """
        place = self._place()
        job = {"place": str(place), "processes": len(words), "code": code, "words": words,
               "alone": limit < PATIENCE, "limit": limit, "patience": patience}  # fmt: skip
        return self._outcome(place, job | {"environment": environment or {}})

    def _place(self) -> Path:
        """A new job's folder."""
        assert self.folder is not None
        self.jobs += 1
        place = self.folder / f"job-{self.jobs:02d}"
        place.mkdir(parents=True)
        return place

    def _outcome(self, place: Path, job: dict[str, Any]) -> Outcome:
        print(json.dumps(job), file=self.link, flush=True)
        codes, after = json.loads(self.link.readline())
        return Outcome(codes, [(place / f"{rank}.log").read_text() for rank in range(len(codes))], after)


def be_launcher(link: socket.socket) -> NoReturn:
    """Take jobs until there are no more, as a process that shares nothing with the one it was forked from."""
    code = 1
    try:
        keep_only(link)
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        os.chdir(ROOT)
        os.fsync = os.fstat  # type: ignore[assignment]  # as in tests/conftest.py
        answers = open(0, "w", closefd=False)
        for line in open(0):
            prepare()
            print(json.dumps(launch(json.loads(line))), file=answers, flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def keep_only(link: socket.socket) -> None:
    """Leave the descriptors, streams and hooks of the process that was forked, except for its standard error."""
    os.dup2(link.fileno(), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin, sys.stdout, sys.stderr = open(os.devnull), open(1, "w"), open(2, "w", buffering=1)
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def prepare() -> None:
    """Before the first job: what every job would otherwise do anew."""
    from simpletune.config.schema import TrainConfig
    from simpletune.system.devices import prepare_environment

    prepare_environment()
    failpoints.install_all()
    TrainConfig.model_rebuild()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page


@contextmanager
def free_port() -> Iterator[str]:
    """A port of this machine to listen on, which the system gives nobody else within this context."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's TCPStore does, which then can listen
        held.bind(("127.0.0.1", 0))
        yield str(held.getsockname()[1])


def launch(job: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Start a job's processes and wait; when one fails the others are ended, as a launcher does.

    Returns:
        The exit code of each, and how many seconds after the first one it ended.
    """
    with free_port() as port:
        return wait_for({start(job, rank, int(port)): rank for rank in range(job["processes"])}, job)


def wait_for(ranks: dict[int, int], job: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Wait for a job's processes, given as ranks by process number; returns what ``launch`` does."""
    began = time.monotonic()
    codes, ends, late = [0] * len(ranks), [0.0] * len(ranks), began + job.get("patience", PATIENCE)
    kills = {int(rank): began + seconds for rank, seconds in job.get("kills", {}).items()}
    running = {pid: os.pidfd_open(pid) for pid in ranks}
    while ranks:
        select.select(running.values(), [], [], 0.1)  # until one ends
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            os.close(running.pop(pid))
            ends[ranks[pid]], codes[ranks.pop(pid)] = time.monotonic(), os.waitstatus_to_exitcode(status)
        failed = any(code < 0 for code in codes) and not job.get("alone")
        ended = [end for end, code in zip(ends, codes, strict=True) if code]
        failed |= bool(ended) and time.monotonic() > min(ended) + job.get("limit", PATIENCE)
        for other, rank in ranks.items():
            if failed or time.monotonic() > min(late, kills.get(rank, late)):
                os.kill(other, signal.SIGKILL)
    return codes, [end - min(ends) for end in ends]


def start(job: dict[str, Any], rank: int, port: int) -> int:
    """Fork one process of a job; its number."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        place = Path(job["place"])
        log = os.open(place / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = program(job, rank) if "code" in job else train(job, rank, port)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def program(job: dict[str, Any], rank: int) -> int:
    """Execute a job's code with the words of one process; its exit code."""
    os.environ |= job["environment"]
    sys.argv = ["-c", *job["words"][rank]]
    try:
        exec(job["code"], {"__name__": "__main__"})
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def train(job: dict[str, Any], rank: int, port: int) -> int:
    """One process of a run; its exit code."""
    world = str(job["processes"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    from simpletune.apps.cli.main import main

    if str(rank) in job["moments"]:
        failpoints.arm_all(job["moments"][str(rank)])
    return main(["train", str(Path(job["place"]) / f"{rank}.json"), *job["arguments"]])


def preload() -> None:
    """Import what runs and tests import late, so that forked children start at once."""
    import bitsandbytes  # noqa: F401
    import diffusers.training_utils  # noqa: F401
    import optimum.quanto  # noqa: F401
    import peft.tuners.lora.bnb  # noqa: F401
    import torch.distributed.algorithms.ddp_comm_hooks.default_hooks  # noqa: F401
    import transformers  # noqa: F401
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel  # noqa: F401
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    from transformers import CLIPTextModelWithProjection, T5EncoderModel  # noqa: F401

    import simpletune.adapters.files.write  # noqa: F401
    import simpletune.apps.cli.main  # noqa: F401
    import simpletune.engine.memory.block_offload  # noqa: F401
    import simpletune.engine.memory.recompute  # noqa: F401
    import simpletune.estimate.simulate.simulate  # noqa: F401
    import simpletune.models.sd3.joint_block  # noqa: F401
    import simpletune.models.sd3.sd3_text  # noqa: F401
    import simpletune.runs.report.single_run  # noqa: F401

    if find_spec("torch.profiler._cupti_monitor"):  # of torch 2.13
        import_module("torch.profiler._cupti_monitor")
    Image.preinit()
