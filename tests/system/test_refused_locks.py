"""Byte ranges of a lock file where the system refuses them: a warning once, or an error with its remedy."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from failing_locks import fail_with

from simpletune.system import locks
from simpletune.system.locks import Ranges, is_held
from simpletune.system.options import UserError


@pytest.fixture(autouse=True)
def unwarned() -> None:
    locks._warn_unlocked.cache_clear()


def test_where_the_lock_file_cannot_be_made_every_range_is_given_and_it_is_said_once(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        with Ranges(tmp_path / "file" / "x.lock") as ranges, ranges.hold(0, 9) as one, ranges.hold(3, 4) as other:
            assert one and other and not ranges.sure
    assert capsys.readouterr().out.count(f"warning {tmp_path / 'file'} cannot be locked (") == 1


@pytest.mark.parametrize("number", locks.UNSUPPORTED, ids=errno.errorcode.get)
def test_a_file_system_without_locks_gives_every_range_and_is_said_once(
    number: int, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with("fcntl", number, monkeypatch)
    with Ranges(tmp_path / "x.lock") as ranges:
        assert ranges.sure
        for wait in (False, True):
            with ranges.hold(0, 0, wait) as held:
                assert held and not ranges.sure
    assert capsys.readouterr().out == (
        f"warning {tmp_path} is on a file system without locks. Do not let two runs share it\n"
    )


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES], ids=errno.errorcode.get)
def test_a_range_that_another_process_holds_is_not_given(number: int, tmp_path: Path, capsys, monkeypatch) -> None:
    fail_with("fcntl", number, monkeypatch)
    with Ranges(tmp_path / "x.lock") as ranges, ranges.hold(0, 0) as held:
        assert not held and ranges.sure
    assert capsys.readouterr().out == ""


def test_any_other_error_names_the_file_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with("fcntl", errno.EIO, monkeypatch)
    with Ranges(tmp_path / "x.lock") as ranges:
        with pytest.raises(UserError, match=r"x\.lock cannot be locked \(Input/output error\)\. Remove it"):
            ranges.hold(0, 0).__enter__()


def test_another_thread_may_release_what_one_has_locked(tmp_path: Path) -> None:
    lock = locks._acquire(locks._lock_beside(tmp_path / "run"))
    assert is_held(tmp_path / "run")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lock.release).result()
    assert not is_held(tmp_path / "run")
