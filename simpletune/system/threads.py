"""Choose the number of CPU threads, and let waiting threads sleep."""

from __future__ import annotations

import os
from pathlib import Path

from simpletune.system.options import UserError
from simpletune.system.portable import cores_of_process

PARAMETERS_PER_THREAD = 50_000_000
"""Parameters of the denoiser per thread. With fewer, two threads are slower than one even on an idle machine,
because a step consists of many short operations and threads synchronise after each. Measured on two cores with 7 to
445 million parameters and 256 image tokens: two threads take 1.20 to 1.11 of one thread's time up to 55 million, 0.74
at 112 and 0.64 at 445 million."""
ASKED, WAITING = "OMP_NUM_THREADS", "OMP_WAIT_POLICY"
AUTO = "SIMPLETUNE_AUTO_THREADS"  # marks an OMP_NUM_THREADS that we set; child processes inherit both


def usable_cores() -> int:
    """Count the cores that this process may use, within a container's quota, which torch ignores."""
    cores = cores_of_process()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores


def prepare_threads() -> None:
    """Set OpenMP's environment before torch is imported, because OpenMP reads it once. Keeps the user's settings."""
    # Waiting threads sleep. By default they spin, so on a busy core each barrier lasts until the scheduler switches
    # threads, and training a small model on a busy machine takes 25 to 50 times as long.
    os.environ.setdefault(WAITING, "PASSIVE")
    if ASKED not in os.environ:
        os.environ |= {ASKED: str(usable_cores()), AUTO: "1"}


def asked_threads() -> int:
    """Return the number of threads that OMP_NUM_THREADS asks for: a number, or one for each level of nesting, as OpenMP
    has it (torch uses the first). Raises UserError if it is none."""
    text = os.environ[ASKED]
    first, *deeper = [each.strip() for each in text.split(",")]
    if not all(each.isascii() and each.isdigit() and int(each) > 0 for each in (first, *deeper)):
        raise UserError(f"{ASKED}={text} is no number of threads. Set it to 1 or more, unset it, or set speed.threads")
    return int(first)


def choose_threads(option: int | str, parameters: int, on_cpu: bool, kept: int | None = None) -> tuple[int, str]:
    """Choose the number of threads and describe the reason.

    Args:
        option: ``speed.threads``.
        parameters: of the denoiser.
        on_cpu: the CPU is the device; with a GPU, all cores may help.
        kept: number at the run's first start; a resumed run keeps it, because another number changes rounding.
    """
    if isinstance(option, int):
        return option, "speed.threads"
    if AUTO not in os.environ and ASKED in os.environ:
        return asked_threads(), ASKED
    if kept is not None:
        return kept, "auto: as at the run's first start"
    cores = usable_cores()
    if not on_cpu:
        return cores, "auto: all cores"
    return max(1, min(cores, parameters // PARAMETERS_PER_THREAD)), (
        f"auto: one per {PARAMETERS_PER_THREAD // 10**6} million parameters, up to {cores} cores"
    )
