"""The model that captions if none is named: which, how large its download is, and what is said without a network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from tiny_captioners import write_florence

from simpletune.apps.cli.main import main
from simpletune.commands.caption import caption as captioning
from simpletune.commands.caption import defaults
from simpletune.commands.caption.defaults import SMALLEST, default_model
from simpletune.system import hub
from simpletune.system.gpus import GIB, find_card

FLORENCE, QWEN_2B, QWEN_4B = SMALLEST.name, "Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    place = tmp_path / "pictures"
    place.mkdir()
    Image.new("RGB", (60, 80), "red").save(place / "a.png")
    return place


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captioning, "driver_version", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("card", "held", "precision", "name"),
    [
        (None, 0, "bf16", FLORENCE),
        ("L4", 0, "bf16", QWEN_4B),
        ("RTX3060-12GB", 0, "bf16", QWEN_4B),
        ("RTX3060-12GB", 0, "int8", QWEN_4B),
        ("RTX3060-12GB", 0, "fp32", QWEN_2B),
        ("RTX3070", 0, "bf16", QWEN_2B),
        ("RTX3060-12GB", 3 * GIB, "bf16", QWEN_2B),
        ("RTX3060-6GB", 0, "bf16", QWEN_2B),
        ("RTX3060-6GB", 2 * GIB, "bf16", FLORENCE),
        ("RTX3060-6GB", 6 * GIB, "bf16", FLORENCE),
    ],
)
def test_the_best_that_fits_in_the_cards_free_memory(card: str | None, held: int, precision: str, name: str) -> None:
    assert default_model(None if card is None else find_card(card), held, precision).name == name


def test_the_default_is_named_with_its_download(
    no_card: None, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tiny = write_florence(tmp_path / "florence")
    monkeypatch.setattr(defaults, "SMALLEST", replace(SMALLEST, name=str(tiny)))
    assert main(["caption", str(images), "--max-new-tokens", "6"]) == 0
    said = capsys.readouterr().out
    assert "device  cpu (no NVIDIA GPU was found" in said
    assert (
        f"model   {tiny} (fits a CPU; 0.5 GB from huggingface.co/{tiny}, fetched once); --model names another" in said
    )
    assert (images / "a.txt").read_text()


def test_without_a_network_the_default_says_what_to_do(
    no_card: None, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.listing.cache_clear()
    assert main(["caption", str(images)]) == 2
    said = capsys.readouterr().err
    assert f"{FLORENCE} is not in the local cache, and HF_HUB_OFFLINE forbids access to the hub." in said
    assert f"--model FOLDER names a model on this machine instead of {FLORENCE}" in said
    assert not (images / "a.txt").exists()
