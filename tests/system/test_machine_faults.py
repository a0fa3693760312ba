"""What a run and its machine refuse: pages that cannot be mapped, files a disk cannot read, damaged configurations."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from simpletune.engine.fp16_blocks import _wide_parameter
from simpletune.engine.memory.machine_weights import MachineWeights, SharedFile
from simpletune.engine.tensors import plain_tensors
from simpletune.runs import checkpoint, repair
from simpletune.runs.outputs import numbered_folder
from simpletune.runs.weights_names import run_config
from simpletune.system.options import UserError
from simpletune.training import heartbeats


def test_what_cannot_be_mapped_or_joined_is_said_and_leaves_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"^1073741824 GiB of addresses cannot be mapped \("):
        MachineWeights.create(2**60)
    assert len(os.listdir("/proc/self/fd")) == before
    weights = MachineWeights.create(2**16)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="is not the file of the first process of this machine"):
        MachineWeights.join(SharedFile(weights.offer.process, weights.offer.handle, bytes(16)))
    assert len(os.listdir("/proc/self/fd")) == before
    weights.close()


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_tensor_has_all_of_its_parts_in_the_pages() -> None:
    linear = nn.Sequential(nn.Linear(32, 16))
    weight = quantised(linear)
    expected = weight.dequantize()
    weights = MachineWeights.create(2**20)
    kept = weights.keep(weight)
    assert type(kept) is type(weight) and torch.equal(kept.dequantize(), expected)
    assert all(weights._pages.holds(plain) for plain in plain_tensors(kept))
    assert weights.nbytes >= sum(plain.nbytes for plain in plain_tensors(kept))
    empty = weights.keep(torch.empty(0))
    assert empty.numel() == 0 and not weights._pages.holds(empty)
    weights.close()


def quantised(model: nn.Module) -> torch.Tensor:
    """A linear layer's weight as quanto's int8."""
    from optimum.quanto import freeze, qint8, quantize

    quantize(model, weights=qint8)
    freeze(model)
    return model[0].weight.data  # type: ignore[index, union-attr, no-any-return]


def test_a_parameter_in_fp32_has_the_same_numbers() -> None:
    plain = nn.Parameter(torch.tensor([1.5, -3.0], dtype=torch.float16), requires_grad=False)
    wide = _wide_parameter(plain)
    assert wide.dtype == torch.float32 and wide.tolist() == [1.5, -3.0] and not wide.requires_grad
    weight = quantised(nn.Sequential(nn.Linear(32, 16)).half())
    wide = _wide_parameter(nn.Parameter(weight, requires_grad=False))
    assert weight.dtype == torch.float16 and wide.dtype == torch.float32
    assert wide._data is weight._data or torch.equal(wide._data, weight._data)  # type: ignore[attr-defined]
    by_hand = weight._data.float() * weight._scale.float()  # type: ignore[attr-defined]
    assert torch.equal(wide.dequantize(), by_hand)


def test_the_end_of_a_process_is_said_on_its_error_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, bytes]] = []
    codes: list[int] = []
    monkeypatch.setattr(heartbeats.os, "write", lambda handle, text: said.append((handle, text)))
    monkeypatch.setattr(heartbeats.os, "_exit", codes.append)
    watch = heartbeats.HeartbeatThread()
    watch.number, watch.of = 1, 2
    watch.end("process 0 has failed: no room")
    ((handle, text),) = said
    assert handle == 2 and text.startswith(b"\nerror: process 1 of 2: ") and b"process 0 has failed: no room" in text

    def closed(*words: object) -> None:
        raise OSError(errno.EBADF, "closed")

    monkeypatch.setattr(heartbeats.os, "write", closed)
    watch.end("again")
    assert codes == [heartbeats.LOST] * 2, "it ends even where nobody listens"


def test_a_file_s_fault_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, checksum = tmp_path / "x", hashlib.sha256(b"x").hexdigest()
    assert checkpoint._fault(file, checksum) == "missing"
    file.symlink_to("nowhere")
    assert checkpoint._fault(file, checksum) == "not a file"
    file.unlink()
    file.write_bytes(b"x")
    assert checkpoint._fault(file, checksum) is None and checkpoint._fault(file, "0" * 64) == "damaged"

    def unreadable(number: int) -> None:
        def fail(*words: object) -> str:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(checkpoint, "sha256_of", fail)

    unreadable(errno.EIO)
    assert checkpoint._fault(file, checksum) == "damaged (Input/output error)"
    unreadable(errno.EACCES)
    with pytest.raises(PermissionError):  # the file may be whole
        checkpoint._fault(file, checksum)


def test_a_checkpoint_with_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch) -> None:
    """Otherwise it would be set aside for another file, and an older one continued."""
    state = {"step": 1, "config": {}, "manifest": [], "optimizer": {}, "processes": 1, "sha256": {"a": "", "b": ""}}

    def fault(file: Path, checksum: str) -> str | None:
        if file.name == "b":
            raise PermissionError(errno.EACCES, "", file.name)
        return "damaged"

    monkeypatch.setattr(checkpoint, "read_state", lambda file: state)
    monkeypatch.setattr(checkpoint, "_require_kinds", lambda *words: None)
    monkeypatch.setattr(checkpoint, "_fault", fault)
    with pytest.raises(UserError, match="may not read b") as refused:
        checkpoint.read_checkpoint(tmp_path / "step-000001")
    assert not isinstance(refused.value, checkpoint.DamagedCheckpoint)


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "is not a file"), ("{", "is damaged"), ("[]", "is damaged"), ('{"step": 1}', "is damaged"),
        ('{"step": true, "loss": "x"}', "is damaged (step, loss)"),
    ],
)  # fmt: skip
def test_a_run_s_own_file_that_is_damaged_is_set_aside(text: str | None, said: str, tmp_path: Path, capsys) -> None:
    needed = {"step": (int,), "loss": (int, float)}
    file = tmp_path / "summary.json"
    assert repair.read_own(file, needed) is None and capsys.readouterr().out == ""
    file.mkdir() if text is None else file.write_text(text)
    assert repair.read_own(file, needed) is None
    assert capsys.readouterr().out == f"warning {file} {said}: set aside as summary.json.damaged\n"
    assert not file.exists() and (tmp_path / "summary.json.damaged").exists()
    file.write_text(json.dumps({"step": 3, "loss": 0.5, "more": None}))
    assert repair.read_own(file, needed) == {"step": 3, "loss": 0.5, "more": None}


def test_what_is_no_run_has_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--run: .*/none does not exist\. Name a run, such as runs/demo"):
        run_config(tmp_path / "none", "--run: ")
    with pytest.raises(UserError, match=r"is not a run's folder: it has no config\.json\. Name a run"):
        run_config(tmp_path)
    (tmp_path / "config.json").write_text('{"name": 1}')
    damaged = r"^--run: .*config\.json is damaged or from another version of .* \(.+\)\. Name"
    with pytest.raises(UserError, match=damaged):
        run_config(tmp_path, "--run: ")


def test_a_folder_s_number_that_another_process_takes_meanwhile_is_passed_over(tmp_path: Path, monkeypatch) -> None:
    parent = tmp_path / "new"
    assert numbered_folder(parent) == parent / "0001"
    (parent / "0007").mkdir()
    (parent / "0008").touch()
    honest = Path.mkdir

    def late(self: Path, *words: object, **more: object) -> None:
        if self.name == "0009":
            monkeypatch.setattr(Path, "mkdir", honest)
            honest(self)
        honest(self, *words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", late)
    made = numbered_folder(parent)
    assert made.is_dir() and list(made.iterdir()) == [] and made.name == "0010"
