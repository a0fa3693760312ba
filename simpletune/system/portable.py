"""What Linux and Windows do by different calls: locks, pages of memory, limits. No other module asks for the system.

On Windows a lock is mandatory: while a process holds one, no other handle can read or write the locked bytes.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import time
from contextlib import suppress
from pathlib import PurePath
from typing import TypeVar

Pages = TypeVar("Pages", bound=mmap.mmap)

NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # flags of os.open that Windows lacks
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
PAUSE = 0.05  # seconds between two attempts to lock
PIPES: str | None = None  # encoding of files and pipes; None: the user's
PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # and between those to rename


def name_inside(name: str, system: type[PurePath] = PurePath) -> str | None:
    """Return a relative path that a file names, as POSIX writes it; None if it leads out of the file's folder."""
    path = system(name)
    return None if path.anchor or ".." in path.parts else path.as_posix()


if sys.platform == "win32":
    import msvcrt
    import subprocess
    import threading

    join_words = subprocess.list2cmdline
    PIPES = "utf-8"  # rather than cp1252
    SHIFT = 32  # msvcrt takes positions below 2 ** 31: keys below 2 ** 62 that differ in the last bits share a lock

    def lock_file(handle: int, shared: bool = False) -> None:
        """Lock an open file, which no other handle may have locked. Raises BlockingIOError if one has."""
        _locking(handle, 0, 1)

    def lock_range(handle: int, first: int, last: int, wait: bool) -> None:
        """Lock bytes of an open file. Raises BlockingIOError if another handle has locked some, and it may not wait."""
        while True:
            try:
                return _locking(handle, first >> SHIFT, (last >> SHIFT) - (first >> SHIFT) + 1)
            except BlockingIOError:
                if not wait:
                    raise
                time.sleep(PAUSE)

    def unlock_range(handle: int, first: int, last: int) -> None:
        """Unlock bytes that this handle has locked at once."""
        os.lseek(handle, first >> SHIFT, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_UNLCK, (last >> SHIFT) - (first >> SHIFT) + 1)

    def _locking(handle: int, start: int, count: int) -> None:
        os.lseek(handle, start, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, count)
        except PermissionError as error:
            raise BlockingIOError(errno.EAGAIN, error.strerror) from None

    def flush_to_disk(path: str | os.PathLike[str]) -> None:
        """Flush a file to the disk; Windows flushes no folder's entries, and wants a handle that can write."""
        if not os.path.isdir(path):
            _flush(path, os.O_RDWR)

    def replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        """Rename over what is there."""
        for pause in PAUSES:
            try:
                return os.replace(source, target)
            except PermissionError:
                time.sleep(pause)
        os.replace(source, target)

    def cores_of_process() -> int:
        """Count the cores that this process may use."""
        return os.cpu_count() or 1

    def peak_resident_bytes() -> int:
        """Return the largest resident set of this process so far."""
        import psutil

        return int(psutil.Process().memory_info().peak_wset)

    def locked_memory_limit() -> int | None:
        """Return how many bytes this process may lock in memory; None: any number."""
        return None

    def private_pages(kind: type[Pages], count: int) -> Pages:
        """Map pages of this process alone."""
        return kind(-1, count)

    def memory_file(name: str) -> int:
        """Open a new file in memory that other processes can open. Raises OSError if the system has none."""
        raise OSError("Windows has no such files")

    def end_after(seconds: int) -> None:
        """End this process after some seconds, whatever it does."""
        timer = threading.Timer(seconds, os._exit, (1,))
        timer.daemon = True
        timer.start()

else:
    import fcntl
    import resource
    import shlex
    import signal
    import struct

    join_words = shlex.join

    def lock_file(handle: int, shared: bool = False) -> None:
        """Lock an open file, which no other handle may have locked. Raises BlockingIOError if one has."""
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def lock_range(handle: int, first: int, last: int, wait: bool) -> None:
        """Lock bytes of an open file. Raises BlockingIOError if another handle has locked some, and it may not wait."""
        _change_range(handle, fcntl.F_WRLCK, first, last, wait)

    def unlock_range(handle: int, first: int, last: int) -> None:
        """Unlock bytes of an open file."""
        _change_range(handle, fcntl.F_UNLCK, first, last)

    def _change_range(handle: int, kind: int, first: int, last: int, wait: bool = False) -> None:
        # struct flock of 64-bit Linux
        asked = struct.pack("hhqqi4x", kind, os.SEEK_SET, first, last - first + 1, 0)
        fcntl.fcntl(handle, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, asked)

    def flush_to_disk(path: str | os.PathLike[str]) -> None:
        """Flush a file, or a folder's entries, to the disk."""
        _flush(path, os.O_RDONLY)

    def replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        """Rename over what is there."""
        os.replace(source, target)

    def cores_of_process() -> int:
        """Count the cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def peak_resident_bytes() -> int:
        """Return the largest resident set of this process so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def locked_memory_limit() -> int | None:
        """Return how many bytes this process may lock in memory (``ulimit -l``); None: any number."""
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if limit == resource.RLIM_INFINITY else limit

    def private_pages(kind: type[Pages], count: int) -> Pages:
        """Map pages of this process alone."""
        pages = kind(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # After a fork, a write of this process would go to a new page, while the device reads the pinned one.
        pages.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # a kernel may be built without them; they make pinning faster
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def memory_file(name: str) -> int:
        """Open a new file in memory that other processes can open. Raises OSError if the system has none."""
        return os.memfd_create(name)

    def end_after(seconds: int) -> None:
        """End this process after some seconds, whatever it does."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)


def _flush(path: str | os.PathLike[str], flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    except OSError as error:  # names no file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)
