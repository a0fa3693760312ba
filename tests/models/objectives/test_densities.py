"""Densities of noise levels as quantile functions, and the pseudo-Huber loss, against numbers worked out elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from simpletune.config.load import validate
from simpletune.models.objectives.ddpm import Ddpm
from simpletune.models.objectives.densities import STEEPEST, Beta, CosMap, Density, LogitNormal, Mode, Uniform, between
from simpletune.models.objectives.flow import Flow, FlowProcess, shift_sigma
from simpletune.models.objectives.huber import Huber, errors
from simpletune.system.options import ConfigError

DENSITIES = [Uniform(), LogitNormal(0.4, 1.3), Mode(1.29), Mode(-1), CosMap(), Beta(2, 2), Beta(0.5, 3), Beta(8, 1.5)]
FLOWS = [
    Flow(sigma="logit_normal", logit_mean=-0.5), Flow(sigma="uniform"), Flow(sigma="mode"), Flow(sigma="cosmap"),
    Flow(sigma="beta", beta_alpha=3, beta_beta=1.5),
]  # fmt: skip


@pytest.mark.parametrize("density", DENSITIES, ids=str)
def test_a_quantile_function_rises_from_0_to_1_and_inverts_the_cdf(density: Density) -> None:
    levels = [density.quantile(q) for q in (1e-6, 0.01, 0.2, 0.5, 0.77, 0.99, 1 - 1e-6)]
    assert levels == sorted(levels) and 0 < levels[0] and levels[-1] < 1
    assert density.cdf(0) == 0 and density.cdf(1) == 1
    assert [density.cdf(density.quantile(q)) for q in (0.01, 0.2, 0.5, 0.77)] == pytest.approx([0.01, 0.2, 0.5, 0.77])


@pytest.mark.parametrize(
    ("density", "q", "level"),
    [
        (Mode(0), 0.3, 0.3),
        (Mode(1.29), 0.25, 0.25 - 1.29 * (math.sin(math.pi / 8) ** 2 - 0.25)),  # 0.3836
        (Mode(STEEPEST), 0.5, 0.5),
        (CosMap(), 0.5, 0.5),
        (CosMap(), 1 / 3, 1 - 1 / (math.tan(math.pi / 6) + 1)),
        (Beta(1, 1), 0.3, 0.3),
        (Beta(3, 1), 0.2, 0.2 ** (1 / 3)),  # x^alpha
        (Beta(1, 3), 0.2, 1 - 0.8 ** (1 / 3)),
        (Beta(2, 2), 0.104, 0.2),  # 3 x^2 - 2 x^3
        (Beta(0.5, 0.5), 0.25, math.sin(math.pi / 8) ** 2),  # the arcsine distribution
    ],
    ids=str,
)
def test_quantiles_by_hand(density: Density, q: float, level: float) -> None:
    assert density.quantile(q) == pytest.approx(level, rel=1e-9)


def test_beta_draws_are_those_of_numpy() -> None:
    drawn = np.sort(np.random.default_rng(0).beta(3, 1.5, 20_000))
    ours = [Beta(3, 1.5).quantile(q) for q in (0.05, 0.3, 0.5, 0.9)]
    assert ours == pytest.approx([drawn[int(q * 20_000)] for q in (0.05, 0.3, 0.5, 0.9)], abs=0.01)


def test_the_density_of_cosmap_is_the_papers() -> None:
    """2 / (pi - 2 pi x + 2 pi x^2), arXiv:2403.03206 eq. 21."""
    for x in (0.1, 0.5, 0.8):
        slope = (CosMap().cdf(x + 1e-6) - CosMap().cdf(x - 1e-6)) / 2e-6
        assert slope == pytest.approx(2 / (math.pi - 2 * math.pi * x + 2 * math.pi * x * x), rel=1e-6)


@pytest.mark.parametrize("density", DENSITIES, ids=str)
def test_a_part_keeps_the_shape_of_the_density(density: Density) -> None:
    """Its quantiles are the whole density's, of the levels that lie within."""
    first, end = (math.ceil(400 * density.cdf(level) - 0.5) for level in (0.2, 0.7))  # of 400 levels, those within
    for number in range(0, end - first, 8):
        level = density.quantile((first + number + 0.5) / 400)
        assert between(density, (number + 0.5) / (end - first), 0.2, 0.7) == pytest.approx(level, abs=5e-3)


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.sigma)
def test_draws_follow_the_quantiles_within_the_range_and_with_the_shift(flow: Flow) -> None:
    flow = flow.model_copy(update={"min_sigma": 0.3, "max_sigma": 0.9})
    source, count = np.random.default_rng(8), 200 if flow.sigma == "beta" else 1200  # its inverse is dear
    drawn = np.sort([flow.draw(source, 2.0) for _ in range(count)])
    assert 0.3 <= drawn[0] and drawn[-1] <= 0.9
    for q in (0.05, 0.25, 0.5, 0.9):
        assert flow.quantile(q, 2.0) == pytest.approx(drawn[int(q * count)], abs=0.04)


def test_a_range_is_of_shifted_levels() -> None:
    """Uniform before the shift: the middle of the range is the shifted middle of the unshifted ends."""
    flow = Flow(sigma="uniform", min_sigma=0.5, max_sigma=0.75)
    assert flow.quantile(0.5, 3.0) == pytest.approx(shift_sigma((0.25 + 0.5) / 2, 3.0))


@pytest.mark.parametrize(
    ("objective", "problem"),
    [
        ({"min_sigma": 0.6, "max_sigma": 0.5}, "objective.min_sigma: 0.6 is not below .*max_sigma 0.5. Use less"),
        ({"mode_scale": 0.5}, "objective.mode_scale: 0.5 changes nothing with .* logit_normal. .*sigma mode"),
        ({"sigma": "mode", "beta_alpha": 3.0}, "objective.beta_alpha: 3 changes nothing with .* mode. .*sigma beta"),
        ({"logit_std": 0.1, "min_sigma": 0.9}, "objective.min_sigma: less than 1e-06 of .* between 0.9 and 1. Widen"),
        ({"sigma": "mode", "mode_scale": 1.8}, "objective.mode_scale"),
        ({"huber": {"c": 0.0}}, "objective.huber.c"),
    ],
)
def test_what_cannot_be_drawn_is_refused(objective: dict, problem: str, tiny_config: dict) -> None:
    with pytest.raises(ConfigError, match=problem):
        validate(tiny_config | {"objective": objective}, "test")


def test_huber_is_quadratic_for_small_errors_and_linear_for_large_ones() -> None:
    """2 c (sqrt(e^2 + c^2) - c); in fp32 that difference would lose all digits of the first."""
    found = errors(torch.tensor([1e-5, 0.3, 100.0]), torch.zeros(3), 0.1)
    expected = [2 * 0.1 * (math.sqrt(error**2 + 0.01) - 0.1) for error in (0.3, 100.0)]
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([1e-10, *expected], rel=1e-5)
    torch.testing.assert_close(errors(torch.tensor([3.0]), torch.tensor([1.0]), None), torch.tensor([4.0]))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.1, 0.1, 0.1]),
        ("exponential", [1.0, math.sqrt(0.1), 0.1]),  # exp(ln(c) sigma)
        ("snr", [1.0, 0.9 * 0.25 + 0.1, 0.1]),  # (1 - c) / (1 + sigma / (1 - sigma))^2 + c
    ],
)
def test_schedules_of_huber_by_hand(schedule: str, expected: list[float]) -> None:
    level, error = torch.tensor([0.0, 0.5, 1.0]), 0.7
    process = FlowProcess(Huber(c=0.1, schedule=schedule))
    for row, c in enumerate(expected):
        one = torch.full((1, 1, 1, 1), error), torch.zeros(1, 1, 1, 1), level[row : row + 1]
        assert process.loss(*one).item() == pytest.approx(2 * c * (math.sqrt(error**2 + c * c) - c), rel=1e-5)
        assert process.loss(*one, torch.full((1, 1, 1, 1), 3.0)).item() == pytest.approx(3 * process.loss(*one).item())


def test_the_snr_schedule_of_ddpm_is_kohyas() -> None:
    """(1 - c) / (1 + sqrt((1 - abar) / abar))^2 + c; its exponential one is exp(ln(c) t / 1000)."""
    schedule = {"beta_schedule": "linear"}
    abar = math.prod(1 - (0.0001 + (0.02 - 0.0001) * t / 999) for t in range(301))
    snr = 0.8 / (1 + math.sqrt((1 - abar) / abar)) ** 2 + 0.2
    for kind, c in (("snr", snr), ("exponential", 0.2**0.3)):
        process = Ddpm(huber=Huber(c=0.2, schedule=kind)).process(lambda: schedule)
        loss = process.loss(torch.full((1, 1, 1, 1), 0.5), torch.zeros(1, 1, 1, 1), torch.tensor([300.0]))
        assert loss.item() == pytest.approx(2 * c * (math.sqrt(0.25 + c * c) - c), rel=1e-4)
