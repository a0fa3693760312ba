"""Weight files that we write: equal content is equal to the byte."""

from __future__ import annotations

import pickle
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from simpletune.system.options import UserError
from simpletune.system.safetensors_file import (
    content_hash,
    conversion_command,
    read_header,
    require_safetensors,
    write_safetensors,
)


@pytest.mark.parametrize("hashed", [None, "hash"])
def test_files_of_equal_content_are_equal(hashed: str | None, tmp_path: Path) -> None:
    metadata = {f"name {number}": "é\n\x01\x7f猫" for number in range(8)}  # 8! orders
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.bfloat16)}
    files = [write_safetensors(tensors, tmp_path / f"{number}.safetensors", metadata, hashed) for number in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()
    own = {"hash": content_hash(files[0])} if hashed else {}
    assert read_header(files[0])["__metadata__"] == {"format": "pt", **metadata, **own}


def test_the_command_for_a_pickle_converts_its_tensors_and_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = torch.arange(6.0).view(2, 3)
    torch.save({"state_dict": {"a.weight": shared, "b.weight": shared.t(), "step": 3}}, tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=r"Get the .safetensors version, or convert it: .*python -c "):
        require_safetensors(tmp_path / "x.ckpt")
    program, _, code, source, out = shlex.split(conversion_command(tmp_path / "x.ckpt"))
    assert (Path(source), Path(out)) == (tmp_path / "x.ckpt", tmp_path / "x.safetensors") and "python" in program
    assert shlex.split(conversion_command(tmp_path / "y.safetensors"))[-1].endswith("y-converted.safetensors")
    monkeypatch.setattr(sys, "argv", ["-c", source, out])
    exec(code, {})
    found = load_file(out)
    assert set(found) == {"a.weight", "b.weight"} and torch.equal(found["b.weight"], shared.t())
    torch.save({"a": Path("x")}, tmp_path / "evil.ckpt")
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / "evil.ckpt"), out])
    with pytest.raises(pickle.UnpicklingError):
        exec(code, {})
