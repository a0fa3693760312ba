"""Lock folders, files and ranges of keys between processes; the system releases a lock whenever its process ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from filelock import FileLock, Timeout

from simpletune.system.console import say
from simpletune.system.options import UserError
from simpletune.system.portable import lock_file, lock_range, unlock_range

LOOK = 0.5  # seconds that ``exclusive`` waits, since ``is_held`` of another process holds the lock for a moment
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # on file systems without locks


@contextmanager
def exclusive(folder: Path, remedy: str = "or give this run another name: name=...") -> Iterator[None]:
    """Lock a folder exclusively within this context, with the file ``.NAME.lock`` next to it.

    The folder need not exist and may be renamed meanwhile. Raises UserError if another process holds the lock; its
    message ends with "Wait for its end or stop it" and the remedy.
    """
    file = _lock_beside(folder)
    try:
        lock = _acquire(file)
    except Timeout:
        holder = ""
        with suppress(PermissionError):  # locks of Windows are mandatory
            holder = file.read_text(encoding="utf-8", errors="replace").strip()
        raise UserError(
            f"{folder} is in use by another run{f' (process {holder})' if holder else ''}. Wait for its end or "
            f"stop it, {remedy}"
        ) from None
    try:
        if lock.is_locked:
            with suppress(PermissionError):  # locks of Windows are mandatory
                file.write_text(f"{os.getpid()}\n", encoding="utf-8")
        yield
    finally:
        lock.release()


def is_held(folder: Path) -> bool:
    """Return whether any process, including this one, has locked a folder with ``exclusive``."""
    try:
        handle = os.open(_lock_beside(folder.resolve()), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        lock_file(handle, shared=True)
    except OSError as error:
        return error.errno not in UNSUPPORTED
    finally:
        os.close(handle)
    return False


def _lock_beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def wait_for_lock(file: Path, waiting: str) -> Iterator[None]:
    """Lock a file, created if missing, exclusively within this context; print ``waiting`` before waiting for others."""
    lock = _acquire(file, waiting)
    try:
        yield
    finally:
        lock.release()


def lock_of(folder: Path) -> Path:
    """Return the lock file of a cache folder ``CACHE/KIND/KEY``."""
    return folder.parent.parent / ".locks" / f"{folder.parent.name}-{folder.name}.lock"


class Ranges:
    """Lock ranges of keys, so that several processes can divide the work on a folder: a key is a byte of the lock file.

    The locks belong to the open file (``F_OFD_SETLK``), so they exclude threads and forked processes too, work over
    NFS, and end with the process. If the file system supports no locks, every lock succeeds and a warning is printed.
    The lock file is created if missing, and left behind.
    """

    def __init__(self, file: Path):
        self.file = file
        self.sure = True  # false once a lock has succeeded without excluding anyone
        self._handle: int | None = None

    def __enter__(self) -> Ranges:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:  # read-only or full: later writes report the cause
            self.sure = False
            _warn_unlocked(self.file.parent, f"cannot be locked ({error.strerror})")
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            os.close(self._handle)

    @contextmanager
    def hold(self, first: int, last: int, wait: bool = False) -> Iterator[bool]:
        """Lock the keys from ``first`` (at least 0) to ``last`` (below 2 ** 62), both included, within this context.

        Yields whether they are locked: always, if it may wait for processes that hold a part of the range.
        """
        if self._handle is None:
            yield True
            return
        try:
            lock_range(self._handle, first, last, wait)
        except OSError as error:
            if error.errno not in UNSUPPORTED and error.errno not in (errno.EAGAIN, errno.EACCES):
                raise UserError(f"{self.file} cannot be locked ({error.strerror}). Remove it") from None
            if error.errno in UNSUPPORTED:
                self.sure = False
                _warn_unlocked(self.file.parent, "is on a file system without locks")
            yield error.errno in UNSUPPORTED
            return
        try:
            yield True
        finally:
            unlock_range(self._handle, first, last)


def _acquire(file: Path, waiting: str | None = None) -> FileLock:
    """Acquire a lock; if the file system does not support locks, warn once and return the lock unacquired. Without a
    line to print before waiting, raises Timeout if another process holds it for longer than ``LOOK``."""
    # filelock's fallback on ENOSYS, a soft lock, would outlive a killed process.
    lock = FileLock(file, thread_local=False, fallback_to_soft=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:  # read-only or full: later writes report the cause
        _warn_unlocked(file.parent, f"cannot be locked ({error.strerror})")
        return lock
    try:
        lock.acquire(timeout=0 if waiting else LOOK)
    except Timeout:
        if waiting is None:
            raise
        say(waiting)
        lock.acquire()
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise UserError(f"{file} cannot be locked ({error.strerror}). Remove it") from None
        _warn_unlocked(file.parent, "is on a file system without locks")
    return lock


@lru_cache(maxsize=32)
def _warn_unlocked(folder: Path, why: str) -> None:
    say(f"warning {folder} {why}. Do not let two runs share it")
