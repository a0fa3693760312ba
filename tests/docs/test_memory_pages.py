"""The tables of memory on the pages of models and of memory levers: what ``simpletune estimate`` prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simpletune.estimate.estimate_command import estimate_config
from simpletune.system.gpus import find_card

ROOT = Path(__file__).resolve().parents[2]
MODELS = (ROOT / "docs" / "reference" / "models.md").read_text()
LEVERS = (ROOT / "docs" / "reference" / "memory-levers.md").read_text()
ROW = re.compile(r"^\| `(\w+)((?: [\w.]+=\w+)*)` \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|", re.M)
Row = tuple[str, tuple[str, ...], tuple[str, str, str]]
STUDENT = "sd3_medium_lora_r16_int8"  # whose levers the page compares


def rows() -> list[Row]:
    """Configuration, overrides, and the figures ``card``, ``step`` and ``host`` of each row of both pages."""
    found: list[Row] = []
    for name, overrides, *figures in ROW.findall(MODELS):
        found.append((name, tuple(overrides.split()), tuple(figures)))
    kinds = iter(["lora"] * 6 + ["full"] * 6)
    for name, _, *figures in ROW.findall(LEVERS):
        found.append((f"sd3_medium_{next(kinds)}_{name}", (), tuple(figures)))
    return found


def predicted(name: str, *overrides: str) -> dict[str, str]:
    """What ``simpletune estimate`` prints for an L4: MiB of the step and of the card, GiB of the host, seconds."""
    told = estimate_config(Path(name), list(overrides), "L4")
    patterns = {
        "step": r"^  train +([\d,]+) ",
        "card": r"^  the card must have +([\d,]+)$",
        "host": r"^  host memory about ([\d.]+) GiB",
        "seconds": r"^    a step ([\d.]+ m?s)",
    }
    return {what: match[1] for what, pattern in patterns.items() if (match := re.search(pattern, told, re.M))}


def test_every_configuration_for_a_card_has_a_row() -> None:
    shipped = {file.stem for file in (ROOT / "configs").glob("*_[0-9]*gb.json")}
    named = {name for name, _, _ in rows()}
    assert shipped - named == set() and len(named) >= 25


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides", "figures"), rows(), ids=lambda value: str(value)[:60])
def test_a_row_is_what_estimate_prints_and_fits_the_card(
    name: str, overrides: tuple[str, ...], figures: tuple[str, str, str]
) -> None:
    """A card of the name's size has 96.5% of it."""
    found = predicted(name, *overrides)
    assert (found["card"], found["step"], found["host"]) == figures
    if size := re.search(r"_(\d+)gb$", name):
        assert float(figures[0].replace(",", "")) * 2**20 <= find_card(f"{size[1]} GiB").bytes


def test_the_levers_figures_are_of_the_results() -> None:
    """Peaks stand in the grid of memory, except for that of tiles of tokens, which the next test predicts."""
    levers = LEVERS[LEVERS.index("### Below the profiles") : LEVERS.index("## Precisions")]
    stages = LEVERS[LEVERS.index("## The other stages") : LEVERS.index("## Checkpointing by budget")]
    results = (ROOT / "benchmarks" / "results" / "cpu" / "memory.md").read_text()
    figures = set(re.findall(r"\b\d+,\d{3}\b|\b[3-9]\d\d\b", levers + stages)) - {"512", "1,920"}
    assert len(figures) > 15
    assert sorted(figure for figure in figures if not re.search(rf"(?<![\d,]){figure}(?![\d,])", results)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "step", "seconds"),
    [
        ("", "1,998", "896 ms"), ("memory.keep_attention=all", "2,305", "829 ms"),
        ("memory.feed_forward=alone", "1,992", "844 ms"), ("memory.feed_forward=1024", "1,920", "895 ms"),
        ("memory.checkpointing=none", "5,004", "657 ms"),
        ("memory.offload_checkpoint_inputs=true memory.keep_attention=all memory.feed_forward=alone",
         "1,754", "780 ms"),
        ("precision.products=int8", "1,974", "780 ms"),
        ("precision.products=int8 precision.input_gradient=int8", "1,980", "719 ms"),
    ],
)  # fmt: skip
def test_the_levers_seconds_are_what_estimate_prints(overrides: str, step: str, seconds: str) -> None:
    found = predicted(STUDENT, *overrides.split())
    assert (found["step"], found["seconds"]) == (step, seconds)
    assert f"{float(seconds.split()[0]) / 1000:.2f} s" in LEVERS
    assert step in LEVERS or "products" in overrides or overrides == "memory.feed_forward=alone"
