"""The cut table of positions: the very rows of the whole one, the same losses, and whole again in an export."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from diffusers.models.embeddings import PatchEmbed
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from slow_cases import slow_but

from simpletune.config.load import validate
from simpletune.engine.quant.precision import BF16, FP32
from simpletune.models.sd3.positions import TABLE, crop_positions, side_for
from simpletune.models.sd3.sd3_option import SD3
from simpletune.runs.folder import read_metrics
from simpletune.training.train import train

WIDTH = 8
sides = st.integers(1, 40)


def embedder(whole: int) -> PatchEmbed:
    return PatchEmbed(height=16, width=16, patch_size=2, in_channels=4, embed_dim=WIDTH, pos_embed_max_size=whole)


@settings(max_examples=150, deadline=None)
@given(whole=st.integers(4, 41), patches=st.lists(st.tuples(sides, sides), min_size=1, max_size=4))
def test_every_size_gets_the_rows_of_the_whole_table(whole: int, patches: list[tuple[int, int]]) -> None:
    sizes = [(16 * min(w, whole), 16 * min(h, whole)) for w, h in patches]
    uncut, cut = embedder(whole), embedder(whole)
    crop_positions(cut, sizes, lambda: uncut.pos_embed)
    largest = max(max(size) for size in sizes)
    assert cut.pos_embed_max_size <= largest // 16 + 1
    for width, height in [*sizes, (largest, largest), (16, largest), (16, 16)]:
        ours, theirs = (each.cropped_pos_embed(height // 8, width // 8) for each in (cut, uncut))
        assert torch.equal(ours, theirs), (width, height)


def test_every_side_of_sd3_medium() -> None:
    whole = SD3().files.known_config()["pos_embed_max_size"]
    uncut, table = embedder(whole), embedder(whole).pos_embed
    for side in [*range(1, 33), 63, 64, 65, 95, 96, 127, 128, 191, 192]:
        cut = embedder(4)
        cut.pos_embed, cut.pos_embed_max_size = table, whole
        crop_positions(cut, [(16 * side, 16 * max(side // 3, 1))], lambda: table)
        for height in {1, max(side // 2, 1), side}:
            ours, theirs = (each.cropped_pos_embed(2 * height, 2 * side) for each in (cut, uncut))
            assert torch.equal(ours, theirs)
    assert side_for([(1024, 1024)], whole) == 64
    assert side_for([(4096, 16)], whole) == whole


def test_a_size_over_the_table_leaves_it_whole_and_is_refused_as_before() -> None:
    cut = embedder(8)
    crop_positions(cut, [(16 * 9, 16)], lambda: cut.pos_embed)
    assert cut.pos_embed_max_size == 8 and not hasattr(cut, "whole_table")
    with pytest.raises(ValueError, match="cannot be greater than"):
        cut.cropped_pos_embed(18, 2)


@pytest.mark.parametrize("init", ["pretrained", "random"])
@pytest.mark.parametrize("precision", [FP32(), BF16()], ids=["fp32", "bf16"])
def test_the_loader_keeps_what_is_needed_and_can_read_the_rest_again(init, precision, tiny_config) -> None:
    config = validate(tiny_config, "test").model.model_copy(update={"init": init})
    whole = config.load_denoiser(precision, torch.device("cpu"))
    cut = config.load_denoiser(precision, torch.device("cpu"), sizes=[(64, 32)])
    old, new = whole.pos_embed.pos_embed, cut.pos_embed.pos_embed
    side = 4 + (whole.pos_embed.pos_embed_max_size - 4) % 2
    assert new.dtype == precision.compute_dtype()
    assert new.untyped_storage().nbytes() == side**2 * old.shape[-1] * old.element_size() < old.nbytes
    assert cut.config.pos_embed_max_size == whole.config.pos_embed_max_size
    assert SD3().architecture.whole_tensors(whole) == {}
    assert torch.equal(SD3().architecture.whole_tensors(cut)[TABLE], old)


@pytest.mark.parametrize("method", slow_but(["full"], ["full", "partial", "lora"]))
def test_losses_pictures_and_exports_are_those_of_the_whole_table(method: str, tiny_config: dict) -> None:
    losses, results, images = [], [], []
    for crop in (True, False):
        data = copy.deepcopy(tiny_config)
        data |= {"name": f"crop-{crop}", "adapter": {"method": method}, "memory": {"crop_positions": crop}}
        data |= {"train": {"steps": 2}}
        data["validation"] = {"prompts": ["a red disc"], "steps": 1, "width": 64, "height": 48, "loss_samples": 1}
        run = train(validate(data, "test"))
        losses.append([row["loss"] for row in read_metrics(run)])
        output = Path(json.loads((run / "summary.json").read_text())["output"])
        results.append(load_file(output / "diffusion_pytorch_model.safetensors" if output.is_dir() else output))
        images.append((run / "samples" / "step-000002" / "prompt-00.png").read_bytes()[-400:])
    assert losses[0] == losses[1] and images[0] == images[1]
    torch.testing.assert_close(*results, rtol=0, atol=0)
