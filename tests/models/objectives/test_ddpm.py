"""The ddpm objective against the independent reference and diffusers' schedulers."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr
from reference import ddpm as reference
from tiny_sd15 import SD15, SD21
from torch import Tensor

from simpletune.config.load import validate, with_default_tags
from simpletune.config.resolve import require_model_rules
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.fake import fake_tensors
from simpletune.models.objectives.ddpm import Ddpm, rescale_to_zero_snr, schedule_of
from simpletune.system.options import ConfigError
from simpletune.system.rng import stream

LINEAR = {"num_train_timesteps": 1000, "beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02}
LEVELS = [0, 1, 40, 317, 500, 998, 999]
CASES = {
    "epsilon": (Ddpm(), SD15),
    "v": (Ddpm(), SD21),
    "v asked for": (Ddpm(prediction="v"), SD15),
    "epsilon asked for": (Ddpm(prediction="epsilon"), SD21),
    "linear": (Ddpm(), LINEAR),
    "zero SNR": (Ddpm(zero_terminal_snr=True), SD21),
    "zero SNR in the model": (Ddpm(), SD21 | {"rescale_betas_zero_snr": True}),
    "min-SNR": (Ddpm(min_snr_gamma=5.0), SD15),
    "min-SNR, v": (Ddpm(min_snr_gamma=5.0), SD21),
    "min-SNR, v, zero SNR": (Ddpm(min_snr_gamma=1.5, zero_terminal_snr=True), SD21),
}


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z_0, noise, prediction [7, 4, 2, 3] and the levels [7]."""
    generator = torch.Generator().manual_seed(0)
    z_0, noise, prediction = (torch.randn(len(LEVELS), 4, 2, 3, generator=generator) for _ in range(3))
    return z_0, noise, prediction, torch.tensor(LEVELS, dtype=torch.float32)


def close(actual: Tensor, wanted: Any, atol: float = 1e-6) -> None:
    wanted = torch.as_tensor(np.asarray(wanted))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=1e-6, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str) -> None:
    objective, config = CASES[case]
    z_0, noise, prediction, level = batch()
    zero = objective.zero_terminal_snr or "rescale_betas_zero_snr" in config
    told = config.get("prediction_type") == "v_prediction"
    v = told if objective.prediction == "auto" else objective.prediction == "v"
    wanted = reference.Ddpm(reference.angles(config, zero)[LEVELS], v, objective.min_snr_gamma)
    process = objective.process(lambda: config)
    target = process.target(z_0, noise, level)
    close(process.noised(z_0, noise, level), wanted.noised(z_0.numpy(), noise.numpy()))
    close(target, wanted.target(z_0.numpy(), noise.numpy()))
    close(process.loss(prediction, target, level), wanted.loss(prediction.numpy(), target.numpy()))
    assert process.time(level).tolist() == LEVELS and process.time(level).dtype == torch.int64


@pytest.mark.parametrize("case", CASES)
def test_equals_diffusers(case: str) -> None:
    """Their tables are cumulative products in fp32, which are off by up to 2e-6."""
    objective, config = CASES[case]
    z_0, noise, prediction, level = batch()
    theirs = DDPMScheduler.from_config(objective.scheduler_config(config))
    process, t = objective.process(lambda: config), level.long()
    close(process.noised(z_0, noise, level), theirs.add_noise(z_0, noise, t), 1e-5)
    v = theirs.config.prediction_type == "v_prediction"
    target = theirs.get_velocity(z_0, noise, t) if v else noise
    close(process.target(z_0, noise, level), target, 1e-5)
    snr, gamma = compute_snr(theirs, t), objective.min_snr_gamma
    weights = torch.ones(len(t)) if gamma is None else snr.clamp(max=gamma) / (snr + 1 if v else snr)
    rows = (prediction - target).square().mean(dim=(1, 2, 3))
    close(process.loss(prediction, target, level), (weights * rows).mean(), 1e-5)


def test_at_zero_snr_z_t_is_the_noise_and_v_is_minus_z_0() -> None:
    z_0, noise, _, _ = batch()
    process, last = Ddpm(zero_terminal_snr=True).process(lambda: SD21), torch.full((len(z_0),), 999.0)
    assert torch.equal(process.noised(z_0, noise, last), noise)
    assert torch.equal(process.target(z_0, noise, last), -z_0)


def test_known_values_of_stable_diffusion() -> None:
    """The last SNR of SD 1.5 is 0.0047 (arXiv:2305.08891, table 1: SNR 0.004682, sqrt(abar) 0.068265)."""
    alphas_bar = schedule_of(SD15)
    assert alphas_bar[0] == pytest.approx(1 - 0.00085, rel=1e-12)
    assert math.sqrt(alphas_bar[-1]) == pytest.approx(0.068265, abs=5e-7)
    assert alphas_bar[-1] / (1 - alphas_bar[-1]) == pytest.approx(0.004682, abs=5e-7)
    rescaled = rescale_to_zero_snr(alphas_bar)
    assert rescaled[-1] == 0.0 and rescaled[0] == pytest.approx(alphas_bar[0], rel=1e-12)
    assert all(a > b for a, b in zip(rescaled, rescaled[1:], strict=False))


def test_a_scheduler_config_without_fields_means_diffusers_defaults() -> None:
    close(torch.tensor(schedule_of({})), DDPMScheduler().alphas_cumprod)
    assert Ddpm().prediction_of({}) == "epsilon"


def test_every_row_has_the_weight_of_its_own_timestep() -> None:
    """Gamma 5 leaves timesteps of SNR below 5 alone with noise prediction, and damps the others to 5 / SNR."""
    process, alphas_bar = Ddpm(min_snr_gamma=5.0).process(lambda: SD15), schedule_of(SD15)
    zero, levels = torch.zeros(2, 1, 1, 2), (100, 900)
    for place in (0, 1):
        error = zero.clone()
        error[place] = 2.0
        abar = alphas_bar[levels[place]]
        loss = process.loss(error, zero, torch.tensor(levels, dtype=torch.float32))
        assert loss.item() == pytest.approx(2.0 * min(1.0, 5 * (1 - abar) / abar), rel=1e-6)
    assert alphas_bar[900] < 5 / 6 < alphas_bar[100]


def test_loss_of_16_bit_predictions_is_in_fp32() -> None:
    near_one = torch.full((1, 1, 10, 100), 1.0078125, dtype=torch.bfloat16)
    for process in (Ddpm().process(lambda: SD15), Ddpm(prediction="v", min_snr_gamma=1e9).process(lambda: SD15)):
        loss = process.loss(near_one, torch.zeros_like(near_one), torch.zeros(1))
        share = 1.0 if not process.v else schedule_of(SD15)[0]  # SNR / (SNR + 1) = abar
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(share * 1.0078125**2, rel=1e-6)


def test_timesteps_are_uniform_over_their_range() -> None:
    source = np.random.default_rng(1)
    drawn = np.array([Ddpm(min_timestep=10, max_timestep=19).draw(source, 1.0) for _ in range(5000)])
    assert np.array_equal(np.unique(drawn), np.arange(10, 20))
    assert np.bincount(drawn.astype(int))[10:].std() < 5 * math.sqrt(500 * 0.9)
    everything = [Ddpm().draw(source, 1.0) for _ in range(20_000)]
    assert min(everything) == 0 and max(everything) == 999 and np.mean(everything) == pytest.approx(499.5, abs=10)


@pytest.mark.parametrize(("low", "high"), [(0, 999), (200, 700), (5, 5)])
def test_quantiles_are_those_of_uniform_timesteps(low: int, high: int) -> None:
    objective, count = Ddpm(min_timestep=low, max_timestep=high), high + 1 - low
    assert [objective.quantile((n + 0.5) / count, 1.0) for n in range(count)] == list(range(low, high + 1))
    assert (objective.quantile(0.0, 1.0), objective.quantile(1 - 1e-12, 1.0)) == (low, high)


def test_offset_noise_adds_one_number_a_channel_and_leaves_the_rest() -> None:
    shape, key = (4, 16, 24), (3, "noise", 1, 0, 7)
    plain, offset, larger = (Ddpm(offset_noise=by).noise(stream(*key), shape) for by in (0.0, 0.1, 0.4))
    assert plain.dtype == offset.dtype == np.float32
    assert np.array_equal(plain, stream(*key).standard_normal(shape, dtype="float32"))
    added = offset - plain
    assert np.ptp(added, axis=(1, 2)).max() < 1e-6 and len(np.unique(added[:, 0, 0])) == 4
    np.testing.assert_allclose(larger - plain, 4 * added, atol=2e-6)
    many = [Ddpm(offset_noise=0.1).noise(stream(0, n), (4, 1, 1)) for n in range(2000)]
    assert np.std(many) == pytest.approx(math.sqrt(1.01), rel=0.03)
    means = [Ddpm(offset_noise=0.1).noise(stream(0, n), (4, 32, 32)).mean(axis=(1, 2)) for n in range(500)]
    assert np.std(means) == pytest.approx(math.hypot(0.1, 1 / 32), rel=0.06)


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"min_timestep": 600, "max_timestep": 599}, SD15, "min_timestep: 600 is above objective.max_timestep 599"),
        ({"zero_terminal_snr": True}, SD15, "zero_terminal_snr: true needs v-pr.* The model's prediction_type is ep"),
        ({"zero_terminal_snr": True, "prediction": "epsilon"}, SD21, "zero_terminal_snr: true needs v-pred.*: .* Use"),
        ({"prediction": "epsilon"}, SD21 | {"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr needs v-"),
        ({}, SD15 | {"prediction_type": "sample"}, "prediction_type 'sample'; only epsilon and v_prediction"),
        ({}, SD15 | {"num_train_timesteps": 100}, "num_train_timesteps 100 is not 1000"),
        ({}, SD15 | {"beta_schedule": "squaredcos_cap_v2"}, "'squaredcos_cap_v2' is neither linear nor scaled_linear"),
        ({}, SD15 | {"trained_betas": [0.1]}, "trained_betas are not supported"),
        ({}, SD15 | {"beta_start": 0.0}, "beta_start 0 and beta_end 0.012 do not rise between 0 and 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(changes: dict, config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        Ddpm(**changes).process(lambda: config)
    assert len(refused.value.problems) == 1


def test_reads_nothing_from_the_device_and_copies_its_tables_once() -> None:
    z_0, noise, prediction, level = batch()
    process = Ddpm(min_snr_gamma=5.0).process(lambda: SD21)
    meta = [tensor.to("meta") for tensor in (z_0, noise, prediction, level)]  # a read of these raises
    for z_0, noise, prediction, level in (batch(), meta):
        loss = process.loss(prediction, process.target(z_0, noise, level), level)
        assert process.noised(z_0, noise, level).shape == z_0.shape and loss.shape == ()
    tables = dict(process._tables)
    process.noised(*meta[:2], meta[3])
    assert tables.keys() == {torch.device("cpu"), torch.device("meta")}
    assert all(process._tables[device] is table for device, table in tables.items())
    with fake_tensors():
        fake = Ddpm(min_snr_gamma=5.0).process(lambda: SD21)
        one = torch.zeros(2, 4, 8, 8)
        assert fake.loss(one, fake.target(one, one, torch.zeros(2)), torch.zeros(2)).shape == ()


def test_a_configuration_is_checked_against_the_models_schedule(tiny_config: dict) -> None:
    """Of a model whose scheduler config names no prediction_type, which means epsilon."""
    data = copy.deepcopy(tiny_config)
    data["objective"] = {"name": "ddpm", "zero_terminal_snr": True, "min_timestep": 7, "max_timestep": 6}
    with pytest.raises(ConfigError) as refused:
        validate(data, "ddpm")
    found = {problem.path: problem.message for problem in refused.value.problems}
    assert "7 is above objective.max_timestep 6" in found["objective.min_timestep"]
    assert "The model's prediction_type is epsilon" in found["objective.zero_terminal_snr"]
    with pytest.raises(ConfigError, match="The model's prediction_type is epsilon"):
        require_model_rules(TrainConfig.model_validate_json(json.dumps(with_default_tags(TrainConfig, data))))
