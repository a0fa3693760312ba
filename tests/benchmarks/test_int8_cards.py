"""Int8 products by card: the page of levers has the grid's seconds, and a row is predicted as a run is."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import int8_cards
from benchmarks.int8_cards import CARDS, KINDS, MODELS, predicted, sections_of
from simpletune.estimate.timing.sections import COMPUTE, KernelWork, StreamWork
from simpletune.system.gpus import find_card

ROOT = Path(__file__).resolve().parents[2]
ROWS = json.loads((ROOT / "benchmarks/results/cpu/int8_cards.json").read_text())["rows"]


def test_the_page_of_levers_has_the_grid_s_seconds() -> None:
    text = (ROOT / "docs/reference/memory-levers.md").read_text()
    told = re.findall(r"^\| (\w+) \| ([\d.]+) / ([\d.]+) \| ([\d.]+) / ([\d.]+) \| ([\d.]+) / ([\d.]+) \|$", text, re.M)
    assert [card for card, *_ in told] == [card.name.partition("-")[0] for card in CARDS]
    for (_, *seconds), card in zip(told, CARDS, strict=True):
        rows = [ROWS[f"{model}, {card.name}"] for model in MODELS]
        assert seconds == [f"{row[kind]:.2f}" for row in rows for kind in ("bf16", "rotated")]


def test_the_longer_of_card_and_host_counts_and_a_slow_host_takes_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(product: str, kernels: int) -> list[StreamWork]:
        work = Counter({KernelWork(product, "bf16", (4096, 4096, 4096)): 100, KernelWork("add", "bf16", (1,)): kernels})
        return [StreamWork(COMPUTE, "", "", work=work, host=Counter(function=10))]

    steps = {KINDS["bf16"]: step("product_tn", 100), KINDS["int8"]: step("int8_product", 5000)}
    steps[KINDS["rotated"]] = steps[KINDS["int8"]]
    monkeypatch.setattr(int8_cards, "sections_of", lambda model, overrides: steps[overrides])
    ada, hopper = (predicted(find_card(name), "SDXL", {}) for name in ("RTX4090", "H100"))
    assert ada["rotated"] < 0.8 * ada["bf16"] and ada["proposed"] == "yes"
    assert ada["slow_rotated"] == pytest.approx(5100 * 30e-6, rel=0.1) and ada["slow_ratio"] > 1
    assert hopper["proposed"] == "no"


def test_the_cards_are_proposed_for_where_they_gain() -> None:
    for name, row in ROWS.items():
        gains = row["rotated"] < row["bf16"]
        assert gains == (row["ratio"] < 1) and (row["proposed"] == "no" or gains), name
    assert {name for name, row in ROWS.items() if row["proposed"] == "yes"} >= {
        f"{model}, {card}" for model in ("SD3 Medium", "FLUX.2 klein 4B") for card in ("RTX3060-12GB", "RTX4090", "L4")
    }


@pytest.mark.slow
def test_a_committed_row_is_what_today_s_code_predicts() -> None:
    model, card = "SD3 Medium", find_card("RTX4090")
    found = predicted(card, model, {(model, kind): sections_of(model, KINDS[kind]) for kind in KINDS})
    row = ROWS[f"{model}, {card.name}"]
    assert found.pop("proposed") == row["proposed"]
    assert found == pytest.approx({name: value for name, value in row.items() if name != "proposed"}, rel=1e-3)
