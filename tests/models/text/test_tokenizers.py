"""Tokenizers that do not fit their encoders, and how often their files are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from simpletune.models.families import Model
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.text import prompts
from simpletune.models.text.prompts import Prompts
from simpletune.system.options import UserError

CPU = torch.device("cpu")


def opened(folder: Path) -> prompts.Prompts:
    model: Model = SD3(pretrained=str(folder), t5_length=8)
    return Prompts(model.text, torch.float32)


@pytest.mark.parametrize(
    "file, old, new, said",
    [
        (
            "tokenizer/vocab.json",
            '"a</w>": ',
            '"a</w>": 9',
            r"numbers the token 'a</w>' 9\d+, but CLIP-L has \d+ tokens",
        ),
        ("tokenizer_2/tokenizer_config.json", '_length": 24', '_length": 25', "is 25, but CLIP-G reads 24 tokens"),
    ],
)
def test_a_tokenizer_that_its_encoder_cannot_follow_is_named(
    file: str, old: str, new: str, said: str, tiny_pipeline: Path, tmp_path: Path
) -> None:
    """A flipped bit in a number: it reads well, and the encoder has no such row."""
    shutil.copytree(tiny_pipeline, tmp_path / "pipeline")
    text = (tmp_path / "pipeline" / file).read_text()
    assert old in text
    (tmp_path / "pipeline" / file).write_text(text.replace(old, new))
    found = opened(tmp_path / "pipeline")
    with pytest.raises(UserError, match=f"{file}.*{said}"):
        for encoder in found.encoders:
            list(found.encode(encoder, ["a"], CPU))


def test_a_tokenizers_files_are_hashed_once(tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []
    real = prompts.files_hash
    monkeypatch.setattr(prompts, "files_hash", lambda folder: hashed.append(folder) or real(folder))
    found = opened(tiny_pipeline)
    for encoder in found.encoders * 2:
        found.tokenizer(encoder), found.fingerprint(encoder)
    assert [folder.name for folder in hashed] == ["tokenizer", "tokenizer_2", "tokenizer_3"]
