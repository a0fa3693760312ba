"""Counts in words, and what is said of a run that draws no pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.system.options import plural
from simpletune.training.train import train

PLURALS_OF_ONE = re.compile(
    r"(?<![\d.,/@-])1 (steps|pictures|prompts|files|tokens|captions|samples|epochs|buckets|batches|blocks|tensors|"
    r"layers|processes|images|lines|groups|parameters|problems|models)\b"
)


@given(st.integers(0, 10**7))
def test_one_has_no_plural(count: int) -> None:
    word = plural(count, "batch", "batches")
    assert word == f"{count:,} {'batch' if count == 1 else 'batches'}"
    assert plural(count, "step") == f"{count:,} {'step' if count == 1 else 'steps'}"


def test_a_run_of_one_of_each_says_no_plural_of_one(
    tiny_config: dict,
    tiny_images: Path,
    write_config: Callable[[object], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run on one picture: one step, one bucket, one epoch."""
    folder = tmp_path / "one"
    folder.mkdir()
    first = sorted(tiny_images.glob("*.png"))[0]
    (folder / first.name).write_bytes(first.read_bytes())
    (folder / "000.txt").write_text("a red disc\n")
    tiny_config["data"]["path"] = str(folder)
    tiny_config["output"] |= {"cache": str(tmp_path / "cache"), "report": True}
    tiny_config |= {
        "train": {"epochs": 1},
        "profile": {"max_traces": 1},
        "schedule": {"name": "linear", "warmup_steps": 1},
        "checkpoint": {"every": 1, "keep_last": 1},
        "validation": {"prompts": ["a red disc"], "steps": 1, "loss_samples": 1, "every": 1},
    }
    file = str(write_config(tiny_config))
    for words in (["check", file], ["data", file, "--out", str(tmp_path / "look")], ["train", file]):
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert not PLURALS_OF_ONE.search(shown), PLURALS_OF_ONE.search(shown)
        assert "1 picture" in shown and "1 step" in shown
    run = Path(tiny_config["output"]["runs"]) / "tiny"
    pages = [run / "README.md", run / "report.md", *tmp_path.glob("profiles/**/*.md"), tmp_path / "look" / "data.html"]
    for page in pages:
        found = PLURALS_OF_ONE.search(page.read_text())
        assert not found, f"{page.name}: {found}"
    assert json.loads((run / "summary.json").read_text())["steps_per_epoch"] == 1


@pytest.mark.parametrize(("loss_samples", "look"), [(2, "evaluation at 2"), (0, "")])
def test_a_run_without_prompts_says_that_it_draws_none(
    loss_samples: int, look: str, tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config["validation"] = {"prompts": [], "loss_samples": loss_samples, "every": 2}
    monkeypatch.setattr("simpletune.system.console.PLAIN_EVERY", 0.0)
    run = train(validate(tiny_config, "test"))
    assert not (run / "samples").exists()
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.startswith("train   step")]
    assert "pictures at" not in "".join(lines) and any(line.endswith(look) for line in lines)
    assert str(run / "samples") not in shown and "none (validation.prompts is empty)" in shown
