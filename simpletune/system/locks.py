"""Locks between processes, by ``flock``: the system lets go of them when their process ends, however it ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from simpletune.options import UserError
from simpletune.system.console import say

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Within this context no other process may hold the same folder so. The lock lies beside it: ``.NAME.lock``.

    Args:
        folder: which need not exist, and may be renamed meanwhile.

    Raises:
        UserError: another process holds it.
    """
    file = folder.with_name(f".{folder.name}.lock")
    with _opened(file) as handle:
        if not _lock(handle, file, wait=False):
            holder = os.pread(handle, 64, 0).decode("ascii", "replace").strip()
            raise UserError(
                f"{folder} is in use by another run{f' (process {holder})' if holder else ''}. Wait for its end or "
                "stop it, or give this run another name: name=..."
            )
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield


@contextmanager
def wait_for_lock(file: Path, waiting: str) -> Iterator[None]:
    """Within this context no other process is in the same one; it is waited for.

    Args:
        file: to lock; made if need be.
        waiting: what to say when it has to be waited for.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:  # read-only, or full: what is to be written there will say more
        _say_unsupported(file.parent, f"cannot be locked ({error.strerror})")
        yield
        return
    with _opened(file) as handle:
        if not _lock(handle, file, wait=False):
            say(waiting)
            _lock(handle, file, wait=True)
        yield


def lock_of(folder: Path) -> Path:
    """Where the lock of a folder of the cache, ``CACHE/KIND/KEY``, lies."""
    return folder.parent.parent / ".locks" / f"{folder.parent.name}-{folder.name}.lock"


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    """The lock's file; closing it, or the end of the process, unlocks."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield handle
    finally:
        os.close(handle)


def _lock(handle: int, file: Path, wait: bool) -> bool:
    """Take the lock, as far as the file system knows locks; False: another process has it."""
    try:
        import fcntl
    except ImportError:  # no such thing on this system
        _say_unsupported(file.parent)
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in UNSUPPORTED:
            _say_unsupported(file.parent)
            return True
        if isinstance(error, BlockingIOError):
            return False
        raise
    return True


@lru_cache(maxsize=32)
def _say_unsupported(folder: Path, why: str = "is on a file system without locks") -> None:
    say(f"warning {folder} {why}: let no two runs share it")
