"""How many CPU threads a run computes with, and how they wait for each other."""

from __future__ import annotations

import os
from pathlib import Path

PARAMETERS_PER_THREAD = 50_000_000
"""Of the transformer. With fewer, two threads are slower than one even on an idle machine: a step is made of many short
operations, and threads meet at the end of each. Measured on two cores with 7 to 445 million parameters and 256 image
tokens: two threads take 1.20 to 1.11 of one thread's time up to 55 million, 0.74 at 112 and 0.64 at 445 million."""
ASKED, WAITING = "OMP_NUM_THREADS", "OMP_WAIT_POLICY"
AUTO = "SIMPLETUNE_AUTO_THREADS"  # marks an OMP_NUM_THREADS that is ours; processes started from here see it, too


def usable_cores() -> int:
    """Cores that this process may use: a container's quota counts, which torch does not see."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores


def prepare_threads() -> None:
    """Set OpenMP's environment, which it reads once: call this before torch is imported. What the user has set stays.

    Waiting threads sleep. By default they spin, and on a core that has other work each barrier then lasts until the
    scheduler's next turn: training a small model on a busy machine takes 25 to 50 times as long.
    """
    os.environ.setdefault(WAITING, "PASSIVE")
    if ASKED not in os.environ:
        os.environ |= {ASKED: str(usable_cores()), AUTO: "1"}


def choose_threads(option: int | str, parameters: int, on_cpu: bool, kept: int | None = None) -> tuple[int, str]:
    """The number of threads and the reason for it, in words.

    Args:
        option: ``speed.threads``.
        parameters: of the transformer.
        on_cpu: whether the CPU computes the steps; on a GPU all cores may help.
        kept: the number that a resumed run began with: another one sums in another order, so the last bits differ.
    """
    if isinstance(option, int):
        return option, "speed.threads"
    if AUTO not in os.environ and ASKED in os.environ:
        return int(os.environ[ASKED]), ASKED
    if kept is not None:
        return kept, "auto: as this run began"
    cores = usable_cores()
    if not on_cpu:
        return cores, "auto: all cores"
    return max(1, min(cores, parameters // PARAMETERS_PER_THREAD)), (
        f"auto: one for each {PARAMETERS_PER_THREAD // 10**6} million parameters, of {cores} cores"
    )


def use_threads(count: int) -> None:
    """Compute with so many threads from now on."""
    import torch

    torch.set_num_threads(count)
