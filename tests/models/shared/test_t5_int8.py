"""T5's embeddings cached in int8: the error that is stated, what keys depend on it, and who reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from simpletune.adapters.text.encoding import encode_prompts
from simpletune.config.load import validate
from simpletune.estimate.disk_needs import DataCounts, disk_needs
from simpletune.models.text.prompts import groups_of, pack, unpack
from simpletune.stages.text_cache import PromptStore, TextCache

CPU = torch.device("cpu")
PROMPTS = ["a red circle", "a blue square on green", ""]


def reference(hidden: np.ndarray) -> np.ndarray:
    """Symmetric rounding of each 64 numbers of a row to 255 steps, by its definition in float64."""
    width = 64 if hidden.shape[1] % 64 == 0 else hidden.shape[1]
    found = np.zeros_like(hidden)
    for row in range(len(hidden)):
        for start in range(0, hidden.shape[1], width):
            part = hidden[row, start : start + width]
            step = np.abs(part).max() / 127
            found[row, start : start + width] = np.rint(part / step) * step if step else 0
    return found


SLOW = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float16, torch.float32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *SLOW])
def test_packing_is_rounding_by_token_with_the_stated_error(dtype: torch.dtype) -> None:
    """256 tokens of width 4096, as SD3's T5 has: normal numbers, and some with a few channels 20 times as large."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 4096, generator=generator)
    hidden[128:, ::1000] *= 20
    hidden[7] = 0
    hidden = hidden.to(dtype)
    packed = pack({"hidden": hidden, "pooled": torch.ones(2)})
    assert packed["hidden"].dtype == torch.int8 and packed["scale"].shape == (256, 64)
    assert sum(t.numel() * t.element_size() for n, t in packed.items() if n != "pooled") == 256 * (4096 + 4 * 64)
    found = unpack(packed, torch.float32)["hidden"].double().numpy()
    expected = reference(hidden.double().numpy())
    scale = np.repeat(packed["scale"].double().numpy(), 64, axis=1)
    assert (np.abs(found - expected) <= 1.001 * scale).all()  # half a step apart may round either way
    assert (np.abs(found - expected) > 1e-4 * scale).mean() < 1e-3
    assert (np.abs(found - hidden.double().numpy()) <= 0.5001 * scale + 1e-12).all()
    error = [np.linalg.norm(found[part] - hidden.double().numpy()[part]) for part in (slice(8, 128), slice(128, 256))]
    size = [np.linalg.norm(hidden.double().numpy()[part]) for part in (slice(8, 128), slice(128, 256))]
    print(f"relative error: normal {error[0] / size[0]:.4f}, with large channels {error[1] / size[1]:.4f}")
    assert 0.005 < error[0] / size[0] < 0.0065 and error[1] / size[1] < 0.02 and (found[7] == 0).all()
    assert unpack(packed, dtype)["hidden"].dtype == dtype


def test_training_and_drawing_read_the_same_packed_embeddings(tiny_config: dict, tmp_path: Path) -> None:
    plain, packed = (
        validate(tiny_config | {"model": tiny_config["model"] | {"t5_cached": kind}}, "test").model
        for kind in ("plain", "int8")
    )
    exact, cache = (TextCache(model, torch.float32, tmp_path) for model in (plain, packed))
    exact.fill(PROMPTS, CPU)
    assert cache.fill(PROMPTS, CPU) == len(PROMPTS)  # T5's only: CLIP's are there
    both = zip(*(each.caches[0].folder.name.split("+") for each in (exact, cache)), strict=True)
    assert [theirs == ours for theirs, ours in both] == [True, True, False]
    store = PromptStore(packed, torch.float32, tmp_path)
    assert store.fill(PROMPTS, CPU) == 0
    directly = encode_prompts(packed, PROMPTS, CPU, torch.float32)
    for prompt in PROMPTS:
        read, whole = cache.load(prompt), exact.load(prompt)
        ours, expected = read.embeds, whole.embeds
        assert torch.equal(read.pooled, whole.pooled) and torch.equal(ours[:-8], expected[:-8])
        rounded = torch.from_numpy(reference(expected[-8:].double().numpy()))
        torch.testing.assert_close(ours[-8:].double(), rounded, atol=1e-5, rtol=1e-4)
        assert not torch.equal(ours, expected)
        assert torch.equal(store.load(prompt).embeds, ours) and torch.equal(directly[prompt].embeds, ours)


def test_packed_embeddings_need_less_disk(tiny_config: dict) -> None:
    packed = tiny_config | {"model": tiny_config["model"] | {"t5_cached": "int8"}}
    counts = DataCounts(6, 6, 6 * 32 * 32, 6)
    needs = [
        {what: size for what, _, size in disk_needs(validate(config, "test"), counts=counts)}["cached prompts"]
        for config in (tiny_config, packed)
    ]
    width = validate(packed, "test").model.text.width
    assert needs[0] - needs[1] == 6 * 8 * (3 * width - 4 * groups_of(width))  # fp32 encoders on the CPU
