"""Single cached samples."""

import shutil
from pathlib import Path

import pytest
import torch

from simpletune.data.storage.place import CachePlace, open_cache


def test_a_file_of_another_encoder_is_encoded_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both have the same name, key and widths; files of earlier versions do not say whose they are."""
    ours, theirs = (open_cache(CachePlace(tmp_path), "prompts", name) for name in ("clip_l-1", "clip_g-1"))
    for cache in (ours, theirs):
        cache.save("a dog", {"clip.hidden": torch.ones(2)})
    file = next(ours.folder.glob("*.safetensors"))
    older = type(ours)(tmp_path / "older")
    older.save("a dog", {"clip.hidden": torch.ones(2)})
    shutil.copy(tmp_path / "older" / file.name, file)
    assert ours.lacking(["a dog"]) == []
    ours = open_cache(CachePlace(tmp_path), "prompts", "clip_l-1")
    shutil.copy(theirs.folder / file.name, file)
    assert ours.lacking(["a dog"]) == ["a dog"]
    assert "was written by another encoder" in capsys.readouterr().out
