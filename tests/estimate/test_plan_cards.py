"""``plan``: brute force chooses the same; of several cards the cheapest or fastest; what a choice costs, in words."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from plan_search import config_of, searches_share_what_they_predict  # noqa: F401

from simpletune.apps.cli.main import main
from simpletune.config.schema import TrainConfig
from simpletune.estimate.job_estimate import MIB
from simpletune.estimate.job_time import JobTime
from simpletune.estimate.levers import changes_of_quality, with_changes
from simpletune.estimate.plan_command import choose_card, describe_settings, plan_for_card, table
from simpletune.estimate.planning import PlanResult, Search, SettingChanges, candidate_lists
from simpletune.estimate.timing.datasheet import DatasheetSpeeds
from simpletune.estimate.timing.sections import KernelWork, StreamWork
from simpletune.estimate.timing.timeline import StepSeconds, step_seconds, use_of
from simpletune.system.gpus import CARDS, Card, find_card
from simpletune.system.options import UserError
from simpletune.system.prices import Price

L4 = find_card("L4")
PRICE = Price(per_hour=1.0, as_of="2026-11", source="test", currency="USD")


def brute_force(config: TrainConfig, card: Card) -> SettingChanges | None:
    """Of all candidates that fit the best; those of the last resort only if nothing else fits."""
    search, candidates = Search(config, card), list(itertools.chain(*candidate_lists(config, card)))
    for resort in (False, True):
        fitting = [each for each in candidates if each.last_resort == resort and search.fits(each.config)]
        found = next((each for each in sorted(fitting, key=search._cost) if search._fit_whole_job(each)), None)
        if found is not None:
            return found
    return None


@pytest.mark.parametrize(
    ("method", "mib"),
    [
        pytest.param("full", 1100, marks=pytest.mark.slow),
        *(pytest.param("full", mib, marks=pytest.mark.slow) for mib in range(700, 3000, 150)),
        *(pytest.param("lora", mib, marks=pytest.mark.slow) for mib in range(700, 3000, 150)),
    ],
)
def test_the_choice_is_that_of_brute_force(method: str, mib: int, config_of) -> None:
    config, card = config_of(f"adapter.method={method}"), replace(L4, name="Test", gib=mib / 1024, found=1.0)
    wanted = brute_force(config, card)
    if wanted is None:
        with pytest.raises(UserError, match="no settings fit"):
            Search(config, card).find_fastest()
        return
    search = Search(config, card)
    best = search.find_fastest()[0].choice
    assert search._cost(best) == pytest.approx(search._cost(wanted), rel=1e-9), (best.about, wanted.about)


class Only:
    """Speeds of a device on which one use takes a second for each of its units, and all else nothing."""

    cuda, launch = True, 0.0
    rates: dict = {}

    def __init__(self, use: str):
        self.use = use

    def host(self, what: str) -> float:
        return 0.0

    def seconds(self, kind: str, dtype: str, extents: tuple[int, ...]) -> float:
        return float(units(kind, extents)) if use_of(KernelWork(kind, dtype, extents)) == self.use else 0.0


def units(kind: str, extents: tuple[int, ...]) -> int:
    return math.prod(extents) if kind.startswith(("product", "attention", "convolution", "int8")) else extents[-1]


def units_of(sections: list[StreamWork], use: str, *, computed: bool) -> float:
    """Units of a use in a step: on the computation's stream, or on the queues of copies."""
    found = 0.0
    for section in sections:
        if (section.stream == "compute") == computed:
            counts = ((work, count) for work, count in section.work.items() if use_of(work) == use)
            found += section.share * sum(count * units(work.kind, work.extents) for work, count in counts)
    return found


CHANGES = (
    "memory.checkpointing=all", "memory.checkpointing=1",
    "memory.modulation=plan adapter.targets=attention", "train.batch_size=4",
    "train.gradient_accumulation=3", "precision.weights=int8", "precision.weights=nf4", "optimizer.name=adamw8bit",
    "adapter.rank=32", "memory.checkpointing=all memory.resident_blocks=1", "data.resolution=128",
    "memory.checkpointing=all memory.offload_checkpoint_inputs=true",
)  # fmt: skip


@pytest.mark.parametrize("use", ["products", "attention", "traffic", "unpacking"])
@pytest.mark.parametrize(
    "changes", [*CHANGES[:1], *(pytest.param(each, marks=pytest.mark.slow) for each in CHANGES[1:])]
)
def test_a_lever_moves_the_time_as_it_moves_what_takes_it(changes: str, use: str, config_of, simulate_once) -> None:
    before = config_of("train.batch_size=2", "adapter.method=lora")
    after = with_changes(before, changes.split())
    assert after is not None and after != before
    for config in (before, after):
        sections = list(simulate_once(config).sections)
        assert step_seconds(sections, Only(use)).seconds == pytest.approx(units_of(sections, use, computed=True))
    grown = [units_of(list(simulate_once(each).sections), use, computed=True) for each in (before, after)]
    if changes == "memory.checkpointing=all" and use in ("products", "attention"):
        assert grown[1] > grown[0]  # a second forward pass


def test_copies_take_at_least_their_bytes_on_the_busiest_queue(config_of, simulate_once) -> None:
    streamed = with_changes(config_of("adapter.method=lora"), ["memory.checkpointing=all", "memory.resident_blocks=0"])
    sections = list(simulate_once(streamed).sections)
    copied, computed = (units_of(sections, "copies", computed=each) for each in (False, True))
    found = step_seconds(sections, Only("copies"))
    assert copied > 0 and found.waits > 0 and found.seconds == pytest.approx(copied + computed, rel=0.5)


def a_plan(name: str, seconds: float, per_hour: float | None, samples: float = 1.0) -> tuple[Card, PlanResult]:
    """A plan of a job that trains only."""
    card = find_card(name)
    price = None if per_hour is None else Price(per_hour=per_hour, as_of="2026-11", source="test")
    time = JobTime(card, None, 1, None, {"train": seconds}, (1.0, 1.0), "test", price)  # type: ignore[arg-type]
    return card, PlanResult(None, None, None, time, samples)  # type: ignore[arg-type]


def test_the_cheapest_card_is_that_of_the_least_money_for_as_many_samples() -> None:
    slow, quick = a_plan("L4", 7200, 1.0), a_plan("H100", 3600, 3.0)
    unknown, lacking = a_plan("RTX3090", 60, None), (find_card("T4"), "no settings fit")
    assert choose_card([quick, slow, unknown, lacking], "cheapest") == slow
    assert choose_card([quick, slow, lacking], "fastest") == quick
    assert [plan.cost for _, plan in (slow, quick, unknown)] == [pytest.approx(2.0), pytest.approx(3.0), None]
    quarter = a_plan("L4", 7200, 1.0, samples=0.25)  # a quarter of the samples in these steps
    assert quarter[1].cost == pytest.approx(8.0) and choose_card([quick, quarter], "cheapest") == quick
    with pytest.raises(UserError, match="no price is known for RTX3090.*--prices"):
        choose_card([unknown, lacking], "cheapest")
    for goal in ("cheapest", "fastest"):
        with pytest.raises(UserError, match="T4: no settings fit"):
            choose_card([lacking], goal)


@pytest.mark.slow
def test_a_plan_compares_as_many_samples(config_of) -> None:
    config = config_of("adapter.method=full", "train.gradient_accumulation=4")
    found = plan_for_card(config, replace(L4, name="Test", gib=1.1, found=1.0), PRICE)
    chosen = found.choice.config.train
    assert found.samples == pytest.approx(chosen.batch_size * chosen.gradient_accumulation / 64)
    assert found.cost == pytest.approx(found.seconds / 3600)
    with pytest.raises(UserError, match="no settings fit on Tiny"):
        plan_for_card(config, replace(L4, name="Tiny", gib=0.3), PRICE)
    lines = list(table("job", [(L4, found)], found))
    assert "chosen" in lines[2] and found.choice.about in lines[2] and "as of 2026-11" in lines[-1]


def described(config: TrainConfig, changed: TrainConfig, step: StepSeconds) -> list[str]:
    """What is said of a plan's settings."""
    choice = SettingChanges((), changed, "", 0)
    return list(describe_settings(config, PlanResult(choice, None, step)))  # type: ignore[arg-type]


def test_costs_are_named_in_words(config_of) -> None:
    config = config_of("adapter.method=full", "train.gradient_accumulation=4")
    assert "nothing is computed twice" in described(config, config, StepSeconds(1.0, {}, 0.0, 0.0))[0]
    again = StepSeconds(2.0, {}, 0.0, 0.2, phases={"recompute": 0.5})
    changes = ["memory.checkpointing=all", "train.gradient_accumulation=1"]
    assert with_changes(config, [*changes, "precision.weights=int8"]) is None  # int8 weights do not train
    lines = described(config, with_changes(config, changes), again)
    assert lines[0] == "time: 25% of a step for all 3 blocks computed a second time in the backward pass"
    assert lines[1] == "time: 10% of a step for waiting for copies from and to host memory"
    assert "an update follows 1 instead of 4 micro-batches" in lines[2] and lines[2].startswith("quality: ")
    assert changes_of_quality(config, config) == []


def products_of(sections: list[StreamWork], phases: tuple[str, ...]) -> Counter[KernelWork]:
    """The products and attention kernels of phases."""
    found: Counter[KernelWork] = Counter()
    for section in sections:
        if section.phase in phases:
            found.update({w: count for w, count in section.work.items() if use_of(w) in ("products", "attention")})
    return found


@pytest.mark.parametrize("alone", ["block", "alone"])
def test_what_is_computed_a_second_time_is_counted_and_named(alone: str, config_of, simulate_once) -> None:
    kept = config_of("train.batch_size=2", "adapter.method=lora")
    changes = ["memory.checkpointing=all", "memory.keep_attention=none", f"memory.feed_forward={alone}"]
    again = with_changes(kept, changes)
    assert again is not None
    once, twice = (list(simulate_once(each).sections) for each in (kept, again))
    second = products_of(twice, ("recompute",))
    assert not products_of(once, ("recompute",)) and second
    # Checkpointing adds what it computes again, and nothing else: everything else is as without it.
    assert products_of(twice, ("backward",)) == products_of(once, ("backward",))
    assert products_of(twice, ("forward",)) == products_of(once, ("forward",))
    assert set(second) <= set(products_of(once, ("forward",)))
    if alone == "block":  # a network may run with its block and alone
        assert second <= products_of(once, ("forward",))
    step = step_seconds(twice, DatasheetSpeeds(L4))
    lines = described(kept, again, step)
    share = sum(c * DatasheetSpeeds(L4).seconds(*w) for w, c in second.items()) / step.seconds
    assert share > 0.01 and "computed a second time" in lines[0]
    assert float(lines[0].split("%")[0].removeprefix("time: ")) >= round(100 * share) - 1


def test_plan_chooses_a_card_by_price_and_is_quiet_with_json(
    config_of, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, prices, out = tmp_path / "demo.json", tmp_path / "prices.json", tmp_path / "planned.json"
    file.write_text(config_of().model_dump_json(by_alias=True))
    price = {"as_of": "2026-11", "source": "mine"}
    prices.write_text(json.dumps({"L4": {"per_hour": 9.0, **price}, "A100-40GB": {"per_hour": 0.1, **price}}))
    asked = ["plan", str(file), "--device", "L4,A100-40GB", "--prices", str(prices), "--out", str(out)]
    capsys.readouterr()
    assert main([*asked, "--goal", "cheapest", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"] == "A100-40GB" and [each["device"] for each in found["cards"]] == ["L4", "A100-40GB"]
    assert found["cards"][1]["cost"] < found["cards"][0]["cost"] and Path(found["written"]) == out
    assert main([*asked, "--goal", "cheapest"]) == 0
    text = capsys.readouterr().out
    assert "A100-40GB" in text and "chosen" in text and "time: " in text and f"written: {out}" in text
    assert main([*asked, "--goal", "largest-batch"]) == 2
    assert "takes one card" in capsys.readouterr().err


def test_a_card_without_known_figures_says_so_in_a_plan(config_of) -> None:
    card = find_card("23GiB")
    found = plan_for_card(config_of(), card, None)
    lines = list(table("job", [(card, found)], found))
    assert any("no figures are known for this card" in line for line in lines) and "no price is known" in lines[-1]
    assert all(card.tflops and card.bandwidth for card in CARDS) and found.estimate.needed_bytes() > MIB
