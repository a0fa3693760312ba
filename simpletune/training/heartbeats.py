"""Watch the other processes of a run: when one ends, is lost or hangs, end this one too, so that all can be restarted.

A thread in each process writes heartbeats to the store through which the processes meet, and reads the others'
heartbeats. It needs no collective, so it works while one hangs, and before the processes have met. A single process is
not watched. torchrun and the backends' timeouts do not suffice: after SIGKILL of torchrun two processes trained on
without a launcher (measured on a CPU, gloo, torch 2.13.0).
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch.distributed
from accelerate import Accelerator
from torch.distributed import Store, TCPStore

from simpletune.system.options import UserError, plural
from simpletune.system.portable import end_after
from simpletune.system.printable import describe_exception
from simpletune.system.processes import (
    LOST,
    end_lost,
    ending_reason,
    meeting_place,
    process_count,
    process_number,
    progressed,
    require_launch,
)
from simpletune.system.signals import Stopped

CONNECTION = re.compile(r"gloo|nccl|connection|socket|broken pipe", re.IGNORECASE)
RUNNING, LEFT, STOPPED, FAILED = "running", "left", "stopped", "failed"


@dataclass(frozen=True)
class Timeouts:
    """Timeouts for waiting for other processes, in seconds."""

    beat: float = 2.0  # between two heartbeats
    silent: float = 24.0  # without a heartbeat, after which a process counts as lost
    absent: float = 900.0  # for a process's first two heartbeats; it may run on a machine that starts later
    said: float = 5.0  # for the others to appear, before a process says that it is waiting for them
    refused: float = 10.0  # for torchrun's store, which was there before its processes
    meeting: float = 60.0  # to form the process group once all have heartbeats; gloo was seen to hang there
    failed: float = 10.0  # for this process to end by itself after another has failed
    stopped: float = 60.0  # the same, after another was stopped
    stuck: float = 1800.0  # without progress in any process once training has begun; longer than any save or export
    closing: int = 15  # for libraries to close their connections to processes that are gone


PATIENCE = Timeouts()
SCHEME = "simpletune"
MEETING = f"{SCHEME}://"
"""How the processes meet: like torch's ``env://``, but with keys specific to this start. torchrun serves one store for
all restarts, and a process that reads another's address before it is rewritten gets the killed process's address and
hangs (torch 2.13.0, ``torch/distributed/rendezvous.py``, which expects a new store for every retry)."""
APART, MET, TRAINS = range(3)  # stages: before the process group is formed, after that, after the first step


class Heartbeat(NamedTuple):
    """A process's heartbeat: its number, how much the process has done (``progressed.count``), its stage, its state,
    its machine, and why it stopped or failed; as JSON in the store."""

    beat: int
    progress: int
    stage: int
    state: str = RUNNING
    host: str = ""
    reason: str = ""


class PeerState(NamedTuple):
    """Another process's last heartbeat, when it was first seen (``time.monotonic``), and whether the process is alive:
    its heartbeat has changed, so it is not left over from an earlier start."""

    sign: Heartbeat | None
    at: float
    lives: bool = False


class PeerFailure(NamedTuple):
    """What the others' heartbeats mean: why to end, and how many seconds this process has to end by itself."""

    why: str
    grace: float = 0.0


@dataclass
class HealthCheck:
    """Decide from the others' heartbeats whether this process has to end, without a store or a clock. ``moved``: the
    progress of all processes and when it last changed; ``apart``: since when all are alive but have not met."""

    patience: Timeouts
    began: float
    others: dict[int, PeerState] = field(default_factory=dict)
    moved: tuple[int, float] = (-1, 0.0)
    apart: float | None = None

    def see(self, number: int, sign: Heartbeat | None, now: float) -> None:
        known = self.others.setdefault(number, PeerState(None, self.began))
        if sign is not None and known.sign != sign:
            self.others[number] = PeerState(sign, now, lives=known.sign is not None)

    def verdict(self, own: Heartbeat, now: float) -> PeerFailure | None:
        ones = (self._check_one(number, now) for number in sorted(self.others))
        return next(filter(None, ones), None) or self._check_all(own, now)

    def _check_one(self, number: int, now: float) -> PeerFailure | None:
        """Check whether a process is absent or lost, has failed or was stopped."""
        seen, patience = self.others[number], self.patience
        since = now - seen.at
        if seen.sign is None or not seen.lives:
            late = f"process {number} has not appeared for {now - self.began:.0f} s"
            return PeerFailure(late) if now - self.began > patience.absent else None
        who, state = f"process {number} on {seen.sign.host}", seen.sign.state
        if state == FAILED:
            return PeerFailure(f"{who} has failed: {seen.sign.reason}", patience.failed)
        if state == STOPPED:
            return PeerFailure(f"{who} has stopped: {seen.sign.reason}", patience.stopped)
        lost = state == RUNNING and since > patience.silent
        return PeerFailure(f"{who} has sent no heartbeat for {since:.0f} s") if lost else None

    def _check_all(self, own: Heartbeat, now: float) -> PeerFailure | None:
        """Check whether the processes fail to meet, or none makes progress, as in a collective that hangs."""
        signs = [own, *(seen.sign for seen in self.others.values() if seen.sign is not None and seen.lives)]
        together = len(signs) == len(self.others) + 1
        self.apart = (self.apart or now) if together and any(sign.stage == APART for sign in signs) else None
        if self.apart is not None and now - self.apart > self.patience.meeting:
            return PeerFailure(f"the processes have not met for {now - self.apart:.0f} s")
        total = sum(sign.progress for sign in signs)
        if total != self.moved[0]:
            self.moved = total, now
        if all(sign.stage == TRAINS for sign in signs) and now - self.moved[1] > self.patience.stuck:
            return PeerFailure(f"no process has done anything for {now - self.moved[1]:.0f} s, so an exchange hangs")
        return None


def start_number() -> str:
    """Return the number of this start by torchrun, from 0."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _meet(url: str, timeout: timedelta = timedelta(minutes=30), **words: object) -> Iterator[tuple[Store, int, int]]:
    """Handle ``MEETING``: yield (store, process number, processes)."""
    for store, number, of in torch.distributed.rendezvous("env://", timeout=timeout):
        yield torch.distributed.PrefixStore(f"start-{start_number()}", store), number, of


torch.distributed.register_rendezvous_handler(SCHEME, _meet)


def wait_for_others() -> None:
    """Wait until all processes are there, before accelerate does: it waits in torch, for as long as a collective may
    take, where no signal arrives and nothing is said. Raises UserError with code ``LOST`` if they cannot meet."""
    number, of, (address, port) = process_number(), process_count(), meeting_place()
    if of == 1 or torch.distributed.is_initialized():
        return
    patience, began, told = PATIENCE, time.monotonic(), False
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: Store | None = None
    if number == 0 and not of_launcher:  # torch serves it again at the same port, and keeps this one
        seconds = timedelta(seconds=patience.silent)
        try:
            _served.append(TCPStore(address, port, of, True, seconds, wait_for_workers=False, multi_tenant=True))
        except RuntimeError as error:
            why = describe_exception(error)
            raise UserError(f"MASTER_ADDR={address} MASTER_PORT={port}: process 0 cannot serve there ({why})") from None
        store = _served[-1]
    limit = patience.refused if of_launcher else patience.absent
    while True:
        waited = time.monotonic() - began
        try:
            store = store or _connect(timedelta(seconds=patience.beat))
            missing = list(range(of)) if store is None else _find_missing(store, number, of)
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            why = f"process 0 or its launcher is gone ({describe_exception(error)})"
            raise UserError(ending_reason(why), code=LOST) from error
        if not missing:
            return
        if store is None and waited > limit:
            why = f"nothing has answered at {address}:{port} for {waited:.0f} s, so process 0 or its launcher is gone"
            raise UserError(ending_reason(why), code=LOST)
        if store is not None and waited > patience.absent:
            why = f"{plural(len(missing), 'process has', 'processes have')} not appeared for {waited:.0f} s"
            raise UserError(ending_reason(why), code=LOST)
        if waited > patience.said and not told:
            told = True
            whom = "process 0" if store is None else plural(len(missing), "other process", "other processes")
            text = f"process {number} of {of}: waiting for {whom} at {address}:{port} (WORLD_SIZE={of}, RANK={number})"
            print(text, file=sys.stderr, flush=True)
        time.sleep(0.2)


def _find_missing(store: Store, number: int, of: int) -> list[int]:
    """Say that this process is there, and list the others that are not."""
    place, everyone = torch.distributed.PrefixStore(f"meet-{start_number()}", store), list(map(str, range(of)))
    place.set(str(number), "here")
    return [] if place.check(everyone) else [each for each in range(of) if not place.check([everyone[each]])]


def _connect(timeout: timedelta) -> Store | None:
    """Connect to the store, which process 0 or its launcher serves; None if nobody answers."""
    address, port = meeting_place()
    try:
        socket.create_connection((address, port), 2.0).close()  # torch would print a warning for each attempt
        return TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    except (OSError, RuntimeError):
        return None


_served: list[Store] = []


class HeartbeatThread(threading.Thread):
    """Send heartbeats and watch the others', until ``close`` or until this process has to end."""

    def __init__(self) -> None:
        super().__init__(name="watch", daemon=True)
        self.number, self.of, self.patience = process_number(), process_count(), PATIENCE
        self.closed = threading.Event()
        self.store: Store | None = None
        self.beats, self.host = 0, socket.gethostname()
        self.lock = threading.Lock()  # guards the store, which one thread uses at a time

    def run(self) -> None:
        judge, ends = HealthCheck(self.patience, time.monotonic()), None
        while not self.closed.wait(self.patience.beat if ends is None else 0.2):
            if self.store is None and not self.connect():
                continue
            now = time.monotonic()
            found = self.look(judge, now)
            ends = None if found is None else ends or now + found.grace
            if found is not None and ends is not None and now >= ends:
                self.end(found.why)

    def connect(self) -> bool:
        """Connect to the store, which process 0 or its launcher serves; return whether it is there."""
        store = _connect(timedelta(seconds=self.patience.silent))
        if store is None:  # not served yet; if it never is, wait_for_others ends the process
            return False
        self.store = torch.distributed.PrefixStore(f"watch-{start_number()}", store)
        return True

    def look(self, judge: HealthCheck, now: float) -> PeerFailure | None:
        """Send a heartbeat and judge the others'."""
        own = self.say(RUNNING)
        try:
            for other in range(self.of):
                if other != self.number:
                    judge.see(other, self.read(other), now)
        except RuntimeError as error:  # DistStoreError, DistNetworkError
            return PeerFailure(f"process 0 or its launcher is gone ({describe_exception(error)})", self.patience.failed)
        return judge.verdict(own, now)

    def say(self, state: str, reason: str = "") -> Heartbeat:
        """Send a heartbeat; without a store, do nothing."""
        self.beats += 1
        stage = TRAINS if progressed.trains else MET if torch.distributed.is_initialized() else APART
        sign = Heartbeat(self.beats, progressed.count, stage, state, self.host, " ".join(reason.split())[:300])
        if self.store is not None:
            with self.lock, suppress(RuntimeError):  # reading notices when the store is gone
                self.store.set(str(self.number), json.dumps(sign))
        return sign

    def read(self, other: int) -> Heartbeat | None:
        """Read another process's last heartbeat, if it has sent one; raises RuntimeError if the store is gone."""
        assert self.store is not None
        with self.lock:
            return Heartbeat(*json.loads(self.store.get(str(other)))) if self.store.check([str(other)]) else None

    def end(self, why: str) -> None:
        """End this process at once."""
        end_lost(self.number, self.of, why)

    def close(self, state: str, reason: str = "") -> None:
        """Send a last heartbeat and stop watching."""
        self.closed.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(self.patience.beat)
        self.say(state, reason)

    def find_failure(self) -> str:
        """Return the reason that another process gave for its end, if any."""
        late = time.monotonic() + self.patience.beat
        while time.monotonic() < late:
            with suppress(RuntimeError):
                signs = {other: self.read(other) for other in range(self.of) if other != self.number and self.store}
                for other, sign in signs.items():
                    if sign is not None and sign.state in (FAILED, STOPPED):
                        return f"process {other} on {sign.host} has {sign.state}: {sign.reason}"
            time.sleep(0.2)
        return "another process has ended"


_watching: list[HeartbeatThread] = []


@contextmanager
def watch_processes() -> Iterator[None]:
    """Watch the other processes of the run within this context.

    Raises:
        UserError: with code ``LOST``, instead of a broken connection's error.
    """
    require_launch()
    if process_count() == 1:
        yield
        return
    watch = HeartbeatThread()
    _watching.append(watch)
    watch.start()
    try:
        yield
    except Stopped as stopped:
        watch.close(STOPPED, str(stopped))
        raise
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and not CONNECTION.search(str(error)):
            watch.close(FAILED, describe_exception(error))
            raise
        why = watch.find_failure()
        watch.close(FAILED, why)
        if threading.current_thread() is threading.main_thread():  # closing the connections may take longer
            end_after(watch.patience.closing)
        raise UserError(ending_reason(f"{why} ({describe_exception(error)})"), code=LOST) from error
    except BaseException as error:
        watch.close(FAILED, describe_exception(error))
        raise
    finally:
        _watching.remove(watch)
        watch.close(LEFT) if not watch.closed.is_set() else None


def leave(accelerator: Accelerator) -> None:
    """Wait for all processes at the end of a run, stop watching them before the first one exits, and close the process
    group."""
    accelerator.wait_for_everyone()
    for watch in _watching:
        watch.close(LEFT)
        accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        # Keeps the group until the process ends. Otherwise the last reference is dropped with the DDP model, in a
        # thread that holds the GIL and joins gloo's thread; that thread may need the GIL to free the barrier's
        # tensors, which is a deadlock (seen with torch 2.13.0 on the CPU).
        _closed_groups.append(torch.distributed.group.WORLD)
    accelerator.end_training()


_closed_groups: list[torch.distributed.ProcessGroup | None] = []
