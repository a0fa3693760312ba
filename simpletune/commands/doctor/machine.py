"""What a check takes, the machine (tests replace it), and what it yields, findings."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from simpletune.commands.doctor.probe import ProbeProcess
from simpletune.system.disk import existing_parent, free_disk_bytes
from simpletune.system.options import Json
from simpletune.system.portable import locked_memory_limit

SECONDS = 20  # timeout of nvidia-smi
Level = Literal["ok", "warning", "problem"]
OK: Level = "ok"
WARNING: Level = "warning"
PROBLEM: Level = "problem"


@dataclass(frozen=True)
class Finding:
    """One finding of a check."""

    name: str
    level: Level  # ``ok``; ``warning``: something is slower, smaller or unknown; ``problem``: something does not work
    value: str
    why: str = ""  # why it matters
    remedy: str = ""  # what to do

    def lines(self) -> Iterator[str]:
        """Yield lines of text; with reason and remedy only if action is needed."""
        yield f"{self.level:<8} {self.name}: {self.value}"
        if self.level != OK:
            yield from (f"{'':<9}{text}" for text in (self.why, self.remedy) if text)


def written_folders() -> dict[str, Path]:
    """Return the folders that simpletune writes to by default, by name."""
    from huggingface_hub import constants

    from simpletune.config.output import Output

    output = Output()
    return {
        "runs": Path(output.folder),
        "profiles": Path(output.profiles),
        "cache": output.cache_folder,
        "hub cache": Path(constants.HF_HUB_CACHE),
    }


@dataclass
class Machine:
    """Answers from this machine."""

    probe: ProbeProcess  # answers what needs torch, in a child process
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    folders: Mapping[str, Path] = field(default_factory=written_folders)
    system: tuple[str, str] = (platform.system(), platform.release())  # name and release
    python: tuple[int, int, int] = sys.version_info[:3]
    notify: bool = False  # post a message

    def ask(self, question: str) -> Json:
        """Ask the child process; if that fails, the answer has ``error``."""
        return self.probe.ask(question)

    def command(self, *words: str) -> tuple[int, str] | None:
        """Run a command and return its exit code and output; None if it does not exist."""
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
        except FileNotFoundError:
            return None
        return done.returncode, (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip()

    def read(self, path: str) -> str | None:
        """Read a small file; None if it does not exist."""
        file = Path(path)
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None

    def has_python_header(self) -> bool:
        return (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()

    def which(self, name: str) -> str | None:
        return shutil.which(name)

    def locked_limit(self) -> int | None:
        """Return ``ulimit -l`` in bytes; None if unlimited."""
        return locked_memory_limit()

    def free(self, folder: Path) -> tuple[int, int]:
        """Return the device number of a folder's disk, and its free bytes."""
        return existing_parent(folder).stat().st_dev, free_disk_bytes(folder)

    def require_writable(self, folder: Path) -> None:
        """Write a file to a folder, or to the existing folder in which it would be created."""
        with tempfile.TemporaryFile(dir=existing_parent(folder)) as file:
            file.write(b"simpletune doctor")
            file.flush()

    def require_port(self, port: int) -> None:
        """Listen on a port of this machine for a moment."""
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
