"""The scores of an evaluation against the independent reference, known answers, and their intervals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reference import scores as reference

from simpletune.commands.evaluate import scores
from simpletune.commands.evaluate.measure import means_of
from simpletune.commands.evaluate.scores import jackknife, mean_over_prompts

SIZES = [(2, 2, 3), (7, 5, 16), (12, 3, 40)]  # generated, real, width


def drawn(count: int, width: int, seed: int, middle: float = 0.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(middle, 1.0, (count, width))


@pytest.mark.parametrize(("n", "m", "d"), SIZES)
def test_scores_equal_the_reference(n: int, m: int, d: int) -> None:
    generated, real, prompts = drawn(n, d, 1), drawn(m, d, 2, 0.3), drawn(n, d, 3, 0.3)
    close = {"rel": 1e-12, "abs": 1e-12}
    for row, value in enumerate(scores.subject_fidelity(generated, real)):
        assert value == pytest.approx(reference.mean_of_pairs(generated[row : row + 1], real), **close)
        nearest = max(reference.cosine(generated[row], each) for each in real)
        assert scores.nearest_similarity(generated, real)[row] == pytest.approx(nearest, **close)
    subject = reference.mean_of_pairs(generated, real)
    assert scores.subject_fidelity(generated, real).mean() == pytest.approx(subject, **close)
    matches = scores.prompt_fidelity(generated, prompts).mean()
    assert matches == pytest.approx(reference.mean_of_matches(generated, prompts), **close)
    assert scores.diversity(generated) == pytest.approx(reference.diversity(generated), **close)
    assert scores.find_copies(generated, real).mean() == reference.share_copied(generated, real)
    assert scores.kid(generated, real) == pytest.approx(reference.kid(generated, real), **close)
    assert scores.cmmd(generated, real) == pytest.approx(reference.cmmd(generated, real), rel=1e-9, abs=1e-9)


def test_known_answers() -> None:
    real, more, noise = drawn(200, 24, 5, 0.5), drawn(200, 24, 6, 0.5), drawn(200, 24, 7, -0.5)
    assert scores.cmmd(real, real) == pytest.approx(0.0, abs=1e-9)
    assert scores.mmd(real, real, scores.cubic, unbiased=False) == pytest.approx(0.0, abs=1e-9)
    assert scores.kid(real, real) < 0.0  # without the pairs of a picture with itself, equal sets are below 0
    for distance in (scores.kid, scores.cmmd):
        assert distance(real, noise) > 20 * abs(distance(real, more))
    ones = np.ones((3, 8))
    assert scores.subject_fidelity(ones, 2 * ones) == pytest.approx(1.0)
    assert scores.diversity(ones) == pytest.approx(0.0)
    assert scores.diversity(np.eye(4)) == pytest.approx(1.0)
    prompts = drawn(20, 12, 8)
    images = prompts + 0.5 * drawn(20, 12, 9)
    assert scores.prompt_fidelity(images, prompts).mean() > 0.8
    assert abs(scores.prompt_fidelity(images, np.roll(prompts, 1, axis=0)).mean()) < 0.3, "shuffled prompts fit less"


def test_kid_is_unbiased_on_small_sets() -> None:
    found = [scores.kid(drawn(6, 10, seed), drawn(5, 10, 1000 + seed)) for seed in range(400)]
    error = np.std(found, ddof=1) / np.sqrt(len(found))
    assert abs(np.mean(found)) < 4 * error
    biased = [scores.mmd(drawn(6, 10, s), drawn(5, 10, 1000 + s), scores.cubic, unbiased=False) for s in range(400)]
    assert np.mean(biased) > 20 * error


def test_copies_are_nearer_than_the_data_is_to_itself() -> None:
    real = drawn(6, 60, 10)
    generated = np.concatenate([real[:2] + 1e-3, drawn(3, 60, 11)])
    assert scores.find_copies(generated, real).tolist() == [1, 1, 0, 0, 0]
    real[1] = real[0]  # the data repeats itself: nothing is nearer than that
    assert scores.find_copies(generated[2:], real).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scores.diversity(np.ones((1, 3))), "1 picture: at least 2"),
        (lambda: scores.find_copies(np.ones((2, 3)), np.ones((1, 3))), "1 picture: at least 2"),
        (lambda: scores.kid(np.ones((1, 3)), np.ones((5, 3))), "sets of 1 and 5: at least 2"),
        (lambda: scores.unit(np.zeros((2, 3))), "2 of 2 embeddings are zero"),
        (lambda: mean_over_prompts([]), "no prompts"),
    ],
)
def test_what_has_no_value_is_an_error(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("prompts", [5, 6, 8, 12, 25])
@pytest.mark.parametrize("shape", ["normal", "uniform", "skewed"])
def test_an_interval_covers_the_mean_as_often_as_it_says(prompts: int, shape: str) -> None:
    """93% to 97% of 4,000 simulated evaluations; scores are cosines, whose spread over prompts has no long tail."""
    draw = np.random.default_rng([prompts, len(shape)])
    size = (4000, prompts)
    values = {"normal": draw.normal(0.7, 0.1, size), "uniform": draw.uniform(0.5, 0.9, size)}
    values["skewed"] = draw.beta(6, 3, size)
    middle = {"normal": 0.7, "uniform": 0.7, "skewed": 6 / 9}[shape]
    found = [mean_over_prompts(each) for each in values[shape]]
    np.testing.assert_allclose([one.error for one in found], values[shape].std(1, ddof=1) / np.sqrt(prompts), rtol=1e-6)
    assert 0.93 <= np.mean([one.low <= middle <= one.high for one in found]) <= 0.97


def test_the_jackknife_of_a_mean_is_its_own_interval() -> None:
    for seed in range(20):
        values = np.random.default_rng(seed).normal(2.0, 1.0, 24)
        one = mean_over_prompts(values)
        other = jackknife(lambda chosen, values=values: float(values[list(chosen)].mean()), len(values))
        assert (other.low, other.high, other.error) == pytest.approx((one.low, one.high, one.error), rel=1e-9)


@pytest.mark.parametrize(("freedom", "value"), [(4, 2.776), (5, 2.571), (9, 2.262), (24, 2.064), (120, 1.980)])
def test_quantiles_of_student_s_t(freedom: int, value: float) -> None:
    """The printed tables' 97.5% points."""
    assert scores.t_quantile(freedom) == pytest.approx(value, abs=1.2e-3)


def test_differences_are_paired_and_few_prompts_have_no_interval() -> None:
    base = drawn(1, 12, 12)[0]
    better = mean_over_prompts(base + 0.1 - base)  # paired: the spread of prompts cancels
    assert (better.low, better.high) == (pytest.approx(0.1), pytest.approx(0.1))
    assert mean_over_prompts(base).high - mean_over_prompts(base).low > 0.5
    assert mean_over_prompts([0.5]).as_json() == {"value": 0.5, "low": None, "high": None, "error": None}
    few = mean_over_prompts([0.5, 0.6, 0.7, 0.8])
    assert (few.low, few.high) == (None, None) and few.error > 0
    assert jackknife(lambda chosen: float(len(chosen)), 4).low is None


def test_sets_equal_torchmetrics() -> None:
    """A public implementation; it is no dependency, and its extras ask for older libraries than ours."""
    pytest.importorskip("torchmetrics", reason="pip install --no-deps torchmetrics lightning-utilities to compare")
    theirs = pytest.importorskip("torchmetrics.image.kid")
    import torch

    generated, real = drawn(9, 16, 1), drawn(9, 16, 2, 0.4)  # it takes sets of one size
    kid = theirs.poly_mmd(torch.from_numpy(generated), torch.from_numpy(real)).item()
    assert scores.kid(generated, real) == pytest.approx(kid, rel=1e-9)


@pytest.mark.parametrize("real", [1, 2])
def test_copying_needs_two_training_pictures(real: int) -> None:
    shots: Any = [SimpleNamespace(prompt=prompt, of_class=False) for prompt in (0, 1)]
    plan: Any = SimpleNamespace(shots=shots, prompts=SimpleNamespace(prompts=[SimpleNamespace(has_token=True)] * 2))
    one: Any = SimpleNamespace(real=np.eye(3)[:real], prompts=None)
    found = means_of(plan, one, np.eye(3)[1:])
    assert found["nearest"][0] == {0: float(real == 2), 1: 0.0}
    assert ("copying" in found) is (real == 2)
