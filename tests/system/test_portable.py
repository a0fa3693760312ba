"""What Windows does otherwise: names in files on their own, the rest with a Python and files like there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
from like_windows import run_like_windows

from simpletune.system.package import PACKAGE
from simpletune.system.portable import name_inside

SEES = """
import os, signal, sys
from pathlib import Path
for name in ("fcntl", "resource", "termios", "pwd"):
    try:
        __import__(name, globals())
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
assert sys.platform == "win32" and os.name == "nt"
assert not any(hasattr(os, name) for name in ("fork", "getuid", "statvfs", "sched_getaffinity", "pread"))
assert not any(hasattr(signal, name) for name in ("SIGHUP", "SIGKILL", "SIGALRM")) and signal.SIGTERM
assert not Path("/proc/self").exists()

def refused(act, *words):
    try:
        act(*words)
    except OSError:
        return True

held = open("held", "w", encoding="utf-8")
Path("other").touch()
Path("folder").mkdir()
Path("new").mkdir()
assert refused(open, "/proc/self/status") and refused(open, "a:b", "w") and refused(os.mkdir, "con")
assert refused(os.replace, "other", "held") and refused(os.unlink, "held") and refused(os.replace, "new", "folder")
assert refused(os.open, "folder", os.O_RDONLY) and refused(os.symlink, "other", "link")
held.close()
os.replace("other", "held")
print("lines")
"""
DOES = """
import sys
from pathlib import Path
from simpletune.commands.caption.record import Record
from simpletune.commands.doctor.probe import ProbeProcess
from simpletune.data.sources.caption_files import CaptionFile
from simpletune.system import atomic, environment, locks, portable, stage_timer, threads
from simpletune.system.options import UserError
from simpletune.system.shell import quote_command

run = Path("run").resolve()
assert not locks.is_held(run)
with locks.exclusive(run):
    assert locks.is_held(run)
    try:
        with locks.exclusive(run):
            raise AssertionError
    except UserError as refused:
        assert "run is in use by another run. Wait for its end" in str(refused), refused
assert not locks.is_held(run)

last = 2**60 - 1
with locks.Ranges(Path("keys.lock")) as one, locks.Ranges(Path("keys.lock")) as other:
    with one.hold(0, last) as held, other.hold(last, last) as too:
        assert held and not too
    with one.hold(0, 2**40) as held, other.hold(2**59, last, wait=True) as too:
        assert held and too and one.sure and other.sure

atomic.write_text(Path("text"), "é\\n")
assert Path("text").read_bytes() == b"\\xc3\\xa9\\n"
Path("empty").mkdir()
with atomic.new_folder(Path("empty")) as part:
    (part / "x").touch()
assert Path("empty/x").exists()
for process in (2**22 + 1, atomic.os.getpid()):
    Path(f".x.{atomic.machine_name()}-{process}.part").touch()
Path(f".y.{atomic.machine_name()}-{10**11}.part").touch()  # no process has this number
atomic.remove_stale(Path())
assert Path(f".y.{atomic.machine_name()}-{10**11}.part").exists()
assert [file.name for file in Path().glob(".x.*")] == [atomic.temporary_path(Path("x"), shared=True).name]
portable.flush_to_disk(Path("empty"))

Path("captions.jsonl").write_bytes(b'{"cut')
caption = CaptionFile(Path("a.txt"), "", "0")
for digest in ("0", "1"):
    Record(Path()).add(caption, digest, "m", "s")
assert len(Path("captions.jsonl").read_bytes().split(b"\\n")) == 4

probe = ProbeProcess((sys.executable, "-c", "print('loud'); print('@doctor [1]', flush=True); input()"), seconds=60)
assert probe.ask("a question") == [1]
probe.close()

assert stage_timer.peak_rss_gib() == 1 and threads.usable_cores() >= 1 and environment.cpu_name()
assert portable.locked_memory_limit() is None
print(quote_command("simpletune", "train", "my pictures.json"))
"""


def test_a_python_and_files_like_those_of_windows(tmp_path: Path) -> None:
    assert run_like_windows(SEES, tmp_path) == "lines\r\n"


def test_locks_files_and_facts_as_on_windows(tmp_path: Path) -> None:
    assert run_like_windows(DOES, tmp_path).endswith('simpletune train "my pictures.json"\r\n')


@pytest.mark.parametrize(
    ("name", "posix", "windows"),
    [
        ("a/b.png", "a/b.png", "a/b.png"), ("./b.png", "b.png", "b.png"), (r"a\b.png", r"a\b.png", "a/b.png"),
        ("../b", None, None), ("/b", None, None), (r"a\..\..\b", r"a\..\..\b", None), (r"\b", r"\b", None),
        (r"C:\b", r"C:\b", None), ("C:b", "C:b", None), (r"\\server\share\b", r"\\server\share\b", None),
    ],
)  # fmt: skip
def test_a_name_in_a_file_stays_in_its_folder(name: str, posix: str | None, windows: str | None) -> None:
    assert name_inside(name, PurePosixPath) == posix
    assert name_inside(name, PureWindowsPath) == windows


def test_every_text_file_has_an_encoding() -> None:
    """Without one, Windows takes cp1252."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}
    some = {
        file: ast.parse(text) for file, text in texts.items() if re.search(r"\b(read_text|write_text|open)\(", text)
    }
    assert [f"{file}:{line}" for file, tree in some.items() for line in without_encoding(tree)] == []


def without_encoding(tree: ast.AST) -> Iterator[int]:
    """Lines that read or write text in the system's own encoding."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("read_text", "write_text"):
            yield node.lineno
        elif isinstance(node.func, ast.Name) and node.func.id == "open":
            texts = [word.value for word in node.args[1:] if isinstance(word, ast.Constant)]
            if not any("b" in str(text) for text in texts):
                yield node.lineno
