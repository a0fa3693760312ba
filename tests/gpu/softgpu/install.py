"""Make this process compute on a GPU in software: ``install`` is called once, before a program uses CUDA."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _python_dispatch

from softgpu import paged, queues, triton_kernels
from softgpu.patching import patch_all
from softgpu.values import Values

_installed: Values | None = None


def install() -> None:
    """Make every CUDA operator compute values from now on, in every thread. ``SOFT_SEED`` chooses the adversary."""
    global _installed
    if _installed is not None:
        return
    _installed = Values()
    _keep_in_threads()
    _keep_where_modes_are_disabled()
    torch.cuda._sleep = lambda cycles: None  # type: ignore[assignment]
    _gloo_in_place_of_nccl()
    patch_all(triton_kernels.PATCHES | paged.PATCHES)
    queues.serve()
    atexit.register(queues.stop)
    sys.setswitchinterval(1e-3)
    queues.seed(int(os.environ.get("SOFT_SEED", queues.AT_ONCE)))
    _installed.__enter__()


def _keep_in_threads() -> None:
    """A mode is one thread's: enter it in each that starts."""
    honest = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with Values():
            honest(self)

    threading.Thread.run = run  # type: ignore[method-assign]


def _keep_where_modes_are_disabled() -> None:
    """Programs hide work from their own modes; it is the device's work still."""
    honest = _python_dispatch._disable_current_modes

    @contextmanager
    def disabled() -> Iterator[Any]:
        with honest() as before, Values():
            yield before

    _python_dispatch._disable_current_modes = disabled


def _gloo_in_place_of_nccl() -> None:
    """NCCL's kernels have no values here; gloo copies to the host, as it does for tensors of a card."""
    honest = torch.distributed.init_process_group

    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        wanted = "gloo" if backend is None or "nccl" in backend else backend
        kwargs.pop("device_id", None)
        honest(wanted, *args, **kwargs)

    torch.distributed.init_process_group = init
