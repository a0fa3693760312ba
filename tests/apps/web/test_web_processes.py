"""``web.processes``: verbs as processes of their own, which a restarted page finds again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from serving import until

from simpletune.apps.web import processes
from simpletune.apps.web.roots import Roots, make_roots
from simpletune.system.options import UserError


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return make_roots(tmp_path / "runs", [tmp_path])


def wait_for_a_line(folder: Path) -> str:
    """A module that prints, waits for the file "go", prints again and exits with 3."""
    code = "import pathlib, sys, time\nprint('one')\n"
    code += "while not pathlib.Path('go').exists():\n    time.sleep(0.01)\nprint('two\\rthree')\nsys.exit(3)\n"
    (folder / "waits.py").write_text(code)
    return "waits"


def test_a_process_has_a_log_an_end_and_a_name_of_its_own(
    tmp_path: Path, roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    module = wait_for_a_line(tmp_path / "modules")
    pid = processes.start(roots, [], "it", module)
    assert os.getsid(pid) == pid  # a closed terminal does not end it
    until(lambda: processes.tail(roots, "it", 5) == ["one"])
    assert processes.is_running(roots, "it") and processes.exit_code(roots, "it") is None
    assert processes.find_process(roots, "it") == pid
    with pytest.raises(UserError, match="it is still running. Wait"):
        processes.start(roots, [], "it", module)
    assert processes.tail(roots, "it", 5) == ["one"]  # the refused one has not emptied it
    (tmp_path / "go").touch()
    until(lambda: processes.exit_code(roots, "it") == 3)
    assert not processes.is_running(roots, "it") and processes.find_process(roots, "it") is None
    assert processes.tail(roots, "it", 1) == ["three"]
    processes.send_signal(roots, "it")  # nobody is there to get it
    assert not processes.is_running(roots, "never") and processes.tail(roots, "never", 3) == []


def test_the_first_root_holds_no_modules(tmp_path: Path, roots: Roots) -> None:
    for name in ("simpletune", "argparse", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the folder was imported')")
    processes.start(roots, ["--version"], "version")
    until(lambda: processes.exit_code(roots, "version") is not None)
    assert processes.exit_code(roots, "version") == 0, processes.tail(roots, "version", 9)


def test_a_killed_page_leaves_its_process_which_the_next_page_finds(
    tmp_path: Path, roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    wait_for_a_line(tmp_path)
    code = f"""
import os, signal
from pathlib import Path
from simpletune.apps.web import processes
from simpletune.apps.web.roots import make_roots
roots = make_roots(Path({str(roots.runs)!r}), [Path({str(tmp_path)!r})])
processes.start(roots, [], "it", "waits")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert processes.find_process(roots, "it") is not None and processes.is_running(roots, "it")
    record = processes.log_file(roots, "it").with_suffix(".json")
    known = json.loads(record.read_text())
    for change in ({"started": known["started"] + 1}, {"boot": "another"}, {"pid": "1"}):  # another's ID is not ours
        record.write_text(json.dumps({**known, **change}))
        assert processes.find_process(roots, "it") is None
    assert processes.is_running(roots, "it")  # the log tells
    record.write_text(json.dumps({**known, "boot": known["boot"].split()[0]}))  # as an older version wrote it
    assert processes.find_process(roots, "it") == known["pid"] and not processes.was_ended_by_restart(roots, "it")
    record.write_text(json.dumps(known))
    processes.send_signal(roots, "it")
    until(lambda: not processes.is_running(roots, "it"))


def test_a_log_stays_in_its_folder(roots: Roots) -> None:
    for name in ("", "../up", "a/b", ".hidden", "a\nb", "é" * 3, "x" * 200):
        with pytest.raises(UserError, match="is not a valid log name"):
            processes.start(roots, ["schema"], name)
