"""Every field at a value that is not its default changes plan, loss, file or words, or a row says why not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import field_effects
from benchmarks.field_effects import Effects, numbered
from benchmarks.field_values import GROUPS, KINDS, SD3, Group, Row, schema_fields, sections
from simpletune.config.schema import TrainConfig

ROOT = Path(__file__).resolve().parents[2]


def title(row: tuple[int, str]) -> str:
    number, name = row
    return f"{GROUPS[number].owner}.{name}"


def test_every_field_has_one_row() -> None:
    have = Counter((group.owner, name) for group in GROUPS for name in group.rows)
    assert not [each for each, count in have.items() if count > 1]
    assert have.keys() == set(schema_fields(TrainConfig)) - set(sections())
    assert {"LoraLayers.alpha", "Huber.c", "Stream.format"} <= {".".join(each) for each in have}  # of lists and unions


def test_a_row_without_a_comparison_says_why_and_by_which_test() -> None:
    for group in GROUPS:
        for name, row in group.rows.items():
            words = row.differs.rstrip(".").split()
            assert row.differs in KINDS or (len(words) > 2 and row.differs.endswith(".")), (group.owner, name)
            assert all((ROOT / word).is_file() for word in words if word.startswith("tests/")), (group.owner, name)


def test_the_page_has_every_row() -> None:
    text = (ROOT / field_effects.PAGE).read_text()
    found = dict.fromkeys(numbered(), {"file": ["a name"]})
    rows = [line for line in field_effects.page(found, 60.0).splitlines() if line.startswith("| `")]
    kept = [line for line in text.splitlines() if line.startswith("| `")]
    assert [line.rsplit("|", 2)[0] for line in rows] == [line.rsplit("|", 2)[0] for line in kept], (
        "run python -m benchmarks.field_effects"
    )
    for line, (number, name) in zip([line for line in kept if " | - " not in line], numbered(), strict=True):
        assert GROUPS[number].rows[name].differs in line.rsplit("|", 2)[1], line


@pytest.fixture(scope="module")
def effects(tmp_path_factory: pytest.TempPathFactory) -> Effects:
    folder = tmp_path_factory.mktemp("effects")
    field_effects.write_inputs(folder / "inputs")
    return Effects(folder, folder / "inputs")


@pytest.mark.slow
def test_the_same_run_differs_in_nothing(effects: Effects) -> None:
    validated: dict[str, object] = {"validation.prompts": ["a cat"], "validation.steps": 2, "profile.max_traces": 1}
    same = Row(SD3["adapter"], "nothing", validated | {"tracking.tensorboard": True, "output.report": True})
    assert effects.of(Group("TrainConfig", "", SD3, {"adapter": same}), "adapter") == {}


@pytest.mark.slow
@pytest.mark.parametrize("row", numbered(), ids=title)
def test_a_field_has_its_effect(effects: Effects, row: tuple[int, str]) -> None:
    number, name = row
    found = effects.of(GROUPS[number], name)
    torch.set_num_threads(1)  # speed.threads sets another number
    assert GROUPS[number].rows[name].differs in found, found
