"""The grid on simulated cards: its rows, its table, and its committed results, which predictions still match."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from slow_cases import slow_but

from benchmarks import dry, dry_rows
from benchmarks.dry_row import config_of, predict
from simpletune.engine.memory.cuda_libraries import attention_kernel
from simpletune.estimate.job_estimate import CONTEXT, needed_bytes
from simpletune.system.gpus import Card, find_card
from simpletune.system.options import UserError

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
L4 = find_card("L4")
FILES = sorted(RESULTS.glob("dry-*/memory.json"))
CHEAP = ("LoRA r16 fp32, bf16 products", "pictures to latents, 512 px", "LoRA r16 bf16, resident modulation")


def committed(file: Path) -> dict[str, dict]:
    return json.loads(file.read_text())["rows"]


def sizes_of(starts: Path) -> list[str]:
    return starts.with_name("sizes").read_text().split()


def card_in(file: Path) -> Card:
    return find_card(file.parent.name.removeprefix("dry-"))


def test_the_l4_has_sixty_rows_and_more_and_each_is_a_configuration() -> None:
    rows = dry_rows.rows_of(L4.capability)
    assert len(rows) >= 60 and len(set(rows.values())) == len(rows)
    assert {row.stage for row in rows.values()} == {"text", "latents", "train", "validate"}
    configs = {name: config_of(row) for name, row in rows.items()}
    assert configs["SD3.5 Large: LoRA r16 int8, plan"].model.architecture.blocks() == 38
    assert {1, 2, 4, 8} <= {config.train.batch_size for config in configs.values()}
    assert {512, 768, 1024, 1536, 2048} <= {config.resolution for config in configs.values()}


@pytest.mark.parametrize("name", ["T4", "A100-40GB", "RTX3090", "H100", "RTX5090"])
def test_other_cards_have_rows_of_their_own(name: str) -> None:
    card = find_card(name)
    rows = dry_rows.rows_of(card.capability)
    assert 3 <= len(rows) < 20
    assert card.has_bf16 or all(config_of(row).precision.compute == "fp32" for row in rows.values())


@pytest.mark.parametrize("file", FILES, ids=[file.parent.name for file in FILES])
def test_the_committed_results_meet_the_goals(file: Path) -> None:
    rows, card = committed(file), card_in(file)
    assert set(rows) == set(dry_rows.rows_of(card.capability))
    median, worst = dry.errors_of(rows)
    assert median <= dry.MEDIAN and worst <= dry.WORST
    for name, row in rows.items():
        told = round(needed_bytes(round(row["predicted_mib"] * 2**20)) / 2**20)  # users are told whole MiB
        assert row.get("squeezed_mib", row["reserved_mib"]) <= told - CONTEXT / 2**20, name


@pytest.mark.parametrize("file", FILES, ids=[file.parent.name for file in FILES])
def test_torch_chose_the_attention_that_the_prediction_counts(file: Path) -> None:
    card, stages = card_in(file), dry_rows.rows_of(card_in(file).capability)
    trained = {name: row for name, row in committed(file).items() if stages[name].stage == "train"}
    for name, row in trained.items():
        config = config_of(stages[name])
        chosen = attention_kernel(card.capability, config.precision.settled_compute, config.speed.attention)
        assert row["attention"] == chosen, name


def test_there_are_committed_results_for_every_capability() -> None:
    assert {card_in(file).capability for file in FILES} >= {(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)}


@pytest.mark.parametrize("name", slow_but(CHEAP[1:], CHEAP))
def test_a_prediction_of_today_is_the_committed_one(name: str) -> None:
    row = committed(RESULTS / "dry-l4" / "memory.json")[name]
    today = predict(dry_rows.ROWS[name], L4.capability)["predicted_mib"]
    assert today == pytest.approx(row["predicted_mib"], rel=1e-3)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A launcher that measures at most two rows a process; a file beside it counts the starts."""
    script = tmp_path / "run.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "for name, key in (('starts', 'DRY_CC'), ('sizes', 'DRY_GIB')):\n"
        "    open(pathlib.Path(__file__).with_name(name), 'a').write(os.environ[key] + '\\n')\n"
        "print('some warning')\n"
        "row = {'allocated_mib': 1000.0, 'reserved_mib': 1040.0, 'attention': 'flash', 'versions': {'torch': '0'}}\n"
        "for each in json.loads(sys.argv[-1])[:2]:\n"
        "    failed = 'precision.weights=nf4' in each['overrides']\n"
        "    print(json.dumps({'failed': 'CUDA out of memory'} if failed else row))\n"
    )
    monkeypatch.setenv("DRY_RUN", f"{sys.executable} {script}")
    monkeypatch.setattr(dry, "predict", lambda row, capability: {"predicted_mib": 1005.0, "at": "backward"})
    return tmp_path / "starts"


def test_rows_are_measured_several_in_a_process_and_gone_on_with(stub: Path, tmp_path: Path) -> None:
    dry.run(tmp_path, 9, "adamw8bit in backward, batch", ["L4"], False)
    assert stub.read_text() == "89\n89\n"
    dry.run(tmp_path, 9, "adamw8bit in backward, batch", ["L4"], False)
    assert stub.read_text() == "89\n89\n"  # nothing was missing
    text = (tmp_path / "dry-l4" / "memory.md").read_text()
    assert "no hardware" in text and "3 rows: median error 0.50%" in text
    assert "batch 8 | 1005.0 | 1000.0 | 0.500 | 1040.0 | 1,761 | 221 |  | flash |" in text


def test_a_row_that_reserves_more_than_the_tool_says_is_run_with_no_more(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry, "predict", lambda row, capability: {"predicted_mib": 700.0, "at": "backward"})
    dry.run(tmp_path, 9, "prompts", ["L4"], False)
    row = committed(tmp_path / "dry-l4" / "memory.json")["prompts"]
    assert row["spare_mib"] == 956 - 1040 and row["squeezed_mib"] == 1040.0
    assert stub.read_text() == "89\n89\n" and sizes_of(stub) == ["22.0200", "0.9336"]


def test_rows_are_predicted_again_without_being_measured(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dry.run(tmp_path, 9, "prompts", ["RTX5090"], False)
    monkeypatch.setattr(dry, "predict", lambda row, capability: {"predicted_mib": 1010.0, "at": "backward"})
    dry.run(tmp_path, 9, "", ["RTX5090"], True)
    assert stub.read_text() == "120\n"
    assert committed(tmp_path / "dry-rtx5090" / "memory.json")["prompts"]["error"] == 1.0


def test_what_cannot_be_measured_is_said(stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="nf4, plan, small states: CUDA out of memory. Choose a larger card"):
        dry.run(tmp_path, 9, "LoRA r16 nf4, plan, small states", ["L4"], False)
    monkeypatch.setenv("DRY_RUN", "true")
    with pytest.raises(UserError, match="measured nothing for prompts"):
        dry.run(tmp_path, 9, "prompts", ["L4"], False)
    monkeypatch.setenv("DRY_RUN", str(tmp_path / "none"))
    with pytest.raises(UserError, match="none does not exist. Run make dry"):
        dry.run(tmp_path, 9, "prompts", ["L4"], False)
