"""Weight files that we write: equal content is equal to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from simpletune.system.safetensors_file import content_hash, read_header, write_safetensors


@pytest.mark.parametrize("hashed", [None, "hash"])
def test_files_of_equal_content_are_equal(hashed: str | None, tmp_path: Path) -> None:
    metadata = {f"name {number}": "é\n\x01\x7f猫" for number in range(8)}  # 8! orders
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.bfloat16)}
    files = [write_safetensors(tensors, tmp_path / f"{number}.safetensors", metadata, hashed) for number in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()
    own = {"hash": content_hash(files[0])} if hashed else {}
    assert read_header(files[0])["__metadata__"] == {"format": "pt", **metadata, **own}
