"""The plan as a function of seed and step: who appears when, at which noise level, under which caption."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import SIZES, make_plan, some_images

from simpletune.data.plan import GlobalBatch, Plan, steps_in_epoch
from simpletune.data.samples import Crop, PlannedSample, samples_by_bucket
from simpletune.data.sources.augmentation import RANGES, Augmentation
from simpletune.data.sources.source import Hole, SourceImage
from simpletune.data.storage.cache import LATENTS_VERSION, crop_key
from simpletune.models.objectives.flow import Flow


def names(draws: list[PlannedSample]) -> list[str]:
    return [draw.view.image.name for draw in draws]


def first_draws(plan: Plan, steps: int) -> list[PlannedSample]:
    return [draw for step in range(steps) for draw in plan.micro_batch(step, 0)]


BUCKETS = [(64, 64), (48, 80), (80, 48), (96, 32), (32, 96)]
UNIFORM = Flow(sigma="uniform", shift=1.0)

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
    shuffled = make_plan(list(reversed(some_images())))
    assert first_draws(make_plan(), 10) == first_draws(shuffled, 10)


@st.composite
def options_of_plans(draw: st.DrawFn) -> dict:
    """The arguments of ``make_plan``."""
    counts = draw(st.lists(st.integers(0, 7), min_size=5, max_size=5).filter(any))
    small = st.integers(1, 5)
    return {
        "images": some_images([size for size, count in zip(BUCKETS, counts, strict=True) for _ in range(count)]),
        "repeats": draw(st.integers(1, 3)), "batch_size": draw(small), "accumulation": draw(small),
        "seed": draw(st.integers(0, 2**63 - 1)), "caption_dropout": 0.5,
    }  # fmt: skip


def rows_of(plan: Plan, step: int) -> list[list[PlannedSample]]:
    """The draws of each micro-batch of a step, and of those that an epoch's last step lacks."""
    return [plan.micro_batch(step, micro) for micro in range(plan.accumulation)]


@settings(deadline=None, max_examples=60)
@given(options_of_plans(), st.integers(0, 2))
def test_each_sample_counts_once_an_epoch(options: dict, epoch: int) -> None:
    plan = make_plan(**options)
    micros = sum(math.ceil(len(members) / plan.batch_size) for members in plan.buckets.values())
    assert plan.steps_per_epoch == math.ceil(micros / plan.accumulation)
    assert plan.fillers == micros * plan.batch_size - len(plan.samples)
    assert len(plan.samples) == pytest.approx(plan.samples_per_step * plan.steps_per_epoch)
    counted: Counter[str] = Counter()
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        rows = rows_of(plan, step)
        real = [draw for micro in rows for draw in micro if draw.weight == 1]
        assert real, "a step without a sample"
        assert sum(map(len, plan.micros(step))) == len(real)
        assert len({draw.noise_key for draw in real}) == len(real)
        assert {draw.weight for micro in rows for draw in micro} <= {0, 1}
        for micro in rows:
            assert len(micro) == plan.batch_size
            assert len({draw.view.bucket for draw in micro}) == 1
            assert sorted(micro, key=lambda draw: -draw.weight) == micro, "fillers stand last"
        counting = [any(draw.weight for draw in micro) for micro in rows]
        assert len(plan.micros(step)) == sum(counting)
        assert counting == sorted(counting, reverse=True)
        counted.update(draw.view.image.name for draw in real)
    assert counted == {image.name: options["repeats"] for image in options["images"]}


@settings(deadline=None, max_examples=60)
@given(options_of_plans(), st.integers(0, 12))
def test_a_plan_taken_up_at_any_step_goes_on_as_if_it_had_begun_at_the_first(options: dict, start: int) -> None:
    whole, resumed = make_plan(**options), make_plan(**options)
    before = [rows_of(whole, step) for step in range(start + 4)]
    assert [rows_of(resumed, step) for step in range(start, start + 4)] == before[start:]


def test_a_filler_repeats_a_row_of_its_own_micro_batch() -> None:
    """So it needs no other file, and a picture that is not finite spoils no step that it is not part of."""
    plan = make_plan(some_images([(64, 64)] * 3), batch_size=2, accumulation=3)
    for step in range(4):
        first, second, third = rows_of(plan, step)
        assert [draw.weight for micro in (first, second, third) for draw in micro].count(1) == 3
        for micro in (first, second):
            assert all(draw.weight or replace(draw, weight=1) == micro[0] for draw in micro)
        assert third == [replace(draw, weight=0) for draw in second]


def test_passes_differ_from_each_other() -> None:
    plan = make_plan(batch_size=1)
    orders = [names(first_draws(plan, 27))[start : start + 9] for start in (0, 9, 18)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


def test_each_pass_pairs_a_bucket_anew_and_orders_the_buckets_anew() -> None:
    """The first shows in who is paired with whom, the second where each bucket has one picture."""
    one_bucket = make_plan(some_images([(64, 64)] * 8))
    pairs = [{frozenset(names(one_bucket.micro_batch(4 * n + k, 0))) for k in range(4)} for n in range(3)]
    assert pairs[0] != pairs[1] != pairs[2]
    many = make_plan(some_images([*BUCKETS, (32, 128), (128, 32)]))
    buckets = [many.micro_batch(step, 0)[0].view.bucket for step in range(21)]
    assert set(buckets[:7]) == {*BUCKETS, (32, 128), (128, 32)}
    assert buckets[:7] != buckets[7:14] != buckets[14:]


def test_accumulation_shares_out_the_same_order() -> None:
    """Micro-batch n of an epoch: step by step, within it micro by micro."""

    def counted(draws: list[PlannedSample]) -> list[str]:
        return names([draw for draw in draws if draw.weight])

    plain = [counted(make_plan().micro_batch(number, 0)) for number in range(24)]
    union = [counted(draws) for step in range(8) for draws in rows_of(make_plan(accumulation=4), step)]
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


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="needs at least one sample"):
        make_plan([])


# Captions and noise levels


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_captions_are_dropped_at_their_rate(rate: float) -> None:
    draws = first_draws(make_plan(caption_dropout=rate), 2000)
    dropped = np.array([draw.caption == "" for draw in draws])
    assert dropped.mean() == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / len(draws)))
    assert all(draw.caption in ("", draw.view.image.caption) for draw in draws)


def test_captions_to_encode_are_each_once_and_the_empty_one_only_with_dropout() -> None:
    images = [replace(image, caption=f"caption {number % 2}") for number, image in enumerate(some_images())]
    assert make_plan(images, repeats=2).captions() == ["caption 0", "caption 1"]
    assert make_plan(images, caption_dropout=0.01).captions() == ["caption 0", "caption 1", ""]


def test_sigmas_of_the_plan_have_the_distribution_asked_for() -> None:
    for shift in (1.0, 3.0):
        sigma = np.array([draw.level for draw in first_draws(make_plan(objective=Flow(shift=shift)), 2000)])
        logits = np.log(sigma / (1 - sigma))
        assert logits.mean() == pytest.approx(math.log(shift), abs=0.07)
        assert logits.std() == pytest.approx(1.0, abs=0.05)
    sigma = np.array([draw.level for draw in first_draws(make_plan(objective=UNIFORM), 2000)])
    assert sigma.mean() == pytest.approx(0.5, abs=0.02)
    assert sigma.var() == pytest.approx(1 / 12, rel=0.06)


def test_auto_shift_follows_the_resolution() -> None:
    """Draws of the same key: sigma / (1 - sigma) is multiplied by the shift."""
    for resolution, shift in ((64, 1.0), (512, 1.5), (1024, 3.0)):
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
    image = some_images()[:1]
    plan = make_plan(image, crop="random", variants=3, batch_size=1)
    (sample,) = plan.samples
    turns = [draw.view for draw in first_draws(plan, 7)]
    assert turns == [plan.view(sample, number % 3) for number in range(7)]
    assert len(set(turns)) == 3
    assert set(turns) == set(plan.views())


def test_repeats_take_the_variants_in_turn_too() -> None:
    plan = make_plan(some_images()[:1], crop="random", variants=4, repeats=2, batch_size=1)
    for number, pair in enumerate([(0, 1), (2, 3), (0, 1)]):
        drawn = [plan.micro_batch(2 * number + row, 0)[0].view for row in range(2)]
        assert set(drawn) == {plan.view(plan.samples[0], variant) for variant in pair}


def test_crops_and_flips_are_spread_evenly() -> None:
    views = make_plan(some_images([(100, 100)] * 600), crop="random", flip=True).views()
    assert np.mean([view.flip for view in views]) == pytest.approx(0.5, abs=0.08)
    offsets = np.array([view.offset for view in views])
    np.testing.assert_allclose(offsets.mean(axis=0), 0.5, atol=0.05)
    np.testing.assert_allclose(offsets.var(axis=0), 1 / 12, rtol=0.15)
    assert not any(view.flip for view in make_plan(crop="random").views())


def test_a_view_depends_on_the_bytes_not_on_the_name() -> None:
    image = some_images()[0]
    renamed, changed = replace(image, name="zzz.png"), replace(image, digest="f" * 64)
    offsets = [make_plan([each], crop="random").views()[0].offset for each in (image, renamed, changed)]
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
    assert all(draw.caption == draw.view.image.caption for draw in one)
    assert [draw.noise_key for draw in one] == [("evaluation-noise", index) for index in range(16)]


@pytest.mark.parametrize("count", [1, 3, 9, 20])
def test_evaluation_covers_samples_and_noise_levels_evenly(count: int) -> None:
    """Uniform density without shift: the levels are (k + 1/2) / count."""
    draws = make_plan(objective=UNIFORM).evaluation(count)
    levels = sorted(draw.level for draw in draws)
    assert levels == pytest.approx([(k + 0.5) / count for k in range(count)])
    seen = Counter(names(draws))
    assert len(seen) == min(count, len(SIZES))
    assert max(seen.values()) == math.ceil(count / len(SIZES))
    if count == 3:
        assert names(draws) == ["000.png", "003.png", "006.png"], "spread over all samples"


def test_evaluation_noise_levels_do_not_follow_the_samples() -> None:
    draws = make_plan(objective=UNIFORM).evaluation(200)
    assert abs(np.corrcoef(range(200), [draw.level for draw in draws])[0, 1]) < 0.2


def test_the_manifest_pins_what_the_order_depends_on() -> None:
    images = some_images()
    original = make_plan(images).manifest()
    assert original == make_plan(list(reversed(images))).manifest() == make_plan(seed=8, batch_size=3).manifest()
    for change in ({"caption": "another"}, {"digest": "f" * 64}, {"name": "other.png"}, {"size": (48, 80)}):
        assert make_plan([replace(images[0], **change), *images[1:]]).manifest() != original, change
    repeated, larger = (make_plan(**options).manifest() for options in ({"repeats": 2}, {"resolution": 96}))
    assert original != repeated != larger != original


def test_latents_of_different_views_are_never_confused() -> None:
    first, other = some_images([(100, 100)] * 2)
    view = Crop(first, (64, 64), (0.5, 0.5), False)
    changes = {"image": other, "bucket": (64, 48), "offset": (0.5, 0.25), "flip": True}
    changes |= {"augmentation": Augmentation(hue=5), "hole": Hole("strokes", 1)}
    assert changes.keys() == {field.name for field in fields(Crop)}
    keys = [crop_key(view), *(crop_key(replace(view, **{name: value})) for name, value in changes.items())]
    keys += [crop_key(replace(view, augmentation=Augmentation(**{name: 5.0}))) for name in RANGES if name != "hue"]
    assert len(set(keys)) == len(keys)


def test_without_augmentation_older_caches_stay_valid() -> None:
    """The key as it was before there was augmentation."""
    (image,) = some_images([(100, 100)])
    (view,) = make_plan([image], variants=4).views()
    assert crop_key(view) == (
        f'{{"bucket": [64, 64], "flip": false, "offset": [0.5, 0.5], "sha256": "{image.digest}", '
        f'"version": {LATENTS_VERSION}}}'
    )


def test_a_micro_batch_is_drawn_without_listing_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an accumulation of hundreds, listing them for each took longer than drawing."""
    plan = make_plan(batch_size=2, accumulation=3)
    expected = [plan.micro_batch(0, place) for place in range(3)]
    monkeypatch.setattr(type(plan), "micros", lambda self, step: pytest.fail("it lists all"))
    assert [plan.micro_batch(0, place) for place in range(3)] == expected


# Prompts of lengths of their own


def tens(prompts: Sequence[str]) -> list[int]:
    """A number of tokens for each prompt."""
    return [-len(prompt) // 10 * -10 for prompt in prompts]


def of_lengths(count: int = 24) -> list[SourceImage]:
    """Square and upright pictures, whose captions have 1 to 4 tens of characters."""
    images = some_images([(64, 64), (48, 80)] * (count // 2))
    return [replace(image, caption="c" * (number % 7 * 6 + 3)) for number, image in enumerate(images)]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**63 - 1), st.sampled_from([0.0, 0.4]))
def test_a_micro_batch_has_prompts_of_one_length(batch_size: int, accumulation: int, seed: int, rate: float) -> None:
    """Or none of them, and an epoch still has every sample once; the manifest tells its steps."""
    images = of_lengths()
    plan = make_plan(
        images, seed=seed, batch_size=batch_size, accumulation=accumulation, caption_dropout=rate, lengths=tens
    )
    seen: Counter[str] = Counter()
    for step in range(plan.steps_per_epoch):
        for rows in rows_of(plan, step):
            assert len({row.view.bucket for row in rows}) == 1
            assert len({tens([row.view.image.caption])[0] for row in rows}) == 1
            assert len({row.caption == "" for row in rows}) == 1
            seen.update(row.view.image.name for row in rows if row.weight)
    assert seen == {image.name: 1 for image in images}
    groups = samples_by_bucket(plan.manifest())
    assert sorted(groups.values()) == sorted(map(len, plan.dealt.values())) and len(groups) == 8
    assert steps_in_epoch(groups.values(), GlobalBatch(batch_size, accumulation)) == plan.steps_per_epoch


def test_batches_by_length_are_tried_out_with_their_longest_prompts() -> None:
    tried = make_plan(of_lengths(), batch_size=3, lengths=tens).one_of_each_size()
    assert [{tens([row.caption])[0] for row in rows} for rows in tried] == [{40}, {40}]


def test_variants_of_other_lengths_do_not_change_an_epochs_steps() -> None:
    """A picture counts with its longest prompt, for micro-batches stay what they are from epoch to epoch."""
    images = [replace(image, more=("c" * 3,)) for image in of_lengths()]
    plan = make_plan(images, variants=2, lengths=tens)
    alone = make_plan(of_lengths(), lengths=tens)
    assert plan.tokens == alone.tokens and plan.steps_per_epoch == alone.steps_per_epoch


def test_captions_that_drop_together_drop_at_their_rate() -> None:
    plan = make_plan(of_lengths(), batch_size=3, caption_dropout=0.3, lengths=tens)
    dropped = np.mean([plan.micro_batch(step, 0)[0].caption == "" for step in range(2000)])
    assert dropped == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / 2000))
