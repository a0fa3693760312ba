"""The host's part of a step: causes without those within them, and a row of the table from a simulated card."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import host, memory
from benchmarks.host_row import Causes
from simpletune.estimate.timing.datasheet import CORE, HOST


def test_a_cause_does_not_count_the_causes_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 3.5, 4.5, 10.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    causes = Causes()
    launch = causes.timed("launch", lambda: None)
    causes.timed("operators", lambda: (launch(), launch()))()
    assert causes.seconds == {"launch": 2.0 + 1.0, "operators": 10.0 - 3.0}


def test_a_row_compares_with_fp32_lora_and_int8_with_bf16() -> None:
    row = host.compared({"bf16": 0.1, "int8": 0.15, "diffusers": 0.1, "diffusers_fp32": 0.2})
    assert (row["ratio"], row["int8_ratio"]) == (0.5, 1.5)
    plain = host.ROWS["SD 1.5, not checkpointed"]
    assert not plain.checkpoints and host.ROWS["SD 1.5, checkpointed"].checkpoints
    assert ["precision.weights=bf16" in host.overrides_of(plain, name) for name in ("bf16", "int8")] == [True, False]
    assert {"ratio", "int8_ratio"} & set(host.compared({"bf16": 0.1})) == set(), "of a row of ours alone"


def test_every_row_and_contender_is_a_configuration() -> None:
    for name, row in host.ROWS.items():
        for each in row.contenders:
            config = memory.config_of(host.overrides_of(row, each))
            weights = each.removesuffix("_graphs").replace("plan", "int8").removesuffix("_products")
            assert config.precision.weights == (weights if weights in ("nf4", "int8") else "bf16")
            assert (config.speed.graphs is True) == each.endswith("_graphs")
            assert (config.memory.checkpointing == "none") == ("not checkpointed" in name)


def test_the_host_s_seconds_are_predicted_as_measured() -> None:
    """Without the driver's part, which the stub leaves out."""
    rows = json.loads((Path(host.__file__).parent / "results" / "cpu" / "host.json").read_text())["rows"]
    for name, row in rows.items():
        assert CORE == pytest.approx(row["core"], rel=0.1)
        for each, tasks in row["tasks"].items():
            predicted = sum(count * HOST[task] for task, count in tasks.items())
            assert predicted == pytest.approx(row[each], rel=0.15), f"{name}, {each}: now {host.fitted(rows.values())}"
