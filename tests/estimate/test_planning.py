"""Plans: of the levers' combinations one that fits and should be fastest; and the step times that rank them."""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from plan_search import config_of, searches_share_what_they_predict  # noqa: F401

from simpletune.apps.cli.main import main
from simpletune.config.check import can_recompute_feed_forward
from simpletune.config.load import read_config
from simpletune.engine.memory.cuda_libraries import cublas_workspace
from simpletune.estimate import planning
from simpletune.estimate.job_estimate import CONTEXT, MIB, estimate, needed_bytes
from simpletune.estimate.levers import changes_of_quality, effective_overrides, with_changes
from simpletune.estimate.plan_command import GRAPHS_COUNT, GRAPHS_MAY, describe_int8, describe_result
from simpletune.estimate.planning import (
    PlanResult,
    Search,
    batch_table,
    block_options,
    candidate_lists,
    find_first_fit,
    gains_by_int8,
    guess_first_fit,
    largest_peak,
    lasting_bytes,
)
from simpletune.estimate.simulate.simulate import simulate, train
from simpletune.estimate.timing.datasheet import DatasheetSpeeds
from simpletune.estimate.timing.timeline import StepSeconds
from simpletune.system.gpus import FOUND, GIB, Card, find_card
from simpletune.system.options import UserError

L4 = find_card("L4")


def a_card(mib: float) -> Card:
    return replace(L4, name=f"Test {mib:.0f}", gib=mib / 1024, found=1.0)


def must_have(config) -> float:
    return estimate(config, L4.capability).needed_bytes() / MIB


def test_each_candidate_takes_less_memory_than_the_one_before(config_of) -> None:
    search = Search(config_of(), L4)
    candidates = next(candidate_lists(search.config, L4))
    peaks = [search.report(choice.config).peak.bytes for choice in candidates[:3] + candidates[-1:]]
    assert peaks[0] > peaks[1] > peaks[2] > peaks[3]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "lists"), [("lora", slice(1, None, 4)), ("full", slice(1, 2))])
def test_every_candidate_takes_less_memory_than_the_one_before(
    method: str, lists: slice, config_of, simulate_once
) -> None:
    for candidates in list(candidate_lists(config_of(f"adapter.method={method}"), L4))[lists]:
        peaks = [simulate_once(choice.config).peak.bytes for choice in candidates]
        assert peaks[0] > peaks[1] > peaks[2] >= peaks[-1]
        assert all(after <= 1.03 * before for before, after in pairwise(peaks))


def test_a_list_has_every_way_to_keep_blocks_by_decreasing_memory(config_of) -> None:
    for method in ("lora", "full"):
        config = config_of(f"adapter.method={method}")
        ways = [
            name.split(", ")[-1]
            for name, _ in block_options(config.model.architecture.blocks(), can_recompute_feed_forward(config))
        ]
        for candidates in itertools.islice(candidate_lists(config, L4), 2):
            assert [choice.about.split(", ")[-1] for choice in candidates] == ways[: len(candidates)]


def test_what_cannot_be_kept_or_recomputed_alone_is_not_tried(config_of) -> None:
    """A compiled block is recomputed whole; so are networks beside trained modulations."""
    options = {
        "adapter.targets=attention": {"all", "auto", "alone", "1024"},
        "adapter.method=full": {"all", "auto"},
        "speed.compile=true": {"auto"},
        "speed.attention=math": {"auto"},
    }
    for override, values in options.items():
        candidates = next(candidate_lists(config_of(override), L4))
        parts = ("memory.keep_attention=", "memory.feed_forward=")
        found = {each.partition("=")[2] for choice in candidates for each in choice.overrides if each.startswith(parts)}
        assert found == values and len(candidates) >= 4, override  # four of full fine-tuning, which does not stream


def test_with_room_nothing_is_given_for_memory(config_of) -> None:
    config = config_of("precision.weights=int8")
    search = Search(config, L4)
    best, second = search.find_fastest()
    assert best.choice.about == "bf16 weights, all activations kept" and len(search._known) == 2
    assert second.step_time.seconds > best.step_time.seconds and second.estimate.peak.bytes < best.estimate.peak.bytes
    assert "precision.weights=bf16" in effective_overrides(config, best.choice.config, best.choice.overrides)


@pytest.fixture
def instant_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model's step waits for the host, whatever the card does."""
    monkeypatch.setattr(DatasheetSpeeds, "host", lambda *_: 0.0)
    monkeypatch.setattr("simpletune.estimate.timing.datasheet.LAUNCH", 0.0)


@pytest.fixture
def without_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model's rotations take longer than its products gain."""
    *others, rotation = planning.INT8_PRODUCTS
    assert rotation == "precision.rotation=hadamard"
    monkeypatch.setattr(planning, "INT8_PRODUCTS", tuple(others))


@pytest.mark.usefixtures("instant_host", "without_rotation")
def test_what_int8_products_should_gain_is_named_but_not_taken(config_of) -> None:
    search = Search(config_of(), L4)
    best = search.find_fastest()[0]
    assert getattr(best.choice.config.precision, "products", "dequantised") == "dequantised"
    found = search.int8_products(best)
    assert found is not None and found.estimate.fits(L4) and found.step_time.seconds < best.step_time.seconds
    less = f"{1 - found.step_time.seconds / best.step_time.seconds:.0%}"
    text = describe_int8(found, best)
    assert f"s/step predicted, {less} less, with precision.weights=int8 precision.products=int8" in text
    assert "precision.input_gradient=int8\n" in text and "What int8 products cost" in text
    assert search.int8_products(found) is None, "they are on"
    slower = replace(best, step_time=found.step_time)
    assert search.int8_products(slower) is None, "they gain nothing"
    for name in ("T4", "H100"):  # which has no kernel for them; which waits for its host
        assert Search(search.config, find_card(name)).int8_products(best) is None, name


def test_int8_products_are_proposed_for_geforce_cards_and_ada() -> None:
    proposed = ("RTX3060-12GB", "RTX3090", "RTX4060Ti-16GB", "RTX4090", "RTX5090", "L4", "L40S")
    others = ("T4", "RTX2060", "V100-16GB", "A100-40GB", "A10G", "H100", "H200", "B200")
    assert [name for name in (*proposed, *others) if gains_by_int8(find_card(name))] == [*proposed]


def test_what_is_found_fits_and_the_next_faster_candidate_does_not(config_of) -> None:
    config = config_of()
    kept = with_changes(config, ["memory.checkpointing=none"])
    card = a_card(must_have(kept) - 0.5)
    found = Search(config, card).find_fastest()
    for each in found:
        assert each.estimate.fits(card) and with_changes(config, each.choice.overrides) is not None
    best = found[0].choice
    candidates = next(iter(candidate_lists(config, card)))
    index = [choice.about for choice in candidates].index(best.about)
    assert index > 0 and not Search(config, card).fits(candidates[index - 1].config)


def test_a_step_that_does_not_fit_ends_where_it_runs_out(
    config_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is that of the whole simulation, at the byte where it changes too, and is kept."""
    config = config_of(f"output.cache={tmp_path}", "train.batch_size=2", "memory.checkpointing=none")
    whole = simulate(config)
    least = needed_bytes(whole.peak.bytes + cublas_workspace(L4.capability))
    ran: list[bool] = []
    monkeypatch.setattr(planning, "train", lambda *args, **named: (ran.append(True), train(*args, **named))[1])

    def fits(size: int) -> tuple[bool, Search]:
        search = Search(config, replace(L4, name="Test", gib=size / GIB, found=1.0))
        assert search.card.bytes == size
        return search.fits(config), search

    below, search = fits(least - 100 * MIB)
    assert not below and not search._known and not search.fits(config) and len(ran) == 1
    assert not fits(least - 100 * MIB)[0] and len(ran) == 1  # kept
    assert not fits(least - 1)[0] and fits(least)[0] and len(ran) == 2  # ends late enough to tell, and is kept
    assert search.report(config).sections == whole.sections


def test_the_first_that_fits_is_found_wherever_the_search_begins() -> None:
    for count, first, likely in itertools.product(range(1, 9), range(9), range(10)):
        for known in [None, *range(first, count)] if first <= count else []:
            asked: list[int] = []

            def fits(number: int, asked: list[int] = asked, first: int = first, count: int = count) -> bool:
                assert number not in asked and 0 <= number < count, "it asks again or for nothing"
                asked.append(number)
                return number >= first

            assert find_first_fit(range(count), fits, likely, known) == (first if first < count else None)
            assert likely != first or len(asked) <= 2


def test_the_search_begins_where_weights_and_states_leave_room(config_of) -> None:
    candidates = [each.config for each in list(candidate_lists(config_of("adapter.method=full"), L4))[1]]
    sizes = [lasting_bytes(config) for config in candidates]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0]
    config = candidates[0]
    model = config.model.empty_denoiser(config.precision, torch.device("meta"))
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert config.precision.bytes_per_weight == 2 and config.memory.optimizer_in_backward
    assert sizes[0] == pytest.approx(weights * (2 + config.optimizer.bytes_per_parameter))
    assert guess_first_fit(candidates, int(2 * sizes[0])) == 0 and guess_first_fit(candidates, 0) == len(candidates)
    streamed = sizes.index(next(size for size in sizes if size < sizes[0]))
    assert guess_first_fit(candidates, int(1.06 * sizes[streamed])) == streamed


def test_what_other_programs_hold_is_left_to_them(config_of) -> None:
    config = config_of()
    card = a_card(must_have(config) + 25)
    free, tight = Search(config, card).find_fastest()[0], Search(config, card, reserved=25 * MIB).find_fastest()[0]
    assert tight.estimate.needed_bytes() + 25 * MIB <= card.bytes
    assert tight.step_time.seconds >= free.step_time.seconds


@pytest.fixture
def nothing_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes a second, and a whole job fits if its training does."""
    monkeypatch.setattr(Search, "step_time", lambda self, config: StepSeconds(1.0, {}, 0.0, 0.0))
    monkeypatch.setattr(Search, "_fit_whole_job", lambda self, choice: [PlanResult(choice, None, None)])  # type: ignore[arg-type]


@pytest.mark.usefixtures("nothing_is_simulated")
def test_the_largest_batch_is_found_by_bisection(config_of, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fits(self: Search, config) -> bool:
        asked.append(config.train.batch_size)
        return config.train.batch_size <= 11

    monkeypatch.setattr("simpletune.estimate.planning.MOST", 64)
    monkeypatch.setattr(Search, "fits", fits)
    best = Search(config_of("train.batch_size=4"), L4).find_largest("train.batch_size")[0]
    assert best.choice.config.train.batch_size == 11 and best.choice.overrides[0] == "train.batch_size=11"
    assert asked[0] == 1 and {11, 12} <= set(asked) and len(asked) < 10


@pytest.mark.usefixtures("nothing_is_simulated")
def test_no_resolution_is_tried_that_the_model_cannot_take(config_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learned position embedding has a largest picture; simulating a larger one fails within diffusers."""
    config, tried = config_of(), []
    side = config.model.architecture.largest_side
    assert simulate(with_changes(config, [f"data.resolution={side}"])).peak.bytes > 0
    monkeypatch.setattr(planning, "RESOLUTIONS", (32, side, 2 * side))
    monkeypatch.setattr(Search, "fits", lambda self, config: tried.append(config.data.resolution) is None)
    assert Search(config, L4).find_largest("data.resolution")[0].choice.config.data.resolution == side == max(tried)
    monkeypatch.setattr(planning, "RESOLUTIONS", (2 * side,))
    assert Search(config, L4).find_largest("data.resolution")[0].choice.overrides[0] == f"data.resolution={side}"


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not(config_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simpletune.estimate.planning.MOST", 16)
    config = config_of("train.batch_size=4")
    card = a_card(must_have(config) + 10)
    search = Search(config, card)
    best = search.find_largest("train.batch_size")[0]
    batch = best.choice.config.train.batch_size
    assert batch > 1 and f"train.batch_size={batch}" in best.choice.overrides and best.estimate.fits(card)
    smallest = next(iter(candidate_lists(config, card)))[-1].config
    assert not search.fits(with_changes(smallest, [f"train.batch_size={batch + 1}"]))


def test_nothing_that_fits_is_an_error_with_a_remedy(config_of, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    assert not Search(config, a_card(505)).fits(next(iter(candidate_lists(config, L4)))[-1].config)
    monkeypatch.setattr(Search, "fits", lambda self, config: False)
    with pytest.raises(UserError, match="no settings fit on Test 505.*data.resolution=512"):
        Search(config_of(), a_card(505)).find_fastest()
    with pytest.raises(UserError, match="train.batch_size: not even 1 fits"):
        Search(config_of(), a_card(505)).find_largest("train.batch_size")


def test_the_batch_table_is_what_a_prediction_says(config_of, simulate_once) -> None:
    config = config_of("train.batch_size=2")
    one = simulate_once(config).peak.bytes
    none, some = a_card(505), a_card(needed_bytes(one) / MIB + 40)
    table = batch_table(config, [none, some, L4], (256,))
    assert table[none.name] == [0] and table["L4"][0] > table[some.name][0] > 2
    batch = table[some.name][0]
    peak = simulate(with_changes(config, [f"train.batch_size={batch}"])).peak.bytes
    assert 0.9 * largest_peak(some) < peak + cublas_workspace(some.capability) <= largest_peak(some)
    assert largest_peak(some) < some.bytes - CONTEXT


def test_what_may_cost_quality_is_named_with_its_values(config_of) -> None:
    full = config_of("adapter.method=full", "train.gradient_accumulation=2")
    changes = [
        "memory.optimizer_in_backward=true", "train.clip=per_parameter", "train.gradient_accumulation=1",
        "memory.checkpointing=all",
    ]  # fmt: skip
    new = with_changes(full, changes)
    assert changes_of_quality(full, new) == [
        "gradients are clipped per_parameter instead of global (train.clip)",
        "an update follows 1 instead of 2 micro-batches: noisier, but more of them (train.gradient_accumulation)",
    ]
    best = Search(config_of("precision.weights=int8"), L4).find_fastest()[0]
    lines = list(describe_result(1, replace(best, choice=replace(best.choice, config=new, overrides=())), best, full))
    told = [line for line in lines if line.strip().startswith("quality")]
    assert len(told) == 2 and "per_parameter" in told[0] and "1 instead of 2" in told[1]
    lora = config_of("adapter.method=lora", "precision.weights=int8")
    more_bits, tiles = with_changes(lora, ["precision.weights=bf16"]), with_changes(lora, ["memory.vae_tile=512"])
    assert changes_of_quality(lora, more_bits) == []
    (tiled,), (rounded,) = changes_of_quality(lora, tiles), changes_of_quality(more_bits, lora)
    assert tiled.endswith("(512 instead of null) (memory.vae_tile)")
    assert rounded == "the frozen weights are rounded to int8 instead of bf16 (precision.weights)"


def test_graphs_are_hinted_at_where_the_card_waits_for_the_host(config_of) -> None:
    best = Search(config_of("precision.weights=int8"), L4).find_fastest()[0]

    def told(host: float, *changes: str) -> list[str]:
        step = replace(best.step_time, device={"products": 1.0}, waits=0.0, host=host)
        choice = replace(best.choice, config=with_changes(best.choice.config, changes))
        lines = describe_result(1, replace(best, step_time=step, choice=choice), best, best.choice.config)
        return [line.strip() for line in lines if "speed.graphs" in line]

    resident = ("memory.resident_blocks=null", "memory.offload_checkpoint_inputs=false")
    assert told(2.0, *resident) == [GRAPHS_MAY] and told(0.5, *resident) == []
    assert told(2.0, *resident, "speed.graphs=true") == [GRAPHS_COUNT]
    assert told(2.0, "memory.resident_blocks=0", "memory.checkpointing=all") == [], "which graphs do not take"


@pytest.mark.usefixtures("instant_host", "without_rotation")
def test_plan_writes_a_configuration_that_fits_and_gives_signs_of_life(
    config_of, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config_of()
    file, nowhere = tmp_path / "large.json", given.data.path
    file.write_text(given.model_dump_json(by_alias=True).replace(nowhere, "demo:pictures"))
    kept = with_changes(given, ["memory.checkpointing=none"])
    gib = (must_have(kept) - 0.5) / 1024 / FOUND
    monkeypatch.setattr("simpletune.system.console.PLAIN_EVERY", 0)
    words = ["plan", str(file), f"data.path={nowhere}", "--device", f"{gib:.5f}GiB"]
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.count("\nint8 products: ") == 1
    assert list(tmp_path.glob("**/*.json")) == [file]  # nothing is written unasked
    assert "1. " in text and "expected:" in text and "2. " in text
    assert "speeds: no figures are known for this card: using those of an L4" in text
    command = next(line for line in text.splitlines() if line.startswith("train with them: "))
    _, verb, *rest = shlex.split(command.removeprefix("train with them: "))
    assert verb == "train" and rest[0] == str(file)
    planned, _ = read_config(file, rest[1:], needs_data=False)
    assert planned.data.path == nowhere
    assert estimate(planned, L4.capability).needed_bytes() <= gib * FOUND * GIB
    counted = [line for line in text.splitlines() if "predictions in" in line]
    assert len(counted) >= 3 and " 1 predictions in" in counted[0] and f" {len(counted)} predictions in" in counted[-1]
    assert "MiB" in counted[0]
    monkeypatch.setattr("simpletune.system.console.PLAIN_EVERY", 10.0)
    assert main([*words, "--out", str(tmp_path / "planned.json")]) == 0
    text = capsys.readouterr().out
    assert text.count("predictions in") <= 3 and f"written: {tmp_path / 'planned.json'}" in text
    written, _ = read_config(tmp_path / "planned.json", needs_data=False)
    assert written.name == "planned" and written.memory == planned.memory


def test_plan_asks_for_a_card_and_prints_batches(
    tiny_config: dict, write_config, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simpletune.estimate.plan_command.RESOLUTIONS", (32, 64))
    file = write_config(tiny_config)
    assert main(["plan", str(file)]) == 2
    assert "--device" in capsys.readouterr().err
    assert main(["plan", str(file), "--batches", "--device", "L4", "--device", "8GiB"]) == 0
    text = capsys.readouterr().out
    assert "| L4, 24 GiB |" in text and "| 8 GiB |" in text and "32 px" in text
    assert main(["plan", str(file), "--batches", "--device", "L4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["L4"]["32"] > 1
