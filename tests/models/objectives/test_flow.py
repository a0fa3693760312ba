"""Rectified flow against numbers worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from simpletune.models.objectives.flow import Flow, FlowProcess, shift_sigma
from simpletune.system.rng import random_key, reseed_global, stream

EVEN = (np.arange(4000) + 0.5) / 4000


def latents(*values: float) -> torch.Tensor:
    """One pixel of one channel for each value: [b, 1, 1, 1]."""
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1)


def test_interpolates_each_sample_at_its_own_sigma() -> None:
    """0.75 * 2 + 0.25 * 10 = 4; 0.5 * (-4) + 0.5 * 1 = -1.5; at 0 the picture, at 1 the noise."""
    z_t = FlowProcess().noised(latents(2, -4, 7, 7), latents(10, 1, 9, 9), torch.tensor([0.25, 0.5, 0.0, 1.0]))
    torch.testing.assert_close(z_t, latents(4, -1.5, 7, 9))


def test_velocity_leads_from_the_picture_to_the_noise() -> None:
    z_0, noise, sigma = latents(2, -4), latents(10, 1), torch.tensor([0.25, 0.5])
    velocity = FlowProcess().target(z_0, noise, sigma)
    torch.testing.assert_close(velocity, latents(8, 5))
    z_t = FlowProcess().noised(z_0, noise, sigma)
    torch.testing.assert_close(z_t + (1 - sigma.view(-1, 1, 1, 1)) * velocity, noise)
    torch.testing.assert_close(z_t - sigma.view(-1, 1, 1, 1) * velocity, z_0)


def test_loss_is_the_mean_square_in_fp32() -> None:
    """(1 + 4 + 9 + 0) / 4 = 3.5. In bf16 the mean over 1000 elements of 1.0078125^2 would lose its last digits."""
    loss_of = partial(FlowProcess().loss, level=torch.tensor([0.5]))
    assert loss_of(latents(1, 2, 3, 4), latents(0, 0, 0, 4)).item() == 3.5
    near_one = torch.full((1000,), 1.0078125, dtype=torch.bfloat16)
    loss = loss_of(near_one, torch.zeros_like(near_one))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1.0078125**2, rel=1e-6)


@pytest.mark.parametrize(
    ("sigma", "shift", "shifted"),
    [(0.5, 3.0, 0.75), (0.25, 3.0, 0.5), (0.2, 2.0, 1 / 3), (0.4, 1.0, 0.4), (0.0, 3.0, 0.0), (1.0, 3.0, 1.0)],
)
def test_shift_by_hand(sigma: float, shift: float, shifted: float) -> None:
    """In logits it is an addition of log s, the paper's reason for eq. 23."""
    assert shift_sigma(sigma, shift) == pytest.approx(shifted, rel=1e-12, abs=1e-12)
    if 0 < sigma < 1:
        logit = math.log(sigma / (1 - sigma)) + math.log(shift)
        assert shift_sigma(sigma, shift) == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-12)


@pytest.mark.parametrize(("resolution", "shift"), [(1024, 3.0), (512, 1.5), (2048, 6.0), (256, 1.0), (32, 1.0)])
def test_auto_shift_follows_the_resolution(resolution: int, shift: float) -> None:
    assert Flow().shift_at(resolution) == shift
    assert Flow(shift=2.5).shift_at(resolution) == 2.5


@pytest.mark.parametrize(
    ("mean", "std", "shift"), [(0.0, 1.0, 1.0), (0.7, 0.5, 1.0), (-1.0, 1.6, 1.0), (0.0, 1.0, 3.0)]
)
def test_logits_of_logit_normal_draws_are_normal_about_the_mean_and_log_of_the_shift(mean, std, shift) -> None:
    objective, source = Flow(logit_mean=mean, logit_std=std), np.random.default_rng(5)
    sigma = np.array([objective.draw(source, shift) for _ in range(20_000)])
    logits = np.log(sigma / (1 - sigma)) - math.log(shift)
    assert logits.mean() == pytest.approx(mean, abs=4 * std / math.sqrt(20_000))
    assert logits.std() == pytest.approx(std, rel=0.02)
    assert np.mean(np.abs(logits - mean) < std) == pytest.approx(0.6827, abs=0.015)


def test_moments_of_uniform_draws() -> None:
    """Unshifted: 1/2 and 1/12. Shifted by s: the integral of s u / (1 + (s - 1) u) is s (s - 1 - ln s) / (s - 1)^2."""
    objective, source = Flow(sigma="uniform"), np.random.default_rng(7)
    sigma = np.array([objective.draw(source, 1.0) for _ in range(20_000)])
    assert sigma.mean() == pytest.approx(0.5, abs=0.01)
    assert sigma.var() == pytest.approx(1 / 12, rel=0.03)
    shifted = np.array([objective.draw(source, 3.0) for _ in range(20_000)])
    assert shifted.mean() == pytest.approx(3 * (2 - math.log(3)) / 4, abs=0.01)


def test_quantiles_by_hand() -> None:
    """The median's logit is the mean; 0.8413 of a normal density lies below one standard deviation."""
    objective = Flow(logit_mean=0.5, logit_std=2.0)
    assert objective.quantile(0.5, 1.0) == pytest.approx(1 / (1 + math.exp(-0.5)), rel=1e-12)
    assert objective.quantile(0.8413447460685429, 1.0) == pytest.approx(1 / (1 + math.exp(-2.5)), rel=1e-9)
    assert Flow(sigma="uniform").quantile(0.5, 3.0) == pytest.approx(0.75)
    mean = np.mean([Flow(sigma="uniform").quantile(q, 3.0) for q in EVEN])
    assert mean == pytest.approx(3 * (2 - math.log(3)) / 4, rel=1e-5)


def test_a_stream_depends_on_every_part_of_its_key() -> None:
    keys = [(0, "noise", 1, 2), (1, "noise", 1, 2), (0, "sigma", 1, 2), (0, "noise", 2, 1), (0, "noise", 12),
            (0, "noise")]  # fmt: skip
    first = [stream(*key).random() for key in keys]
    assert first == [stream(*key).random() for key in keys]
    assert len(set(first)) == len(keys)
    assert random_key(0, "noise", 1) != random_key(0, "noise", "1")


def test_global_generators_follow_their_key() -> None:
    with torch.random.fork_rng():
        drawn = []
        for key in [(3, "step", 1), (3, "step", 2), (3, "step", 1)]:
            reseed_global(*key)
            drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("options", [{}, {"sigma": "uniform", "min_sigma": 0.2}, {"sigma": "beta"}], ids=str)
def test_a_few_levels_are_the_middles_of_equally_probable_parts(options: dict[str, Any]) -> None:
    """Each is drawn equally often; a draw without the field is what it was."""
    few, any_level, shift = Flow(levels=8, **options), Flow(**options), 2.0
    levels = few.levels_at(shift)
    assert levels == tuple(any_level.quantile((number + 0.5) / 8, shift) for number in range(8))
    draws = np.random.default_rng(1)
    counts = Counter(few.draw(draws, shift) for _ in range(4000))
    assert tuple(sorted(counts)) == levels and all(400 < count < 600 for count in counts.values())
    assert any_level.levels_at(shift) == () and len({any_level.draw(draws, shift) for _ in range(100)}) == 100
