"""Pipes, devices and endless or damaged files where a file is named: a message at once, and no memory."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simpletune.apps.cli.main import main
from simpletune.system.model_folder import fingerprint, weight_files
from simpletune.system.options import UserError
from simpletune.system.regular_files import NotRegular, TooLarge, open_regular, read_regular
from simpletune.system.safetensors_file import read_header


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.timeout(120)
def test_only_files_are_opened(pipe: Path, tmp_path: Path) -> None:
    for place in (pipe, Path("/dev/zero"), Path("/dev/urandom")):
        with pytest.raises(NotRegular):
            open_regular(place)
    with pytest.raises(TooLarge):
        read_regular("/proc/self/smaps", 100)  # says that it is empty
    (tmp_path / "file").write_bytes(b"abc")
    assert read_regular(tmp_path / "file", 3) == b"abc"
    with pytest.raises(TooLarge) as caught:
        read_regular(tmp_path / "file", 2)
    assert (caught.value.size, caught.value.most) == (3, 2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("verb", ["import", "inspect", "check"])
@pytest.mark.parametrize("place", ["pipe", "/dev/zero", "/dev/urandom", "/proc/self/mem"])
def test_verbs_answer_at_once(
    verb: str, place: str, pipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pipe.parent)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main([verb, place]) == 2
    said = capsys.readouterr().err
    assert place in said and "Traceback" not in said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.timeout(120)
@pytest.mark.parametrize("read", [weight_files, fingerprint])
def test_a_pipe_as_weights_of_a_model_is_refused(read: Callable[[Path], object], pipe: Path, tmp_path: Path) -> None:
    pipe.rename(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="model.safetensors is not a regular file"):
        read(tmp_path)
    index = {"weight_map": {"a": "one.safetensors"}}
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="lacks one.safetensors"):
        read(tmp_path)


@pytest.mark.parametrize(("name", "start"), [("config.toml", "a = "), ("config.yaml", "")])
def test_files_nested_beyond_measure(name: str, start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / name
    file.write_text(start + "[" * sys.getrecursionlimit())  # each level takes the parsers a call or more
    assert main(["import", str(file)]) == 2
    assert f"{name} is nested too deeply" in capsys.readouterr().err


def header_of(text: str, size: int = 16) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + bytes(size)


ENTRY = '"dtype": "F32", "shape": [2], "data_offsets"'


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        (f'{{"a": {{{ENTRY}: [0, 8]}}, "b": {{{ENTRY}: [8, 16]}}}}', True),
        (f'{{"b": {{{ENTRY}: [8, 16]}}, "a": {{{ENTRY}: [0, 8]}}}}', True),
        (f'{{"a": {{{ENTRY}: [0, 8]}}, "b": {{{ENTRY}: [0, 8]}}}}', False),
        (f'{{"a": {{{ENTRY}: [0, 8]}}, "b": {{{ENTRY}: [4, 12]}}}}', False),
        (f'{{"a": {{{ENTRY}: [8, 16]}}}}', False),
        (f'{{"a": {{{ENTRY}: [0, 8]}}}}'.replace("F32", "F33"), False),
        (f'{{"a": {{{ENTRY}: [0, 8]}}, "a": {{{ENTRY}: [8, 16]}}}}', False),
    ],
)
def test_tensors_that_overlap_leave_gaps_or_share_a_name_are_damage(text: str, sound: bool, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(header_of(text))
    if sound:
        assert sorted(read_header(tmp_path / "a.safetensors")) == ["a", "b"]
    else:
        with pytest.raises(UserError, match="is damaged or not a safetensors file"):
            read_header(tmp_path / "a.safetensors")
