"""The queue of the pages: one run at a time a device, by a runner that may be killed at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from inbox import Inbox
from serving import until

from simpletune.apps.cli.main import parse
from simpletune.apps.web import app, processes, queue, queue_runner
from simpletune.apps.web.queue import QueueEntry
from simpletune.apps.web.roots import Roots, make_roots
from simpletune.runs.attempts import attempts_of
from simpletune.system.atomic import machine_name, write_json
from simpletune.system.locks import exclusive
from simpletune.system.options import UserError
from simpletune.system.package import PACKAGE

FAKE = '''
"""Stands for ``simpletune``: a "run" that holds its run's lock until the file go-NAME exists; bad ones fail."""
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[0])
config = Path(sys.argv[2])
name = config.stem
if name.startswith("bad"):
    print("error: data.path: nothing is there. Add pictures", file=sys.stderr)
    sys.exit(2)
run = Path("runs") / name
run.mkdir(parents=True, exist_ok=True)
with open("began", "a") as file:
    file.write(name + "\\n")
with open("words-" + name, "a") as file:
    file.write(" ".join(sys.argv[3:]) + "\\n")
while not Path("go-" + name).exists():
    time.sleep(0.01)
'''


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Roots]:
    """Roots whose runs are small scripts instead of trainings, and whose runner is stepped by the test."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "stands_in.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    real = processes.start

    def start(roots: Roots, words: list[str], log_name: str, module: str = "simpletune") -> int:
        return real(roots, words, log_name, "stands_in" if module == "simpletune" else module)

    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(queue, "ensure_runner", lambda roots: None)
    found = make_roots(tmp_path / "runs", [tmp_path])
    yield found
    for entry in queue.read_queue(found):
        processes.send_signal(found, queue.log_name(entry.name), signal.SIGKILL)


def put(roots: Roots, *names: str, device: str = "cpu") -> list[str]:
    return [queue.add(roots, name, roots.named[0] / f"{name}.json", device).id for name in names]


def states(roots: Roots) -> list[tuple[str, str]]:
    return [(each.name, each.state) for each in queue.read_queue(roots)]


def assert_states_become(roots: Roots, expected: list[tuple[str, str]]) -> None:
    """Within 30 s, while the queue's runner steps."""

    def look() -> bool:
        queue_runner.step(roots)
        return states(roots) == expected

    until(look)


def test_one_at_a_time_a_device_and_a_failure_does_not_stop_the_rest(tmp_path: Path, roots: Roots) -> None:
    put(roots, "bad", "one", "two")
    put(roots, "card", device="gpu")
    assert_states_become(roots, [("bad", "failed"), ("one", "running"), ("two", "waiting"), ("card", "running")])
    assert queue.read_queue(roots)[0].reason == "data.path: nothing is there. Add pictures"
    for _ in range(3):
        queue_runner.step(roots)
    assert states(roots)[2] == ("two", "waiting")
    (tmp_path / "go-one").touch()
    assert_states_become(roots, [("bad", "failed"), ("one", "finished"), ("two", "running"), ("card", "running")])
    two = queue.read_queue(roots)[2].id
    queue.remove(roots, two)  # a running one stays
    until(lambda: processes.find_process(roots, "run-two") is not None)
    queue.stop(roots, two)
    assert_states_become(roots, [("bad", "failed"), ("one", "finished"), ("two", "killed"), ("card", "running")])
    queue.remove(roots, two)
    assert ("two", "killed") not in states(roots)


def test_the_order_can_be_changed(roots: Roots) -> None:
    one, _, three = put(roots, "one", "two", "three")
    queue.move_up(roots, three)
    queue.move_up(roots, one)
    queue.move_up(roots, "none")
    assert [name for name, _ in states(roots)] == ["one", "three", "two"]
    queue.remove(roots, one)
    assert [name for name, _ in states(roots)] == ["three", "two"]


def test_a_run_of_the_terminal_counts(tmp_path: Path, roots: Roots) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"name": "mine", "device": "cpu"}))
    put(roots, "one")
    put(roots, "card", device="gpu")
    with exclusive(run):
        assert_states_become(roots, [("one", "waiting"), ("card", "running")])
    assert_states_become(roots, [("one", "running"), ("card", "running")])


def test_a_killed_runner_loses_nothing_and_starts_nothing_twice(tmp_path: Path, roots: Roots) -> None:
    put(roots, "one", "two")
    killed = f"""
import os
from functools import partial
from pathlib import Path
from simpletune.apps.web import processes, queue, queue_runner
from simpletune.apps.web.roots import make_roots
processes.start = partial(processes.start, module="stands_in")
queue.write_json = lambda *a, **k: os._exit(9)  # between the start of the run and the line in the queue
queue_runner.step(make_roots(Path({str(roots.runs)!r}), [Path({str(tmp_path)!r})]))
"""
    paths = os.pathsep.join([str(PACKAGE.parent), str(tmp_path / "modules")])
    child = subprocess.run([sys.executable, "-c", killed], env={**os.environ, "PYTHONPATH": paths}, check=False)
    assert child.returncode == 9
    assert states(roots) == [("one", "waiting"), ("two", "waiting")]
    assert_states_become(roots, [("one", "running"), ("two", "waiting")])
    until((tmp_path / "began").exists)
    (tmp_path / "go-one").touch()
    (tmp_path / "runs" / "one" / "config.json").write_text("{}")
    (tmp_path / "runs" / "one" / "summary.json").write_text('{"steps": 3}')
    assert_states_become(roots, [("one", "finished"), ("two", "running")])
    until(lambda: (tmp_path / "began").read_text().split() == ["one", "two"])


RUNNER = """
import sys, time
from functools import partial
from pathlib import Path
from simpletune.apps.web import processes, queue_runner
from simpletune.apps.web.roots import make_roots
processes.start = partial(processes.start, module="stands_in")
while True:
    queue_runner.step(make_roots(Path(sys.argv[1]), [Path(sys.argv[2])]))
    time.sleep(0.05)
"""


def lose_power(roots: Roots, runner: subprocess.Popen[bytes], *names: str) -> None:
    """Kill a process, then those that nobody sees end; and begin another boot."""
    runner.kill()
    runner.wait()
    for name in names:
        processes.send_signal(roots, name, signal.SIGKILL)
        until(lambda name=name: not processes.is_running(roots, name))
    for file in (roots.own / "logs").glob("*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "boot": "before"}))


def attempt(ended: str | None, reason: str = "", ago: float = 0.0) -> list[dict[str, object]]:
    started = (datetime.now(UTC) - timedelta(seconds=ago)).replace(microsecond=0).isoformat()
    figures = {"device": "cpu", "from_step": 0, "last_step": 3, "seconds": 1.0}
    return [{"started": started, **figures, "ended": ended, "reason": reason}]


def test_after_a_restart_of_the_machine_the_queue_goes_on(tmp_path: Path, roots: Roots) -> None:
    put(roots, "bad", "one", "two")
    paths = os.pathsep.join([str(PACKAGE.parent), str(tmp_path / "modules")])
    command = [sys.executable, "-c", RUNNER, str(roots.runs), str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}) as runner:
        until(lambda: (tmp_path / "words-one").exists() and (tmp_path / "words-one").read_text() == "\n")
        until(lambda: states(roots) == [("bad", "failed"), ("one", "running"), ("two", "waiting")])
        lose_power(roots, runner, "run-one")
    (tmp_path / "runs" / "one" / "config.json").write_text("{}")
    (tmp_path / "runs" / "one" / "attempts.json").write_text(json.dumps(attempt(None)))
    assert_states_become(roots, [("bad", "failed"), ("one", "running"), ("two", "waiting")])
    until(lambda: (tmp_path / "words-one").read_text() == "\n--resume auto\n")
    for _ in range(3):
        queue_runner.step(roots)
    assert (tmp_path / "began").read_text().split() == ["one", "one"]  # started again once
    (tmp_path / "go-one").touch()
    assert_states_become(roots, [("bad", "failed"), ("one", "finished"), ("two", "running")])


def lost(roots: Roots, machine: str) -> None:
    """Leave the queue's only run as running, its process recorded on this machine or another, of an earlier boot."""
    queue.change(roots, lambda entries: [each.model_copy(update={"state": "running"}) for each in entries])
    file = processes.log_file(roots, "run-one").with_suffix(".json")
    file.parent.mkdir(exist_ok=True)
    since = time.time() - 60
    write_json(file, {"machine": machine, "boot": "before", "since": since, "words": ["train"], "pid": 1, "started": 1})


@pytest.mark.parametrize(
    ("attempts", "state", "resume"),
    [
        (lambda: attempt("stopped", "SIGTERM"), "waiting", True),  # an orderly shutdown
        (None, "waiting", False),  # while it prepared its data
        (lambda: attempt("finished", ago=3600), "waiting", False),  # an older run of this name, still to be moved away
        (lambda: attempt("finished"), "finished", False),
        (lambda: attempt("failed", "no room"), "failed", False),
    ],
)
def test_what_a_restart_ended_waits_again_and_what_had_ended_stays(
    attempts: Callable[[], list[dict[str, object]]] | None, state: str, resume: bool, roots: Roots
) -> None:
    put(roots, "one")
    lost(roots, machine_name())
    (roots.runs / "one").mkdir()
    (roots.runs / "one" / "config.json").write_text("{}")
    if attempts is not None:
        (roots.runs / "one" / "attempts.json").write_text(json.dumps(attempts()))
    found = queue_runner.ended_entry(roots, queue.read_queue(roots)[0])
    assert found is not None and (found.state, found.resume) == (state, resume)


def test_a_run_that_is_lost_with_the_machine_too_often_fails(roots: Roots) -> None:
    put(roots, "one")
    for number in range(queue_runner.MOST_RESTARTS + 1):
        lost(roots, machine_name())
        found = queue_runner.ended_entry(roots, queue.read_queue(roots)[0])
        assert found is not None
        assert (found.state, found.restarts) == ("waiting", number + 1) or number == queue_runner.MOST_RESTARTS
        queue.change(roots, lambda entries, found=found: [found])
    assert found.state == "failed" and "restarted 6 times while it ran" in found.reason


def test_a_run_of_another_machine_is_not_started_again(roots: Roots) -> None:
    put(roots, "one")
    lost(roots, "another")
    assert_states_become(roots, [("one", "killed")])


def test_a_killed_run_is_posted_by_the_runner(
    tmp_path: Path, roots: Roots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Inbox() as inbox:
        monkeypatch.setenv("SIMPLETUNE_NOTIFY_URL", f"{inbox.url}/secret-path")
        put(roots, "one")
        assert_states_become(roots, [("one", "running")])
        until((tmp_path / "words-one").exists)
        processes.send_signal(roots, "run-one", signal.SIGKILL)
        assert_states_become(roots, [("one", "killed")])
    assert [json.loads(each.body)["text"] for each in inbox.posted] == ["one killed: signal 9"]
    assert "secret-path" not in "".join(capsys.readouterr())
    files = [file for file in roots.runs.rglob("*") if file.is_file()]
    assert files and [file for file in files if b"secret-path" in file.read_bytes()] == []


def test_a_run_that_failed_before_it_began_is_posted_by_the_runner(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Inbox() as inbox:
        monkeypatch.setenv("SIMPLETUNE_NOTIFY_URL", inbox.url)
        put(roots, "bad")
        assert_states_become(roots, [("bad", "failed")])
    told = [json.loads(each.body)["text"] for each in inbox.posted]
    assert told == ["bad failed: data.path: nothing is there. Add pictures"]


def test_a_server_continues_the_queue_without_an_open_page(
    tmp_path: Path, roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Roots] = []
    monkeypatch.setattr(queue, "ensure_runner", asked.append)
    monkeypatch.setattr(app.PageServer, "run", lambda self, sockets: sockets[0].close())
    app.run(parse(["web", "--runs", str(roots.runs), "--root", str(tmp_path), "--port", "0"]))
    assert asked == [roots]


def test_a_change_is_on_disk_before_it_is_answered(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(queue, "flush_to_disk", flushed.append)
    put(roots, "one")
    assert flushed == [roots.own] and (roots.own / queue.FILE).exists()


def test_the_runner_works_the_queue_off_and_ends(tmp_path: Path, roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # a real runner and a real command, whose configurations do not exist
    put(roots, "one", "two")
    until(lambda: states(roots) == [("one", "failed"), ("two", "failed")], 100)
    assert "does not exist" in queue.read_queue(roots)[0].reason
    until(lambda: not processes.is_running(roots, queue.RUNNER))


def test_a_runner_that_fails_is_not_tried_again_at_once(
    tmp_path: Path, roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(roots, "one")
    monkeypatch.undo()
    started: list[int] = []

    def fails(roots: Roots, words: list[str], log_name: str, module: str) -> None:
        started.append(1)
        record = processes.log_file(roots, log_name).with_suffix(".json")
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text('{"code": 1}')

    monkeypatch.setattr(processes, "start", fails)
    queue.ensure_runner(roots)
    queue.ensure_runner(roots)
    assert len(started) == 1
    os.utime(processes.log_file(roots, queue.RUNNER).with_suffix(".json"), (1, 1))
    queue.ensure_runner(roots)
    assert len(started) == 2


def test_a_damaged_queue_is_said_and_set_aside(roots: Roots) -> None:
    put(roots, "one")
    file = roots.own / queue.FILE
    for text in ("{", "", "\xff", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(UserError, match="is damaged"):
            queue.read_queue(roots)
        assert not queue.is_open(roots)
    put(roots, "two")
    assert states(roots) == [("two", "waiting")] and (roots.own / "queue.json.damaged").exists()


def test_an_entry_that_this_version_cannot_use_stays_and_stops_no_other(roots: Roots) -> None:
    (roots.named[0] / "go-good").touch()
    put(roots, "good")
    sound = queue.read_queue(roots)[0].model_dump(mode="json")
    others = [
        {**sound, "id": "a", "name": "my run"}, {**sound, "id": "b", "name": "../up"}, {**sound, "id": "c", "name": ""},
        {**sound, "id": "d", "state": "paused"}, {**sound, "id": "e", "priority": 3},
        {**sound, "id": "f", "device": "tpu"}, {**sound, "id": "g", "name": "x" * 400}, {"id": 1}, 7, None, [],
    ]  # fmt: skip
    write_json(roots.own / queue.FILE, [*others, sound])
    fields = [each.fields for each in queue.read_all(roots)[1]]
    assert fields[:6] == ["name", "name", "name", "state", "priority", "device"]
    assert_states_become(roots, [("good", "finished")])
    written = json.loads((roots.own / queue.FILE).read_text())
    assert written[1:] == others and written[0]["name"] == "good", "they are as they were"
    queue.remove(roots, "e")
    assert [each.id for each in queue.read_all(roots)[1]] == ["a", "b", "c", "d", "f", "g", "", "", "", ""]
    with pytest.raises(UserError, match="'my run' cannot be trained from this page. Rename its folder"):
        put(roots, "my run")


def test_a_queue_of_a_newer_version_is_left_as_it_is(roots: Roots) -> None:
    roots.own.mkdir(parents=True)
    file = roots.own / queue.FILE
    file.write_text('{"version": 2, "entries": []}')
    with pytest.raises(UserError, match="a newer version wrote it"):
        put(roots, "one")
    assert file.read_text() == '{"version": 2, "entries": []}' and not queue.is_open(roots)
    file.unlink()  # for the fixture


def test_ended_runs_stay_for_a_while_only(roots: Roots) -> None:
    old = [QueueEntry(id=str(n), name=f"n{n}", config="c", device="cpu", state="finished") for n in range(30)]
    queue.change(roots, lambda entries: old)
    put(roots, "one")
    assert [each.name for each in queue.read_queue(roots)] == [*(f"n{n}" for n in range(10, 30)), "one"]


def test_what_a_configuration_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue.shutil, "which", lambda name: None)
    demo = {"model": {"pretrained": "demo:tiny-sd3"}}
    assert [queue.queue_device(data) for data in (demo, {}, {"device": "cpu"})] == ["cpu", "gpu", "cpu"]
    monkeypatch.setattr(queue.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert queue.queue_device(demo) == "gpu" and queue.queue_device({**demo, "device": "cpu"}) == "cpu"


@pytest.mark.slow
def test_real_runs_go_on_after_a_restart_with_nobody_watching(tiny_config: dict, tmp_path: Path) -> None:
    roots = make_roots(tmp_path / "runs", [tmp_path])
    tiny_config |= {"train": {"steps": 100_000}, "checkpoint": {"every": 20}}
    (tmp_path / "one.json").write_text(json.dumps(tiny_config | {"name": "one"}))
    (tmp_path / "two.json").write_text(json.dumps(tiny_config | {"name": "two", "train": {"steps": 2}}))
    entries = [
        QueueEntry(id=name, name=name, config=str(tmp_path / f"{name}.json"), device="cpu") for name in ("one", "two")
    ]
    queue.change(roots, lambda _: entries)
    words = ["-m", "simpletune", "web", "--runs", str(roots.runs), "--root", str(tmp_path), "--port", "0"]
    saved = roots.runs / "one" / "checkpoints"

    with subprocess.Popen([sys.executable, *words], cwd=PACKAGE.parent) as server:
        until(lambda: saved.is_dir() and len(list(saved.glob("step-*"))) > 1, 300)
        lose_power(roots, server, queue.RUNNER, "run-one")
    last = max(int(step.name.removeprefix("step-")) for step in saved.glob("step-*"))
    (tmp_path / "one.json").write_text(json.dumps(tiny_config | {"name": "one", "train": {"steps": last + 5}}))

    with subprocess.Popen([sys.executable, *words], cwd=PACKAGE.parent) as server:
        until(lambda: states(roots) == [("one", "finished"), ("two", "finished")], 300)
        server.terminate()
    assert [(each.from_step, each.ended) for each in attempts_of(roots.runs / "one")] == [
        (0, "killed"), (last, "finished"),
    ]  # fmt: skip
    assert not list(roots.runs.glob("one.*")) and queue.read_queue(roots)[0].restarts == 1
