"""What launchers set: who this process is, what is left over from others, and an end with the launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import free_port

from simpletune.system import processes as lost
from simpletune.system.options import UserError
from simpletune.system.processes import LOST, local_process_count, process_count, process_number, require_launch

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
TWO = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch):
    """Set these variables of launchers, and no others."""

    def only(**variables: str) -> None:
        for name in (*LAUNCHER, *MPI):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return only


@pytest.mark.parametrize(
    "left",
    [
        {},
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "abc"},
        {"RANK": "3", "LOCAL_WORLD_SIZE": "4"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "", "RANK": ""},
        {"PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_process_alone_is_the_first_and_waits_for_nobody(left: dict[str, str], given) -> None:
    from accelerate.state import PartialState

    given(**left)
    require_launch()
    assert (process_number(), process_count(), local_process_count()) == (0, 1, 1)
    PartialState._reset_state()
    try:
        assert PartialState(cpu=True).num_processes == 1
    finally:
        PartialState._reset_state()


@pytest.mark.parametrize(
    ("left", "said"),
    [
        *[({name: "2"}, f"{name}=2 asks for several processes") for name in MPI],
        ({"PMI_SIZE": "x"}, "PMI_SIZE=x is no whole number"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc is no whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 asks for no process"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 asks for 2 processes, but RANK is not set"),
        *[(TWO | {name: ""}, f"2 processes, but {name} is not set") for name in list(TWO)[1:]],
        (TWO | {"RANK": "2"}, "RANK=2 is none of 0 to 1"),
        (TWO | {"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 is no whole number"),
        (TWO | {"MASTER_PORT": "x"}, "MASTER_PORT=x is no whole number"),
        (TWO | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port"),
    ],
)
def test_what_no_launcher_would_set_is_named(left: dict[str, str], said: str, given) -> None:
    given(**left)
    with pytest.raises(UserError, match=f"{said}.*[Uu]nset"):
        require_launch()


def test_two_processes_of_a_launcher_pass(given) -> None:
    given(**TWO, LOCAL_WORLD_SIZE="2", PMI_SIZE="2")
    require_launch()
    assert (process_number(), process_count(), local_process_count()) == (1, 2, 2)


def test_a_process_that_comes_too_late_to_see_its_launcher_misses_its_store(given, monkeypatch) -> None:
    ends: list[str] = []
    monkeypatch.setattr(lost, "end_lost", lambda number, of, why: ends.append(why))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with free_port() as port:
        given(**TWO | {"MASTER_PORT": port})
        lost._end_with(os.getppid(), 0.01)  # returns
    assert ends == [f"the launcher (process {os.getppid()}) is gone"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        given(**TWO | {"MASTER_PORT": str(server.getsockname()[1])})
        assert not lost._is_refused()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with free_port() as port:
        given(**TWO | {"MASTER_PORT": port})
        assert not lost._is_refused(), "process 0 may serve it later"


CHILD = """
import time
from simpletune.system.processes import end_with_launcher
end_with_launcher(0.02)
print("started", flush=True)
time.sleep(60)
"""
PARENT = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_process_ends_soon_after_torchrun_is_killed(by_torchrun: bool) -> None:
    """Not one that a shell has started: it outlives the shell."""
    environment = {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "RANK": "1"}
    environment |= {"TORCHELASTIC_RUN_ID": "none"} if by_torchrun else {}
    words = [sys.executable, "-c", PARENT, CHILD if by_torchrun else CHILD.replace("sleep(60)", "sleep(0.5)")]
    done = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.stdout is not None and done.stderr is not None and int(done.stdout.readline())
    began = time.monotonic()
    said = done.stderr.read()  # until the child has ended, too
    done.wait()
    assert time.monotonic() - began < 10 and LOST == 7
    assert ("error: process 1 of 2: the launcher (process" in said) == by_torchrun, said
