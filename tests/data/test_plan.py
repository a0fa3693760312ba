"""The plan as a function of seed and step: who appears when, at which noise level, under which caption."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from plans import SIZES, make_plan, some_pictures

from simpletune.data.plan import Plan
from simpletune.data.samples import Crop, SampleDraw
from simpletune.data.storage.cache import crop_key
from simpletune.models.objectives.flow import Flow


def names(draws: list[SampleDraw]) -> list[str]:
    return [draw.view.picture.name for draw in draws]


def samples(draws: list[SampleDraw]) -> list[SampleDraw]:
    """Without what only fills up."""
    return [draw for draw in draws if draw.weight]


def first_draws(plan: Plan, steps: int) -> list[SampleDraw]:
    return [draw for step in range(steps) for draw in plan.micro_batch(step, 0)]


# Order


def test_the_plan_is_a_function_of_seed_and_step() -> None:
    options = {"accumulation": 2, "crop": "random", "flip": True, "caption_dropout": 0.5, "variants": 3}
    one, two, other = make_plan(**options), make_plan(**options), make_plan(**options, seed=8)
    steps = [(step, micro) for step in range(12) for micro in range(2)]
    forward = {key: one.micro_batch(*key) for key in steps}
    backward = {key: two.micro_batch(*key) for key in reversed(steps)}
    assert forward == backward
    assert forward != {key: other.micro_batch(*key) for key in steps}


def test_the_order_of_the_pictures_given_does_not_matter() -> None:
    shuffled = make_plan(list(reversed(some_pictures())))
    assert first_draws(make_plan(), 10) == first_draws(shuffled, 10)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7])
def test_every_sample_counts_once_an_epoch_and_fillers_keep_the_shape(batch_size: int) -> None:
    plan = make_plan(batch_size=batch_size)
    length = sum(math.ceil(size / batch_size) for size in [5, 3, 1])
    for number in range(3):
        drawn = [plan.micro_batch(step, 0) for step in range(length * number, length * (number + 1))]
        assert sorted(name for batch in drawn for name in names(samples(batch))) == [p.name for p in some_pictures()]
        assert {len(batch) for batch in drawn} == {batch_size}
    assert plan.fillers == length * batch_size - len(SIZES)


def test_micro_batches_come_from_one_bucket() -> None:
    plan = make_plan(batch_size=2, accumulation=3)
    batches = [plan.micro_batch(step, micro) for step in range(10) for micro in range(3)]
    assert all(len(batch) == 2 for batch in batches)
    assert all(len({draw.view.bucket for draw in batch}) == 1 for batch in batches)
    assert {draw.view.bucket for batch in batches for draw in batch} == {(64, 64), (48, 80), (80, 48)}


def test_passes_differ_from_each_other() -> None:
    plan = make_plan(batch_size=1)
    orders = [names(first_draws(plan, 27))[start : start + 9] for start in (0, 9, 18)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


def test_each_pass_pairs_a_bucket_anew_and_orders_the_buckets_anew() -> None:
    """The first shows in who is paired with whom, the second where each bucket has one picture."""
    one_bucket = make_plan(some_pictures([(64, 64)] * 8))
    pairs = [{frozenset(names(one_bucket.micro_batch(4 * n + k, 0))) for k in range(4)} for n in range(3)]
    assert pairs[0] != pairs[1] != pairs[2]
    many = make_plan(some_pictures([(64, 64), (48, 80), (80, 48), (32, 96), (96, 32), (32, 128), (128, 32)]))
    buckets = [many.micro_batch(step, 0)[0].view.bucket for step in range(21)]
    assert len(set(buckets[:7])) == 7
    assert buckets[:7] != buckets[7:14] != buckets[14:]


def test_accumulation_shares_out_the_same_order() -> None:
    """Micro-batch n of an epoch: step by step, within it micro by micro."""
    plain = [names(samples(make_plan().micro_batch(number, 0))) for number in range(24)]
    split = make_plan(accumulation=4)
    union = [names(samples(split.micro_batch(s, m))) for s in range(8) for m in range(4)]
    assert [found for found in union if found] == plain
    assert [n for n, found in enumerate(union) if not found] == [6, 7, 14, 15, 22, 23, 30, 31]


def test_the_keys_name_step_micro_batch_and_sample() -> None:
    plan = make_plan(accumulation=2)
    for step in range(6):
        both = [*plan.micro_batch(step, 0), *plan.micro_batch(step, 1)]
        keys = [("noise", step, row // 2, 4 * step + row) for row in range(4)]
        assert all(key == draw.noise_key for key, draw in zip(keys, both, strict=True) if draw.weight)


def test_areas_are_those_of_the_micro_batches_in_their_order() -> None:
    plan = make_plan(accumulation=4)
    for step in range(4):
        buckets = [plan.micro_batch(step, micro)[0].view.bucket for micro in range(len(plan.micros(step)))]
        assert plan.areas(step) == [width * height for width, height in buckets]
    assert len(plan.micros(1)) == 2 and len({area for step in range(2) for area in plan.areas(step)}) > 1


def test_no_two_draws_share_their_noise() -> None:
    plan = make_plan(accumulation=6, batch_size=2)
    micros = [plan.micro_batch(s, m) for s in range(5) for m in range(6)]
    keys = [draw.noise_key for micro in micros for draw in samples(micro)]
    assert len(set(keys)) == len(keys) == 5 * len(SIZES)


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "repeats", "steps"),
    [(1, 1, 1, 9), (2, 1, 1, 6), (2, 2, 1, 3), (1, 9, 1, 1), (4, 1, 3, 8), (50, 1, 1, 3)],
)
def test_an_epoch_has_the_steps_that_its_micro_batches_need_rounded_up(
    batch_size: int, accumulation: int, repeats: int, steps: int
) -> None:
    plan = make_plan(batch_size=batch_size, accumulation=accumulation, repeats=repeats)
    assert plan.steps_per_epoch == steps


def test_repeats_make_each_picture_appear_that_often_a_pass() -> None:
    plan = make_plan(repeats=3, batch_size=1)
    assert Counter(names(first_draws(plan, 27))) == dict.fromkeys([p.name for p in some_pictures()], 3)


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="needs at least one sample"):
        make_plan([])


# Captions and noise levels


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.6, 1.0])
def test_captions_are_dropped_at_their_rate(rate: float) -> None:
    plan = make_plan(caption_dropout=rate)
    draws = first_draws(plan, 2000)
    dropped = np.array([draw.caption == "" for draw in draws])
    assert dropped.mean() == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / len(draws)))
    kept = [draw for draw in draws if draw.caption]
    assert all(draw.caption == draw.view.picture.caption for draw in kept)


def test_captions_to_encode_are_each_once_and_the_empty_one_only_with_dropout() -> None:
    pictures = [replace(picture, caption=f"caption {number % 2}") for number, picture in enumerate(some_pictures())]
    assert make_plan(pictures, repeats=2).captions() == ["caption 0", "caption 1"]
    assert make_plan(pictures, caption_dropout=0.01).captions() == ["caption 0", "caption 1", ""]


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_sigmas_of_the_plan_are_shifted_logit_normal(shift: float) -> None:
    draws = first_draws(make_plan(objective=Flow(shift=shift)), 2000)
    sigma = np.array([draw.level for draw in draws])
    logits = np.log(sigma / (1 - sigma))
    assert logits.mean() == pytest.approx(math.log(shift), abs=0.07)
    assert logits.std() == pytest.approx(1.0, abs=0.05)


def test_sigmas_of_the_plan_are_uniform_when_asked() -> None:
    objective = Flow(sigma="uniform", shift=1.0)
    sigma = np.array([draw.level for draw in first_draws(make_plan(objective=objective), 2000)])
    assert sigma.mean() == pytest.approx(0.5, abs=0.02)
    assert sigma.var() == pytest.approx(1 / 12, rel=0.06)


@pytest.mark.parametrize(("resolution", "shift"), [(64, 1.0), (512, 1.5), (1024, 3.0)])
def test_auto_shift_follows_the_resolution(resolution: int, shift: float) -> None:
    """Draws of the same key: sigma / (1 - sigma) is multiplied by the shift."""
    assert make_plan(resolution=resolution).shifts == [shift]
    here, at_64 = make_plan(resolution=resolution, aspect="square"), make_plan(aspect="square")
    for plain, shifted in zip(first_draws(at_64, 20), first_draws(here, 20), strict=True):
        assert shifted.level / (1 - shifted.level) == pytest.approx(shift * plain.level / (1 - plain.level))


# Views


def test_without_variety_a_picture_has_one_centred_view() -> None:
    plan = make_plan(variants=5)
    assert {(view.offset, view.flip) for view in plan.views()} == {((0.5, 0.5), False)}
    assert len(plan.views()) == len(SIZES)


def test_variants_are_taken_in_turn() -> None:
    picture = some_pictures()[:1]
    plan = make_plan(picture, crop="random", variants=3, batch_size=1)
    (sample,) = plan.samples
    turns = [draw.view for draw in first_draws(plan, 7)]
    assert turns == [plan.view(sample, number % 3) for number in range(7)]
    assert len(set(turns)) == 3
    assert set(turns) == set(plan.views())


def test_repeats_take_the_variants_in_turn_too() -> None:
    plan = make_plan(some_pictures()[:1], crop="random", variants=4, repeats=2, batch_size=1)
    for number, pair in enumerate([(0, 1), (2, 3), (0, 1)]):
        drawn = [plan.micro_batch(2 * number + row, 0)[0].view for row in range(2)]
        assert set(drawn) == {plan.view(plan.samples[0], variant) for variant in pair}


def test_crops_and_flips_are_spread_evenly() -> None:
    views = make_plan(some_pictures([(100, 100)] * 600), crop="random", flip=True).views()
    assert np.mean([view.flip for view in views]) == pytest.approx(0.5, abs=0.08)
    offsets = np.array([view.offset for view in views])
    np.testing.assert_allclose(offsets.mean(axis=0), 0.5, atol=0.05)
    np.testing.assert_allclose(offsets.var(axis=0), 1 / 12, rtol=0.15)
    assert not any(view.flip for view in make_plan(crop="random").views())


def test_a_view_depends_on_the_bytes_not_on_the_name() -> None:
    picture = some_pictures()[0]
    renamed, changed = replace(picture, name="zzz.png"), replace(picture, digest="f" * 64)
    offsets = [make_plan([each], crop="random").views()[0].offset for each in (picture, renamed, changed)]
    assert offsets[0] == offsets[1] != offsets[2]


def test_the_cache_holds_every_view_and_caption_that_the_run_asks_for() -> None:
    plan = make_plan(crop="random", flip=True, variants=3, repeats=2, caption_dropout=0.3)
    draws = [*first_draws(plan, 60), *plan.evaluation(20)]
    assert {draw.view for draw in draws} == set(plan.views())
    assert {draw.caption for draw in draws} == set(plan.captions())


# Evaluation and the manifest


def test_evaluation_draws_are_fixed_whatever_the_batches_are() -> None:
    one = make_plan(caption_dropout=1.0, batch_size=1).evaluation(16)
    assert one == make_plan(batch_size=4, accumulation=2).evaluation(16)
    assert all(draw.caption == draw.view.picture.caption for draw in one)
    assert [draw.noise_key for draw in one] == [("evaluation-noise", index) for index in range(16)]


@pytest.mark.parametrize("count", [1, 4, 9, 20])
def test_evaluation_covers_samples_and_noise_levels_evenly(count: int) -> None:
    """Uniform density without shift: the levels are (k + 1/2) / count."""
    draws = make_plan(objective=Flow(sigma="uniform", shift=1.0)).evaluation(count)
    levels = sorted(draw.level for draw in draws)
    assert levels == pytest.approx([(k + 0.5) / count for k in range(count)])
    seen = Counter(names(draws))
    assert len(seen) == min(count, len(SIZES))
    assert max(seen.values()) == math.ceil(count / len(SIZES))


def test_a_short_evaluation_is_spread_over_all_samples() -> None:
    assert names(make_plan().evaluation(3)) == ["000.png", "003.png", "006.png"]


def test_evaluation_noise_levels_do_not_follow_the_samples() -> None:
    draws = make_plan(objective=Flow(sigma="uniform", shift=1.0)).evaluation(200)
    assert abs(np.corrcoef(range(200), [draw.level for draw in draws])[0, 1]) < 0.2


@pytest.mark.parametrize(
    "change",
    [{"caption": "another"}, {"digest": "f" * 64}, {"name": "other.png"}, {"size": (48, 80)}],
    ids=["caption", "picture", "name", "bucket"],
)
def test_the_manifest_pins_what_the_order_depends_on(change: dict) -> None:
    pictures = some_pictures()
    original = make_plan(pictures).manifest()
    assert original == make_plan(list(reversed(pictures))).manifest()
    changed = [replace(pictures[0], **change), *pictures[1:]]
    assert make_plan(changed).manifest() != original


def test_the_manifest_notices_repeats_and_buckets_of_another_size() -> None:
    plain, repeated, larger = (make_plan(**o).manifest() for o in ({}, {"repeats": 2}, {"resolution": 96}))
    assert plain != repeated and plain != larger and repeated != larger
    assert make_plan(seed=8, batch_size=3).manifest() == plain


def test_latents_of_different_views_are_never_confused() -> None:
    first, other = some_pictures([(100, 100)] * 2)
    view = Crop(first, (64, 64), (0.5, 0.5), False)
    changes = {"picture": other, "bucket": (64, 48), "offset": (0.5, 0.25), "flip": True}
    assert changes.keys() == {field.name for field in fields(Crop)}
    keys = [crop_key(view), *(crop_key(replace(view, **{name: value})) for name, value in changes.items())]
    assert len(set(keys)) == len(keys)


def test_a_micro_batch_is_drawn_without_listing_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an accumulation of hundreds, listing them for each took longer than drawing."""
    plan = make_plan(batch_size=2, accumulation=3)
    expected = [plan.micro_batch(0, place) for place in range(3)]
    monkeypatch.setattr(type(plan), "micros", lambda self, step: pytest.fail("it lists all"))
    assert [plan.micro_batch(0, place) for place in range(3)] == expected
