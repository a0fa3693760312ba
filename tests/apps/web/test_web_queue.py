"""The queue of the pages: one run at a time a device, by a runner that may be killed at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import until

from simpletune.apps.web import processes, queue, queue_runner
from simpletune.apps.web.queue import QueueEntry
from simpletune.apps.web.roots import Roots, make_roots
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


def test_the_runner_works_the_queue_off_and_ends(tmp_path: Path, roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # a real runner and a real command, whose configurations do not exist
    put(roots, "one", "two")
    until(lambda: states(roots) == [("one", "failed"), ("two", "failed")], 100)
    assert "does not exist" in queue.read_queue(roots)[0].reason
    until(lambda: not processes.running(roots, queue.RUNNER))


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
    for text in ("{", '[{"id": 1}]', json.dumps([{**queue.read_queue(roots)[0].model_dump(), "new": 1}])):
        file.write_text(text)
        with pytest.raises(UserError, match="is damaged"):
            queue.read_queue(roots)
        assert not queue.is_open(roots)
    put(roots, "two")
    assert states(roots) == [("two", "waiting")] and (roots.own / "queue.json.damaged").exists()


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
