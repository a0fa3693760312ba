"""Run code in this process as far as Linux can be made like Windows: what its Python lacks, and what its files refuse.

As a program: ``like_windows.py CODE``, which runs as a module of this package. Only the package sees another Python,
because torch and others have versions for Windows. Everyone's files are like those of Windows: text is cp1252 with CRLF
unless the code says otherwise, names have no ``:``, nothing that is open or mapped can be replaced or removed, a folder
neither opened nor replaced, and what is locked not read.
"""

from __future__ import annotations

import builtins
import ctypes  # noqa: F401  # before anything is wrapped
import errno
import fcntl
import io
import os
import re
import selectors
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
# What the modules of Python 3.11 for Windows lack, as typeshed says.
LACKS = {
    "os": "fork forkpty getuid geteuid getgid getegid getgroups getpgid setsid killpg nice uname statvfs fstatvfs sync "
    "sysconf confstr getloadavg sched_getaffinity sched_setaffinity pread preadv pwrite pwritev readv writev sendfile "
    "memfd_create mkfifo mknod chown fchown lchown fchmod fchdir openpty ttyname wait wait3 wait4 waitid WNOHANG lockf "
    "posix_fadvise posix_fallocate fdatasync register_at_fork set_blocking get_blocking pipe2 getxattr setxattr "
    "O_NONBLOCK O_NOFOLLOW O_CLOEXEC O_DIRECTORY O_SYNC O_DSYNC O_NOATIME O_NOCTTY O_PATH O_TMPFILE O_DIRECT",
    "signal": "SIGHUP SIGKILL SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGCONT SIGPIPE SIGSTOP SIGTSTP alarm setitimer "
    "pause pthread_kill pthread_sigmask sigwait siginterrupt",
    "mmap": "MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS MAP_ANON PROT_READ PROT_WRITE MADV_DONTFORK MADV_HUGEPAGE "
    "MADV_DONTNEED",
    "time": "clock_gettime tzset",
    "socket": "AF_UNIX",
}


class SelectSockets(selectors.SelectSelector):
    """The only selector of Windows, which waits for sockets alone."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if not isinstance(fileobj, socket.socket):
            raise OSError(errno.ENOTSOCK, "An operation was attempted on something that is not a socket")
        return super().register(fileobj, events, data)


HAS: dict[str, dict[str, Any]] = {
    "os": {"name": "nt"}, "sys": {"platform": "win32"}, "selectors": {"DefaultSelector": SelectSockets},
}  # fmt: skip
MAPS = "/proc/self/maps"  # which this module reads
FOLDERS = ("/proc", "/sys", "/etc", "/dev")
IMPOSSIBLE = re.compile(r'[<>:"|?*\x00-\x1f]|[. ]$|^(con|prn|aux|nul|com\d|lpt\d)(\.|$)', re.IGNORECASE)
IN_USE = (errno.EACCES, "The process cannot access the file because it is being used by another process")


class OtherSystem(ModuleType):
    """A module as it is on Windows."""

    def __init__(self, module: ModuleType):
        super().__init__(module.__name__)
        self.__dict__.update(_of=module, _lacks=set(LACKS.get(module.__name__, "").split()))
        self.__dict__.update(HAS.get(module.__name__, {}))

    def __getattr__(self, name: str) -> Any:
        if name in self._lacks:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on Windows")
        return getattr(self._of, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._of, name, value)


class Locking(ModuleType):
    """The module msvcrt: locks bytes from a file's position on, for a handle, also against others of this process."""

    LK_UNLCK, LK_LOCK, LK_NBLCK, LK_RLCK, LK_NBRLCK = range(5)

    def locking(self, handle: int, mode: int, count: int) -> None:
        first = os.lseek(handle, 0, os.SEEK_CUR)
        assert 0 <= first < 2**31 and 0 < count < 2**31, "a long has 32 bits"
        assert mode in (self.LK_UNLCK, self.LK_NBLCK), "the others give up after 10 seconds"
        kind = fcntl.F_UNLCK if mode == self.LK_UNLCK else fcntl.F_RDLCK if _only_reads(handle) else fcntl.F_WRLCK
        if mode == self.LK_NBLCK and first == 0 and _is_locked(handle):
            raise PermissionError(errno.EACCES, "Permission denied")
        try:
            fcntl.fcntl(handle, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, first, count, 0))
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None


def _only_reads(handle: int) -> bool:
    return fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


def _is_locked(handle: int) -> bool:
    """Whether filelock has locked a file by another handle, which it does with flock where it has no Windows."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(handle, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    return False


def run_like_windows(code: str, folder: Path) -> str:
    """What a program prints that runs in a folder; it must end well."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=280)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return done.stdout.decode()


def install() -> None:
    """Make this process like one on Windows, before it imports the package."""
    builtins.__import__ = _importing(builtins.__import__)  # type: ignore[assignment]
    sys.addaudithook(_refuse)
    builtins.open = io.open = _opening(io.open)  # type: ignore[assignment]
    for name in ("stat", "lstat", "access"):
        setattr(os, name, _without_linux(getattr(os, name)))
    for name in ("replace", "rename", "unlink", "remove", "rmdir"):
        setattr(os, name, _if_unused(getattr(os, name)))
    os.open, os.fsync = _opening_handles(os.open), _flushing(os.fsync)  # type: ignore[assignment]
    os.symlink = _refusing(os.symlink)  # type: ignore[assignment]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="cp1252", errors="strict", newline="\r\n")  # type: ignore[union-attr]
    import psutil

    psutil.Process.memory_info = lambda self: type("pmem", (), {"peak_wset": 2**30})()  # as of Windows


def _asks(depth: int = 2) -> bool:
    """Whether the package asks, by modules of the standard library."""
    frame = sys._getframe(depth)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in sys.stdlib_module_names and name != __name__:
            return name.partition(".")[0] == "simpletune"
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _importing(honest: Callable[..., Any]) -> Callable[..., Any]:
    others: dict[str, ModuleType] = {"msvcrt": Locking("msvcrt")}

    def importing(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level or (globals or {}).get("__name__", "").partition(".")[0] != "simpletune":
            return honest(name, globals, locals, fromlist, level)
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r} on Windows", name=name)
        if name in others:
            return others[name]
        found = honest(name, globals, locals, fromlist, level)
        if found.__name__ in LACKS or found.__name__ in HAS:
            return others.setdefault(found.__name__, OtherSystem(found))
        return found

    return importing


def _refuse(event: str, words: tuple[Any, ...]) -> None:
    """Files that Windows lacks, and names that it refuses."""
    if event == "open" and isinstance(words[0], (str, bytes)):
        path, writes = os.fsdecode(words[0]), bool(words[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if path.startswith(FOLDERS) and path not in (os.devnull, MAPS) and _asks():
            raise FileNotFoundError(errno.ENOENT, "No such file on Windows", path)
        _require_name(path) if writes and path != os.devnull and not path.startswith(FOLDERS) else None
    elif event in ("os.mkdir", "os.rename", "os.link"):
        _require_name(os.fsdecode(words[0] if event == "os.mkdir" else words[1]))


def _require_name(path: str) -> None:
    if any(IMPOSSIBLE.search(part) for part in path.split("/") if part not in ("", ".", "..")):
        raise OSError(errno.EINVAL, "The filename, directory name, or volume label syntax is incorrect", path)


def _opening(honest: Callable[..., Any]) -> Callable[..., Any]:
    def opening(
        file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
        newline: Any = None, *words: Any, **named: Any,
    ) -> Any:  # fmt: skip
        if "b" not in mode:
            encoding = "cp1252" if encoding in (None, "locale") else encoding
            newline = "\r\n" if newline is None and set(mode) & set("wax") else newline
        opened = honest(file, mode, buffering, encoding, errors, newline, *words, **named)
        if str(file).endswith(".lock") and _is_locked(opened.fileno()):
            opened.close()
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return opened

    return opening


def _opening_handles(honest: Callable[..., int]) -> Callable[..., int]:
    def opening(path: Any, flags: int, *words: Any, **named: Any) -> int:
        if _asks() and os.path.isdir(path) and not flags & os.O_TMPFILE & ~os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return honest(path, flags, *words, **named)

    return opening


def _flushing(honest: Callable[..., None]) -> Callable[..., None]:
    def flushing(handle: Any) -> None:
        number = handle if isinstance(handle, int) else handle.fileno()
        if _only_reads(number):
            raise OSError(errno.EBADF, "Bad file descriptor")
        honest(number)

    return flushing


def _refusing(honest: Callable[..., None]) -> Callable[..., None]:
    def refusing(*words: Any, **named: Any) -> None:
        if _asks():
            raise OSError(errno.EPERM, "A required privilege is not held by the client")
        honest(*words, **named)

    return refusing


def _without_linux(honest: Callable[..., Any]) -> Callable[..., Any]:
    def asking(path: Any, *words: Any, **named: Any) -> Any:
        if not isinstance(path, int) and os.fsdecode(path).startswith(FOLDERS) and _asks():
            raise FileNotFoundError(errno.ENOENT, "No such file on Windows", path)
        return honest(path, *words, **named)

    return asking


def _if_unused(honest: Callable[..., None]) -> Callable[..., None]:
    """Windows refuses what is open, in the folder or mapped, and a folder as the target of a rename."""

    def changing(*paths: Any, **named: Any) -> None:
        real = [_real(path, named.get("dir_fd") or named.get("src_dir_fd")) for path in paths]
        for path in real:
            if used := [file for file in _in_use() if f"{file}/".startswith(f"{path}/")]:
                raise PermissionError(*IN_USE, ", ".join(used))
        if len(real) == 2 and os.path.isdir(real[1]):
            raise PermissionError(errno.EACCES, "Access is denied", real[1])
        honest(*paths, **named)

    return changing


def _real(path: Any, folder: int | None) -> str:
    named = os.fsdecode(path)
    place = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), named) if folder is not None else named
    return os.path.join(os.path.realpath(os.path.dirname(place) or "."), os.path.basename(place))


def _in_use() -> set[str]:
    """The regular files that this process has opened or mapped."""
    found = set()
    for handle in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISREG(os.fstat(int(handle)).st_mode):
                found.add(os.readlink(f"/proc/self/fd/{handle}"))
        except OSError:
            continue
    with io.FileIO(MAPS) as maps:
        found |= {f"/{line.partition('/')[2]}" for line in maps.readall().decode().splitlines() if "/" in line}
    return found


if __name__ == "__main__":
    install()
    exec(sys.argv[1], {"__name__": "simpletune.program"})
