"""Edges of pictures: the figures of the committed table, and that a shifted position table would show."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import edges

COMMITTED = json.loads((Path(edges.__file__).parent / "results" / "cpu" / "edges.json").read_text())["rows"]


def test_no_side_of_the_result_stands_out_where_the_base_s_does_not() -> None:
    assert list(COMMITTED) == [edges.GRADIENTS, edges.AUTOENCODER, *edges.IMAGES]
    assert COMMITTED[edges.GRADIENTS]["most"] == 0
    for name in edges.IMAGES:
        if name.endswith("base") and "48x48" not in name:
            assert COMMITTED[name]["most"] < 1 and COMMITTED[name.replace("base", "result")]["most"] < 1


def test_bands_are_the_outermost_values() -> None:
    values = np.zeros((8, 8))
    values[:, 0], values[-1] = 8, 16
    assert edges.bands(values, 1) == {"left": 9, "right": 2, "top": 1, "bottom": 16}


@pytest.mark.slow
def test_gradients_by_position_show_a_shifted_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert edges.gradients(1, 128)["most"] == 0

    def shifted(embed: nn.Module, *_: object) -> None:
        assert isinstance(embed.pos_embed, torch.Tensor)
        embed.pos_embed = embed.pos_embed.roll(1, dims=1)

    monkeypatch.setattr(edges, "crop_positions", shifted)
    assert edges.gradients(1, 128)["most"] > 1e-4
