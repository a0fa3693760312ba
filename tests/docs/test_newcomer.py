"""What a newcomer asks is answered in one click, and the figures of the first pages are what ``estimate`` prints."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from slow_cases import slow_but

from simpletune.estimate.estimate_command import estimate_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "README.md").read_text()
RENTED = (ROOT / "docs" / "tutorials" / "rented-l4.md").read_text()
FIT = (ROOT / "docs" / "how-to" / "fit-a-card.md").read_text()

QUESTIONS = {
    "Which settings suit my 8 GB card?": ("how-to/fit-a-card.md", r"`\w+_8gb`"),
    "My run was killed. What now?": ("how-to/continue-a-run.md", "--resume auto"),
    "Which checkpoint is the best one?": ("how-to/best-checkpoint.md", "held[- ]out"),
    "How do I update?": ("how-to/update.md", r"\./update\.sh"),
    "What does this message mean?": ("how-to/something-went-wrong.md", r"\*\*`"),
}
"""The page, and what its answer must have."""


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("start", ["README.md", "docs/README.md"])  # the second is the site's start page, too
def test_a_newcomer_s_question_is_answered_in_one_click(start: str, question: str) -> None:
    page, answer = QUESTIONS[question]
    (row,) = re.findall(rf"^\| {re.escape(question)} \|(.*)\|$", (ROOT / start).read_text(), re.M)
    path, anchor = re.fullmatch(r" \[[^\]]+\]\(([\w./-]+)(?:#([\w-]+))? *\) ", row).groups()  # type: ignore[union-attr]
    assert ((ROOT / start).parent / path).resolve() == ROOT / "docs" / page
    text = (ROOT / "docs" / page).read_text()
    if anchor:
        headings = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-"): each for each in headings_of(text)}
        text = re.split(r"^#", text.partition(f"# {headings[anchor]}\n")[2], maxsplit=1, flags=re.M)[0]
    assert re.search(answer, text)


def headings_of(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", text, re.M)


FITTING = dict(re.findall(r"^\| `(\w+)`[^|]*\| ([\d,]+ \| [\d,]+ \| [\d.]+) \|$", FIT, re.M))
"""A configuration's figures in the tables of fit-a-card.md."""
SOME = ["sd3_medium_lora_8gb"]  # the others are slow, where no prediction of these sources is stored
MODELS = {
    "SD 1.5": "sd15", "SD3 Medium": "sd3_medium", "SD3.5 Medium": "sd35_medium", "SD3.5 Large": "sd35_large",
    "SDXL": "sdxl", "FLUX.2 klein": "klein", "Z-Image": "zimage", "Qwen-Image": "qwen_image",
}  # fmt: skip


@cache
def told(name: str, card: str = "L4") -> str:
    """What ``estimate`` prints for a configuration."""
    return estimate_config(Path(name), [], card)


def figure(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found[1]


@pytest.mark.parametrize("name", slow_but(SOME, FITTING))
def test_the_tables_of_the_cards_are_what_estimate_prints(name: str) -> None:
    said = told(name)
    assert FITTING[name].split(" | ") == [
        figure(r"\n +train +([\d,]+)", said),
        figure(r"the card must have +([\d,]+)", said),
        figure(r"host memory about ([\d.]+) GiB", said),
    ]


def readme_rows(title: str) -> list[list[str]]:
    """The cells of the rows of README's table that begins with a heading."""
    table = README.partition(f"| {title} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def test_the_readme_s_table_is_that_of_the_cards_in_gib() -> None:
    sizes = re.findall(r"(\d+) GB", README.partition("| what you train |")[2].partition("\n")[0])
    rows = readme_rows("what you train")
    assert len(rows) == 12
    shown = set()
    for what, *cells in rows:
        model, method = what.split(", ")[:2]
        stem = f"{MODELS[model]}_{'full' if method == 'all weights' else 'lora'}"
        for size, cell in zip(sizes, cells, strict=True):
            name = stem if stem in FITTING else f"{stem}_{size}gb"
            if cell:
                needed = float(FITTING[name].split(" | ")[1].replace(",", ""))
                assert cell == f"{needed / 1024:.1f}", name
                shown.add(name)
            else:
                assert stem in FITTING or name not in FITTING, name
    assert shown == set(FITTING) - {"sd21_lora"}


@pytest.mark.slow
def test_the_readme_s_times_and_prices_are_what_estimate_prints() -> None:
    names = {"SD3 Medium": "sd3_medium_lora_8gb", "SDXL": "sdxl_lora_24gb", "SD3.5 Large": "sd35_large_lora_24gb"}
    rows = readme_rows("LoRA")
    assert len(rows) == 4
    for what, *cells in rows:
        for card, cell in zip(("L4", "RTX4090"), cells, strict=True):
            said = told(names.get(what, "sd15_lora"), card)
            number, unit = re.search(r"the job of 1000 steps (\d+) (min|s) ", said).groups()  # type: ignore[union-attr]
            minutes = round(int(number) / (60 if unit == "s" else 1))
            price, hour = figure(r"costs ([\d.]+) ", said), figure(r"at ([\d.]+) USD per hour", said)
            assert cell == f"{minutes} min, {price} USD", (what, card)
            assert f"{float(hour):.2f} USD an hour" in README


def test_the_rented_machine_s_time_and_price_are_what_estimate_prints() -> None:
    said = told("sd3_medium_lora_8gb")
    minutes, price, low, high = re.search(
        r"the job of 1000 steps (\d+) min .*\n +costs ([\d.]+) \(([\d.]+) to ([\d.]+)\)", said
    ).groups()  # type: ignore[union-attr]
    prose = " ".join(RENTED.split())
    assert f"predicts {minutes} minutes for 1,000 steps at 1024 px, which cost {price} USD ({low} to {high};" in prose
    for line in re.findall(r"^ +(?:the card must have|it fits|L4 has|the job|costs) .*", RENTED, re.M):
        assert line.strip() in said, line
    on_a_t4 = figure(r"must have +([\d,]+)", told("sd3_medium_lora_8gb", "T4"))
    assert f"which needs {on_a_t4} of its 15,032 MiB" in prose
