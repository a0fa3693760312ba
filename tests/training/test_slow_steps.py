"""Steps that become slower while the card's memory is full: when a run says so, and when it does not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from simpletune.config.load import validate
from simpletune.runs.folder import read_metrics
from simpletune.system.options import Json
from simpletune.training import metrics, slow_steps, trainer
from simpletune.training.slow_steps import FIRST, LAST, SlowSteps
from simpletune.training.train import train

GIB = 2**30
SMALL, LARGE = (torch.Size((1, 16, 64, 64)),), (torch.Size((1, 16, 128, 128)),)


def said(
    monkeypatch: pytest.MonkeyPatch, steps: Iterable[tuple[float, slow_steps.Shapes]], free: float = 1.0,
    windows: bool = True,
) -> list[str]:  # fmt: skip
    monkeypatch.setattr(slow_steps, "is_under_wsl", lambda: windows)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), 12 * GIB))
    slow = SlowSteps(torch.device("cuda"))
    return [text for seconds, shapes in steps if (text := slow.see(seconds, shapes))]


def steps(seconds: float, count: int, shapes: slow_steps.Shapes = LARGE) -> list[tuple[float, slow_steps.Shapes]]:
    return [(seconds, shapes)] * count


def test_slow_steps_beside_full_memory_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = said(monkeypatch, [*steps(1.0, FIRST), *steps(2.5, 200)])
    assert len(found) == 1 and "steps take 2.5 times as long as at first, and 11.0 GiB of the card's 12.0" in found[0]
    assert "the driver may be moving memory to the host (Windows, WSL)" in found[0]
    assert said(monkeypatch, [*steps(1.0, FIRST), *steps(1.9, 200)]) == []


def test_other_programs_that_slow_the_card_down_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute beside it, and the memory suffices for all; or this is no Windows, where memory stays."""
    slower = [*steps(1.0, FIRST), *steps(2.5, 200)]
    assert said(monkeypatch, slower, free=4.0) == said(monkeypatch, slower, windows=False) == []
    assert len(said(monkeypatch, slower, windows=True)) == 1


def test_a_few_long_steps_are_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a validation, or of a plan's window."""
    assert said(monkeypatch, [*steps(1.0, FIRST), *(steps(1.0, LAST - 5) + steps(30.0, 5)) * 20]) == []


def test_steps_are_compared_with_those_of_their_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = [*steps(1.0, FIRST - 5, SMALL), *steps(4.0, 5)]
    assert said(monkeypatch, [*mixed, *steps(4.0, 200)]) == []
    assert len(said(monkeypatch, [*mixed, *steps(2.5, 200, SMALL)])) == 1
    assert said(monkeypatch, [*steps(1.0, FIRST, SMALL), *steps(4.0, 200)]) == [], "none so large was seen"


def test_micro_batches_of_buckets_that_never_meet_again_are_compared_with_most_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buckets = [tuple(torch.Size((1, 16, 96 + at, 96 - at)) for at in (a, b)) for a in range(20) for b in range(20)]
    first = [(1.0, each) for each in buckets[:FIRST]]
    assert len(said(monkeypatch, [*first, *((2.5, each) for each in buckets[FIRST:])])) == 1
    assert said(monkeypatch, [*first, *((1.5, each) for each in buckets[FIRST:])]) == []


def test_a_run_gives_its_steps_without_waits_for_data_and_warns(
    tiny_config: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, slow_steps.Shapes]] = []

    class Seen(SlowSteps):
        def see(self, seconds: float, shapes: slow_steps.Shapes) -> str | None:
            seen.append((seconds, shapes))
            return "steps are slow" if len(seen) == 2 else None

    class Slow(trainer.Prefetcher):
        def step(self, step: int) -> list:
            time.sleep(0.2)
            return super().step(step)

    monkeypatch.setattr(metrics, "SlowSteps", Seen)
    monkeypatch.setattr(trainer, "Prefetcher", Slow)
    run = train(validate(tiny_config | {"train": {"steps": 3, "gradient_accumulation": 2}}, "test"))
    took = [row["seconds"] for row in read_metrics(run)]
    assert len(seen) == 3 and all(whole - own >= 0.2 for whole, (own, _) in zip(took, seen, strict=True))
    assert all(len(shapes) == 2 for _, shapes in seen)
    assert "steps are slow" in json.loads((Path(run) / "summary.json").read_text())["warnings"]
