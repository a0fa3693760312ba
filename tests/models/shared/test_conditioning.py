"""What a denoiser reads besides z_t: one prompt's tensors, and those of a batch."""

from __future__ import annotations

import pytest
import torch

from simpletune.models.shared.conditioning import Conditioning, stack
from simpletune.system.options import UserError


def prompt(tokens: int, **more: torch.Tensor) -> Conditioning:
    return Conditioning(torch.full((tokens, 2), float(tokens)), **more)


def test_prompts_of_one_length_get_no_mask() -> None:
    """So that attention takes its quickest kernel."""
    both = stack([prompt(3), prompt(3)])
    assert both.embeds.shape == (2, 3, 2) and both.mask is None and both.pooled is None


def test_shorter_prompts_are_padded_with_zeros_that_a_mask_hides() -> None:
    both = stack([prompt(3), prompt(1)])
    assert both.embeds.tolist() == [[[3, 3]] * 3, [[1, 1], [0, 0], [0, 0]]]
    assert both.mask is not None and both.mask.tolist() == [[True] * 3, [True, False, False]]
    again = stack([prompt(2, mask=torch.tensor([True, False])), prompt(1, mask=torch.tensor([True]))])
    assert again.mask is not None and again.mask.tolist() == [[True, False], [True, False]]


@pytest.mark.parametrize(
    ("one", "named"),
    [
        ({"mask": torch.ones(3, dtype=torch.bool)}, "mask"),
        ({"pooled": torch.ones(4)}, "pooled"),
        ({"extra": {"sizes": torch.ones(6)}}, "sizes"),
    ],
)
def test_prompts_that_are_not_alike_are_refused(one: dict, named: str) -> None:
    with pytest.raises(UserError, match=f"some prompts of a batch have {named} and others do not.*Delete the cache"):
        stack([prompt(3, **one), prompt(3)])


def test_every_tensor_is_mapped_and_stacked() -> None:
    one = prompt(2, pooled=torch.ones(4), extra={"sizes": torch.arange(6.0)})
    both = stack([one, one]).map(lambda tensor: tensor + 1)
    assert both.pooled is not None and both.pooled.shape == (2, 4) and both.extra["sizes"].shape == (2, 6)
    assert {name: tensor.flatten()[0].item() for name, tensor in both.tensors().items()} == {
        "embeds": 3, "pooled": 2, "sizes": 1
    }  # fmt: skip
    away = both.zeros()
    assert all(not tensor.any() for tensor in away.tensors().values())
    masked = stack([prompt(2), prompt(1)])
    assert masked.zeros().mask is masked.mask, "a mask says where, not what"


def test_modulations_replace_what_they_were_computed_from() -> None:
    rows = prompt(2, pooled=torch.ones(4)).modulated(torch.ones(9))
    assert rows.pooled is None and set(rows.tensors()) == {"embeds", "modulation"}
