"""Memory in the configurations and on the pages of models and levers is what ``simpletune estimate`` prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from simpletune.estimate.estimate_command import estimate_config
from simpletune.system.gpus import find_card

ROOT = Path(__file__).resolve().parents[2]
MODELS = (ROOT / "docs" / "reference" / "models.md").read_text()
LEVERS = (ROOT / "docs" / "reference" / "memory-levers.md").read_text()
SETTINGS = re.findall(r"^\| `(\w+(?: [\w.]+=\w+)+)` \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|$", MODELS, re.M)
FOR_A_CARD = {file.stem: json.loads(file.read_text())["about"] for file in (ROOT / "configs").rglob("*_[0-9]*gb.json")}
STUDENT = "sd3_medium_lora_r16_int8"  # whose levers the page compares


def predicted(name: str, *overrides: str) -> dict[str, str]:
    """What ``simpletune estimate`` prints for an L4: MiB of the card and of the step, GiB of the host, seconds."""
    told = estimate_config(Path(name), list(overrides), "L4")
    patterns = {
        "card": r"^  the card must have +([\d,]+)$",
        "step": r"^  train +([\d,]+) ",
        "host": r"^  host memory about ([\d.]+) GiB",
        "seconds": r"^    a step ([\d.]+ m?s)",
    }
    return {what: match[1] for what, pattern in patterns.items() if (match := re.search(pattern, told, re.M))}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FOR_A_CARD))
def test_a_configuration_takes_what_it_says_and_fits_its_card(name: str) -> None:
    """A card of the name's size has 96.5% of it."""
    found = predicted(name)
    size = re.fullmatch(r".*_(\d+)gb", name)
    assert size is not None and float(found["card"].replace(",", "")) * 2**20 <= find_card(f"{size[1]} GiB").bytes
    said = re.search(r"Predicted for the training step: ([\d,]+) MiB", FOR_A_CARD[name])
    assert said is None or said[1] == found["step"]


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "card", "step", "host"), SETTINGS)
def test_settings_for_smaller_cards_take_what_the_page_says(settings: str, card: str, step: str, host: str) -> None:
    found = predicted(*settings.split())
    assert (found["card"], found["step"], found["host"]) == (card, step, host)


def test_the_pages_have_figures_to_test() -> None:
    assert len(SETTINGS) >= 6
    assert sum("Predicted for the training step" in about for about in FOR_A_CARD.values()) >= 20


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
