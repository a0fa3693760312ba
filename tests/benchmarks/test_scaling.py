"""The scaling grid: how a step is divided and predicted on many cards, its page, and what processes here measure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import cluster, measured_scaling, scaling, scaling_plans
from benchmarks.cluster import Compute, Fabric, Job, divided, exchange_seconds, predict
from benchmarks.scaling_tables import about, efficiency, key, predicted_cells, update_of
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.estimate.timing.datasheet import DatasheetSpeeds
from simpletune.runs.report.markdown import escape_markdown
from simpletune.system.gpus import find_card
from simpletune.system.options import Json

FABRIC = Fabric(200e9, 80e9, "stated")
COMPUTE = Compute(first=0.25, each=0.125, backward=0.08)


def job(batch: int = 2048, micro: int = 16, gradients: int = 4 * 10**9, sample: int = 10**5) -> Job:
    """A job of a model with a billion trained parameters."""

    class Stated(Job):
        exchanged, sample_bytes = gradients, sample  # type: ignore[assignment]

    train = SimpleNamespace(micro_batch=micro)
    return Stated(SimpleNamespace(train=train), batch)  # type: ignore[arg-type]


def test_a_step_is_divided_over_cards_and_exchanged_at_the_bus_bandwidth() -> None:
    """busbw = bytes / seconds x 2 (n - 1) / n (nccl-tests, doc/PERFORMANCE.md)."""
    for cards, expected in {1: (16, 128), 8: (16, 16), 128: (16, 1), 256: (8, 1), 2048: (1, 1)}.items():
        assert divided(2048, 16, cards) == expected and math.prod(expected) * cards == 2048
    assert divided(240, 16, 10) == (12, 2)
    with pytest.raises(ValueError, match="2048 pictures cannot be divided over 3 cards"):
        divided(2048, 16, 3)
    assert exchange_seconds(10**9, 1, FABRIC) == 0
    for cards, bandwidth in ((2, 200e9), (8, 200e9), (16, 80e9)):
        assert 10**9 / exchange_seconds(10**9, cards, FABRIC) * 2 * (cards - 1) / cards == pytest.approx(bandwidth)


def test_only_what_the_last_backward_pass_does_not_hide_is_added() -> None:
    eight, many = (predict(job(), cards, COMPUTE, FABRIC) for cards in (8, 128))
    exchange = 2 * 7 / 8 * 4e9 / 200e9
    assert exchange < COMPUTE.backward and eight.exposed == pytest.approx(exchange * 25e6 / 4e9)
    assert eight.seconds == pytest.approx(0.25 + 15 * 0.125 + eight.exposed)
    assert many.exposed == pytest.approx(2 * 127 / 128 * 4e9 / 80e9 - 0.08)
    assert many.rate == pytest.approx(2048 / (0.25 + many.exposed)) and many.bound == "computation"
    assert predict(job(gradients=10**11), 128, COMPUTE, FABRIC).bound == "exchange"
    late, later = (predict(job(sample=10**8), cards, COMPUTE, FABRIC) for cards in (16, 8))
    assert later.bound == "data" and later.seconds == pytest.approx(2048 * 1e8 / cluster.DATA)
    assert late.seconds == pytest.approx(later.seconds / 2)


def test_a_card_is_simulated_with_one_and_two_passes_whatever_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe's step of 2,048 pictures is that of all cards."""
    passes: list[tuple[int, int]] = []

    def simulated(config: TrainConfig, capability: tuple[int, int]) -> SimpleNamespace:
        passes.append((config.train.micro_batch, config.train.accumulation))
        return SimpleNamespace(sections=config.train.accumulation)

    def timed(count: int, speeds: DatasheetSpeeds) -> SimpleNamespace:
        return SimpleNamespace(seconds=0.5 + 0.25 * count, phases={"backward": 1.0, "forward": 3.0})

    monkeypatch.setattr(cluster, "simulate", simulated)
    monkeypatch.setattr(cluster, "step_seconds", timed)
    recipe = validate(json.loads(scaling_plans.SD3.read_text()), "recipe", needs_data=False)
    assert recipe.train.accumulation == 128
    found = cluster.compute_of(Job(recipe, 2048), 8, DatasheetSpeeds(find_card("A100-80GB")))
    assert passes == [(8, 1), (8, 2)]
    assert (found.first, found.each, found.backward) == (0.75, 0.25, 0.75 / 4)


def rows() -> dict[int, Json]:
    found = {}
    for cards in scaling.CARDS:
        step = predict(job(), cards, COMPUTE, FABRIC)
        found[cards] = {"micro": step.micro, "passes": step.passes, "seconds": step.seconds, "rate": step.rate,
                        "bound": step.bound, "exposed": step.exposed, "batch": 2048}  # fmt: skip
    return found


def test_the_update_is_what_a_step_takes_beside_its_passes() -> None:
    assert update_of(rows()) == pytest.approx(0.125)
    plain, sharded = efficiency(64, rows()), efficiency(64, rows(), sharded=True)
    seconds = {cards: rows()[cards]["seconds"] - 0.125 * (1 - 1 / cards) for cards in (8, 64)}
    assert sharded == pytest.approx(seconds[8] * 8 / (seconds[64] * 64)) and sharded > plain


def test_processes_that_fail_are_said() -> None:
    with pytest.raises(Exception, match="failed on 2 processes"):
        measured_scaling.launch(["-c", "import os; exit(int(os.environ['RANK']))"], 2)
    assert measured_scaling.launch(["-c", "import os; print(os.environ['WORLD_SIZE'])"], 2) == "2\n"


def test_the_page_of_the_docs_repeats_the_results() -> None:
    """A row of docs/how-to/several-machines.md has efficiency, days and cost of two plans for 8 to 256 cards, and its
    sentences the cost of a LoRA's plan and the published rates of 8 cards."""
    root = Path(__file__).resolve().parents[2]
    rows = json.loads((root / "benchmarks/results/cpu/scaling.json").read_text())["rows"]
    assert set(rows) <= set(scaling.jobs())
    results = (root / "benchmarks/results/cpu/scaling.md").read_text()
    cells: dict[str, dict[int, tuple[str, ...]]] = {}
    for name, plan in scaling_plans.PLANS.items():
        assert escape_markdown(about(plan)) in results
        found = {cards: rows[key(name, plan, cards)] for cards in scaling.CARDS}
        cells[name] = {cards: predicted_cells(cards, found, plan) for cards in scaling.CARDS[1:]}
    page = (root / "docs/how-to/several-machines.md").read_text()
    for title in ("SD 2 base from scratch", "SD3 from scratch"):
        small, large = (cells[f"{title}, {side} px"] for side in (256, 512))
        for cards in scaling.CARDS[1:]:
            kept = [str(cards), *(each[cards][at] for each in (small, large) for at in (5, 9, 11))]
            assert f"\n| {' | '.join(kept)} |\n" in page, (title, cards)
    words = " ".join(page.split())
    of_lora = cells["SD3 Medium, LoRA r16, int8, 1024 px"]
    assert f"predicted to cost {of_lora[8][11]} on 8 L4 and {of_lora[256][11]} on 256" in words
    first, second = (cells[f"SD 2 base from scratch, {side} px"][8] for side in (256, 512))
    assert f"publishes {first[12]} pictures per second on 8 cards at 256 px, where {first[3]} are predicted" in words
    assert f"and {second[12]} at 512 px, where {second[3]} are predicted" in words
