"""simpletune.bat, as far as its text shows, and its part in Linux, with made-up programs of WSL and Windows.

cmd.exe is not here. By hand, each branch of the file was run in Wine's (docs/how-to/install.md).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BATCH = (ROOT / "simpletune.bat").read_bytes()
LINES = BATCH.decode("ascii").replace("\r\n", "\n").splitlines()
CODE = [line for line in LINES if line and not line.startswith("rem ")]
WEB = '#!/bin/bash\necho "web in $PWD: $*"\n'
URL = "http://127.0.0.1:8100"


def test_the_batch_file_is_one_page_that_cmd_can_read() -> None:
    assert len(LINES) <= 82 and max(map(len, LINES)) <= 125
    assert BATCH.count(b"\n") == BATCH.count(b"\r\n")  # cmd.exe loses labels in files with LF
    attributes = (ROOT / ".gitattributes").read_text().splitlines()
    assert attributes.index("*.bat text eol=crlf") > attributes.index("* text=auto eol=lf")


def test_every_label_of_the_batch_file_is_used_and_every_jump_has_one() -> None:
    labels = [line[1:] for line in CODE if line.startswith(":")]
    jumps = set(re.findall(r"goto :(\w+)", "\n".join(CODE)))
    assert len(labels) == len(set(labels)) and set(labels) == jumps
    assert CODE[-2:] == ["pause", "exit /b 1"] and CODE[CODE.index("pause") - 1] == ":stop"  # a failure stays readable
    assert [line for line in CODE if "exit" in line] == ["exit /b 0", "exit /b 1"]


def test_words_of_the_user_never_stand_outside_quotes_nor_in_a_command_of_linux() -> None:
    for line in CODE:
        outside = re.sub(r'"[^"]*"', "", line)
        assert outside.count('"') == 0 and not re.search(r"%~?[\w]", outside.replace("%%d", "")), line
        if line.startswith("wsl.exe -e"):
            assert "%" not in line  # by WSLENV
    assert 'set "SIMPLETUNE_PICTURES=%~1"' in CODE
    (passed,) = (line for line in CODE if "WSLENV=" in line)
    assert set(re.findall(r"\$\{?(SIMPLETUNE_\w+)", "\n".join(CODE))) < set(re.findall(r"SIMPLETUNE_\w+", passed))


def test_what_wsl_installs_or_converts_is_asked_first() -> None:
    for change in ("--install -d", "--set-version"):
        (number,) = (number for number, line in enumerate(CODE) if line.startswith(f"wsl.exe {change}"))
        assert CODE[number - 1] == "if errorlevel 2 goto :stop" and CODE[number - 2].startswith("choice /c YN")


def test_the_commands_that_linux_gets_are_bash_s() -> None:
    commands = re.findall(r'-e bash -c "([^"]*)"', "\n".join(CODE))
    assert len(commands) == 4
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)


@pytest.mark.parametrize(
    ("release", "is_wsl_1"),
    [("4.4.0-19041-Microsoft", True), ("6.6.87.2-microsoft-standard-WSL2", False), ("6.8.0-45-generic", False)],
)
def test_a_linux_of_wsl_1_is_known_by_its_kernel_and_told_why_and_what_to_do(
    release: str, is_wsl_1: bool, tmp_path: Path
) -> None:
    number = CODE.index('if "%errorlevel%"=="0" goto :wsl_1') - 1
    (command,) = re.findall(r'-e bash -c "([^"]*)"', CODE[number])
    (tmp_path / "uname").write_text(f"#!/bin/sh\necho {release}\n")
    (tmp_path / "uname").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert (subprocess.run(["bash", "-c", command], env=environment, check=False).returncode == 0) == is_wsl_1
    said = " ".join(CODE[CODE.index(":wsl_1") : CODE.index(":no_start")])
    assert "runs in WSL 1, where programs cannot use the graphics card. simpletune needs WSL 2." in said
    assert "Its files stay." in said and "It was not converted" in said and "Remedy: wsl --update" in said


class Wsl:
    """A Linux home and a folder of Windows with simpletune, and programs that stand in for those around it."""

    def __init__(self, folder: Path) -> None:
        self.here = folder / "C" / "simple tune (1)"
        self.home = folder / "home"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.photos = folder / "C" / "my & photos"
        for made in (self.here / "simpletune", self.home, self.bin, self.photos):
            made.mkdir(parents=True)
        shutil.copy(ROOT / "simpletune" / "windows.sh", self.here / "simpletune")
        shutil.copy(ROOT / "update.sh", self.here)
        (self.here / "simpletune" / "setup.sh").write_text("simpletune_setup() { :; }\n")
        (self.here / "pyproject.toml").write_text("")
        (self.here / "CHANGELOG.md").write_text("- One.\n")
        self.program(self.here / "web.sh", WEB)
        self.program(self.bin / "wslpath", f'#!/bin/sh\n[ "$3" = "C:\\my & photos" ] && echo "{self.photos}"\n')
        self.program(self.bin / "explorer.exe", f'#!/bin/sh\necho "$1" >>"{self.log}"\nexit 1\n')
        self.disk("v9fs")

    def program(self, file: Path, text: str) -> None:
        file.write_text(text)
        file.chmod(0o755)

    def disk(self, kind: str) -> None:
        """Set the kind of file system on which the folder of simpletune.bat lies."""
        self.program(self.bin / "stat", f"#!/bin/sh\necho {kind}\n")

    def run(self, pictures: str = "", status: int = 0) -> str:
        environment = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.home)}
        done = subprocess.run(
            ["bash", self.here / "simpletune" / "windows.sh"],
            env=environment | {"SIMPLETUNE_PICTURES": pictures},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def wsl(tmp_path: Path) -> Wsl:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8100)) == 0:
            pytest.skip("port 8100 of this machine is in use")
    return Wsl(tmp_path)


def test_a_copy_on_a_disk_of_linux_runs_and_is_renewed_by_a_newer_zip(wsl: Wsl) -> None:
    (wsl.here / ".venv").mkdir()
    copy = wsl.home / "simpletune"
    assert f"web in {copy}: --root {wsl.photos}\n" in wsl.run('"C:\\my & photos"')
    assert not (copy / ".venv").exists() and not (wsl.home / "simpletune.new").exists()
    (wsl.here / "CHANGELOG.md").write_text("- Two.\n- One.\n")
    (copy / "runs").mkdir()
    said = wsl.run()
    assert "  - Two\nupdate: done" in said and f"web in {copy}: \n" in said and (copy / "runs").exists()
    assert "update" not in wsl.run()


def test_a_clone_there_is_left_to_git_and_one_on_a_disk_of_linux_is_used_in_place(wsl: Wsl) -> None:
    wsl.run()
    (wsl.home / "simpletune" / ".git").mkdir()
    (wsl.here / "CHANGELOG.md").write_text("- Two.\n")
    assert "update" not in wsl.run()
    wsl.disk("ext2/ext3")
    assert f"web in {wsl.here}: " in wsl.run()


def test_a_file_that_a_virus_scanner_holds_leaves_no_half_copy(wsl: Wsl) -> None:
    tar = shutil.which("tar")
    held = 'case "$*" in *-cf*) echo "tar: ./web.sh: Permission denied" >&2; exit 2;; esac'
    wsl.program(wsl.bin / "tar", f'#!/bin/sh\n{tar} "$@" || exit\n{held}\n')
    said = wsl.run(status=2)
    assert "web.sh: Permission denied" in said and "virus scanner" in said
    assert not (wsl.home / "simpletune").exists()
    (wsl.bin / "tar").unlink()
    assert "web in" in wsl.run()


def test_what_cannot_be_used_is_named_with_a_remedy(wsl: Wsl) -> None:
    said = wsl.run("\\\\server\\photos", status=2)
    assert "Linux does not see \\\\server\\photos." in said and "such as C:" in said
    wsl.photos.rmdir()
    wsl.photos.write_text("a picture")
    assert "C:\\my & photos is not a folder." in wsl.run("C:\\my & photos", status=2)
    (wsl.home / "simpletune").mkdir()
    assert "exists and is no simpletune" in wsl.run(status=2)


@pytest.fixture
def page() -> Iterator[socket.socket]:
    """A program that listens where the pages do."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    yield listener
    listener.close()


def test_the_browser_opens_once_the_pages_answer_and_at_once_the_second_time(wsl: Wsl, page: socket.socket) -> None:
    wsl.program(wsl.here / "web.sh", f"#!/bin/bash\nuntil [[ -s {wsl.log} ]]; do sleep 0.05; done\necho web\n")

    def listen() -> None:
        page.bind(("127.0.0.1", 8100))
        page.listen()

    assert not wsl.log.exists()
    timer = threading.Timer(0.8, listen)
    timer.start()
    assert "web\n" in wsl.run()
    timer.join()
    assert wsl.log.read_text() == f"{URL}\n"
    wsl.program(wsl.home / "simpletune" / "web.sh", "#!/bin/bash\nexit 9\n")
    assert f"the pages are at {URL}" in wsl.run()
    assert wsl.log.read_text() == f"{URL}\n" * 2
    assert "Close their window" in wsl.run("C:\\my & photos", status=2)
