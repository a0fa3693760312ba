"""Identify this process among those that train together, end it with its launcher, and count what it does."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

from simpletune.system.options import UserError

LOST = 7  # exit code: another process of the run has ended, is lost or hangs; restarting all is enough
OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
AGAIN = "Start all processes again with --resume auto, as torchrun does with --max-restarts"


def is_first_process() -> bool:
    """Return whether this process prints and writes for all; true for a single process."""
    # For code without an Accelerator; agrees with its is_main_process, because launchers set RANK.
    return process_number() == 0


def process_number() -> int:
    """Return this process's rank among those that train together; 0 if it trains alone."""
    return _number("RANK", 0) if process_count() > 1 else 0


def process_count() -> int:
    """Return how many processes train together, as set by the launcher."""
    return _number("WORLD_SIZE", 1)


def local_process_count() -> int:
    """Return how many of them run on this machine, as set by the launcher; 1 if it is not set."""
    return _number("LOCAL_WORLD_SIZE", 1) if process_count() > 1 else 1


def _number(name: str, default: int) -> int:
    """Read a whole number from a variable of the launcher. Raises UserError if it is none."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={text} is no whole number. Unset it to train in one process, or start with torchrun")
    return int(text)


def meeting_place() -> tuple[str, int]:
    """Return the address and port at which the processes meet."""
    return os.environ.get("MASTER_ADDR") or "127.0.0.1", _number("MASTER_PORT", 29500)


def require_launch() -> None:
    """Check what a launcher sets, which may be left over from another program in a pod, a shell or a cluster's job.

    A process that trains alone loses the variables by which accelerate would wait for others. Raises UserError, which
    names the variable, if one is missing or wrong.
    """
    together = process_count()
    if together == 0:
        raise UserError("WORLD_SIZE=0 asks for no process. Unset it to train in one process, or start with torchrun")
    for name in OF_MPI:
        if together == 1 and _number(name, 1) > 1:
            raise UserError(
                f"{name}={os.environ[name]} asks for several processes, but MPI starts none here. Unset it to train in "
                "one process, or start several with torchrun"
            )
        os.environ.pop(name, None)
    if together == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        return
    wanted = f"WORLD_SIZE={together} asks for {together} processes, but"
    remedy = "Unset WORLD_SIZE to train in one process, or start with torchrun"
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name, "").strip():
            raise UserError(f"{wanted} {name} is not set. {remedy}")
    if _number("RANK", 0) >= together:
        raise UserError(f"{wanted} RANK={process_number()} is none of 0 to {together - 1}. {remedy}")
    _number("LOCAL_RANK", 0)
    if not 0 < meeting_place()[1] < 2**16:
        raise UserError(f"{wanted} MASTER_PORT={meeting_place()[1]} is no port from 1 to 65535. {remedy}")


def end_with_launcher(every: float = 1.0) -> None:
    """End this process soon after torchrun is gone, from now on; do nothing in one that torchrun did not start."""
    # torchrun ends its processes when it is stopped, but not when it is killed; then they would wait for each other for
    # half an hour, and hold the run's lock. Heartbeats say so only once the processes have met.
    # Not PR_SET_PDEATHSIG: it also kills when the launcher's thread ends that started this process. Not where a shell
    # has started the processes by hand: they outlive it. Where torchrun is process 1 of a container, it is the parent
    # from the start, and the container ends with it.
    if process_count() > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_with, args=(os.getppid(), every), name="launcher", daemon=True).start()


def _end_with(parent: int, every: float) -> None:
    # torchrun may be gone before this process sees its parent; but it has served a store since before the start.
    starts, refused = True, 0
    while os.getppid() == parent and refused < 3:
        starts = starts and _is_refused()
        refused += starts
        time.sleep(every)
    end_lost(process_number(), process_count(), f"the launcher (process {parent}) is gone")


def _is_refused() -> bool:
    """Return whether nothing listens where torchrun serves a store."""
    try:
        socket.create_connection(meeting_place(), 2.0).close()
    except ConnectionRefusedError:
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    except OSError:  # a slow network says nothing
        pass
    return False


def end_lost(number: int, of: int, why: str) -> None:
    """End this process at once. Files are whole: all are written under temporary names and renamed."""
    with suppress(OSError):
        os.write(2, f"\nerror: process {number} of {of}: {ending_reason(why)}\n".encode())
    os._exit(LOST)


def ending_reason(why: str) -> str:
    """Return the error message of a process that ends because of another process."""
    return f"{why}. This process ends, too; everything saved is intact. {AGAIN}"


class WorkDone:
    """What this process has done, so that others can tell a long task from a hang."""

    count = 0  # pieces of work: images, prompts, denoising steps, training steps
    trains = False  # a training step was finished


progressed = WorkDone()
