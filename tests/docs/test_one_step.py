"""docs/explanation/one-step.md names the files and functions that a training step passes through, in their order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

import simpletune
from simpletune.commands.train.train import train
from simpletune.config.load import read_config

PACKAGE = Path(simpletune.__file__).parent
PAGE = PACKAGE.parent / "docs" / "explanation" / "one-step.md"
SPINE = ("training/", "stages/step/")
"""Where every function of a step is on the page; of other folders every file is."""


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """``file::function`` of the package by their first call between the ends of the third and the fourth update of the
    demo, without functions inside functions. What follows the update in a step stands last."""
    place = tmp_path_factory.mktemp("step")
    folders = [f"output.{name}={place}/{name}" for name in ("runs", "profiles", "cache")]
    short = ["train.steps=5", "schedule.warmup_steps=0", "validation.prompts=[]", "validation.loss_samples=0"]
    config, _ = read_config(Path("configs/demo.json"), [*folders, *short, "output.report=false"])
    found: dict[str, None] = {}
    updates: list[object] = []

    def called(frame: FrameType, event: str, argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents and "<" not in frame.f_code.co_qualname:
            found[f"{file.relative_to(PACKAGE)}::{frame.f_code.co_qualname}"] = None

    def updated(*_: object) -> None:
        updates.append(None)
        sys.setprofile(called if len(updates) == 3 else None)

    hook = register_optimizer_step_post_hook(updated)
    try:
        train(config)
    finally:
        hook.remove()
        sys.setprofile(None)
    assert len(updates) >= 5  # the prediction for the traces simulates some more
    calls = list(found)
    begins = next(place for place, call in enumerate(calls) if "before_step" in call)
    return calls[begins:] + calls[:begins]


def test_the_page_names_functions_in_the_order_of_a_step_every_file_and_the_whole_spine(passed: list[str]) -> None:
    text = PAGE.read_text()
    named = re.findall(r"`([\w/]+\.py::[\w.]+)`", text)
    assert [name for name in named if name not in passed] == []
    assert named == sorted(named, key=passed.index)
    assert sorted({call.partition("::")[0] for call in passed} - set(re.findall(r"[\w/]+\.py", text))) == []
    assert [call for call in passed if call.startswith(SPINE) and f"`{call}`" not in text] == []
