"""Heartbeats of processes that train together: what a lost, failed or hanging one means for the rest."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from launching import free_port

from simpletune.system.options import UserError
from simpletune.system.processes import LOST
from simpletune.system.signals import Stopped, handle_signals
from simpletune.training import heartbeats
from simpletune.training.heartbeats import (
    APART,
    FAILED,
    LEFT,
    MEETING,
    MET,
    STOPPED,
    TRAINS,
    HealthCheck,
    Heartbeat,
    HeartbeatThread,
    Timeouts,
)

PATIENCE = Timeouts(beat=2, silent=24, absent=900, meeting=60, failed=10, stopped=60, stuck=1800)


def judged(*rounds: tuple[float, dict[int, Heartbeat | None]], own: int = MET) -> list[str | None]:
    """The verdicts after each round of signs: (seconds, sign of each process)."""
    judge, found = HealthCheck(PATIENCE, 0.0), []
    for now, signs in rounds:
        for number, sign in signs.items():
            judge.see(number, sign, now)
        verdict = judge.verdict(Heartbeat(1, 1, own), now)
        found.append(None if verdict is None else f"{verdict.grace:.0f} s: {verdict.why}")
    return found


def signs(*beats: int, stage: int = MET, **more: Any) -> list[dict[int, Heartbeat | None]]:
    return [{1: Heartbeat(beat, 9, stage, host="b", **more)} for beat in beats]


def test_heartbeats_are_read_as_they_were_sent() -> None:
    store = torch.distributed.HashStore()
    sender, reader = HeartbeatThread(), HeartbeatThread()
    sender.store = reader.store = store
    assert reader.read(sender.number) is None
    sent = sender.say(FAILED, "out of\tmemory\nat 0x1")
    assert sent == Heartbeat(1, sent.progress, sent.stage, FAILED, socket.gethostname(), "out of memory at 0x1")
    assert reader.read(sender.number) == sent


def test_a_process_is_lost_when_its_sign_no_longer_changes() -> None:
    times = [(0, 2, 25, 27), (0, 2, 25, 48)]
    lost, lives = signs(5, 6, 6, 6), signs(5, 6, 7, 8)
    said = "0 s: process 1 on b has sent no heartbeat for 25 s"
    assert judged(*zip(times[0], lost, strict=True)) == [None, None, None, said]
    assert judged(*zip(times[1], lives, strict=True)) == [None] * 4


def test_a_sign_that_never_changed_is_of_an_earlier_start() -> None:
    """A store may keep what a killed process wrote: it is neither lost nor failed, but not there yet."""
    for state in ("running", FAILED, LEFT):
        old = signs(5, 5, state=state)
        late = f"0 s: process 1 has not appeared for {901} s"
        assert judged(*zip((0, 800), old, strict=True)) == [None, None]
        assert judged((0, {1: None}), (901, old[0])) == [None, late]


def test_a_process_that_left_is_not_missed_and_one_that_failed_is_said() -> None:
    def after(state: str, reason: str = "") -> str | None:
        return judged((0, signs(5)[0]), (2, signs(6, state=state, reason=reason)[0]), (1000, {}))[2]

    assert after(LEFT) is None
    assert after(FAILED, "no room") == "10 s: process 1 on b has failed: no room"
    assert after(STOPPED, "SIGTERM") == "60 s: process 1 on b has stopped: SIGTERM"


@pytest.mark.parametrize("own, other, apart", [(APART, APART, True), (MET, APART, True), (MET, MET, False)])
def test_processes_that_do_not_meet(own: int, other: int, apart: bool) -> None:
    rounds = [(2.0 * n, signs(n, stage=other)[0]) for n in range(40)]
    found = judged(*rounds, own=own)
    assert (found[33], apart) == ("0 s: the processes have not met for 64 s" if apart else None, apart)
    assert not any(found[:32])
    assert not any(judged(*[(now, {1: None}) for now, _ in rounds], own=APART)), "it may start later"


def test_a_hang_of_all_is_found_once_training_has_begun() -> None:
    def rounds(stage: int, progress: int) -> list[tuple[float, dict[int, Heartbeat | None]]]:
        return [(20.0 * n, {1: Heartbeat(n, progress * n, stage)}) for n in range(100)]

    assert not any(judged(*rounds(MET, 0), own=MET)), "loading and compiling may take long"
    assert not any(judged(*rounds(TRAINS, 1), own=TRAINS))
    hang = judged(*rounds(TRAINS, 0), own=TRAINS)
    assert 90 < hang.index(next(filter(None, hang))) < 94 and "an exchange hangs" in str(hang[94])


def test_a_second_start_reads_nothing_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun serves one store for all starts; a stale address in it made processes hang."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**words, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    stores = []
    for start in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        store, number, of = next(iter(torch.distributed.rendezvous(MEETING, timeout=timedelta(seconds=10))))
        assert (number, of) == (1, 2)
        stores.append(store)
    stores[0].set("address", "of the killed process")
    assert stores[0].check(["address"]) and not stores[1].check(["address"])


@pytest.fixture
def of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """This is process 0 of 2, with the port at which they would meet."""
    with free_port() as port:
        words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        for name, value in words.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        yield int(port)


def impatient(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    monkeypatch.setattr(heartbeats, "PATIENCE", replace(PATIENCE, **seconds))


def test_waiting_for_others_is_said_and_a_signal_ends_it(of_two: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Left-over variables made a run wait in silence for up to two days, deaf to SIGTERM and Ctrl-C."""
    impatient(monkeypatch, said=0.1)
    for number in (signal.SIGTERM, signal.SIGINT):
        timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
        with handle_signals(), pytest.raises(Stopped, match=f"stopped by {number.name}"):
            timer.start()
            heartbeats.wait_for_others()
        text = f"process 0 of 2: waiting for 1 other process at 127.0.0.1:{of_two} (WORLD_SIZE=2, RANK=0)"
        assert capsys.readouterr().err.splitlines() == [text]


def test_others_that_are_there_are_not_waited_for(of_two: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def other() -> None:
        store = None
        while store is None:
            store = heartbeats._connect(timedelta(seconds=2))
        assert heartbeats._find_missing(store, 1, 2) == []

    impatient(monkeypatch, said=60)
    thread = threading.Thread(target=other)
    thread.start()
    heartbeats.wait_for_others()
    thread.join()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_meeting_place_where_nobody_answers_ends_the_wait(by_torchrun: bool, of_two: int, monkeypatch) -> None:
    """torchrun serves the store before it starts a process, so it is gone; another process 0 may start later."""
    impatient(monkeypatch, **({"refused": 0.3} if by_torchrun else {"absent": 0.3, "refused": 0.0}))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(by_torchrun))
    monkeypatch.setenv("RANK", "0" if by_torchrun else "1")
    with pytest.raises(UserError, match=f"nothing has answered at 127.0.0.1:{of_two} for 0 s.*--resume auto") as caught:
        heartbeats.wait_for_others()
    assert caught.value.code == LOST


def test_the_other_may_not_appear_for_a_quarter_of_an_hour(of_two: int, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch, absent=0.3)
    with pytest.raises(UserError, match="1 process has not appeared for 0 s.*--resume auto"):
        heartbeats.wait_for_others()
