"""Runs that change their number of processes end in the same bits (``train.reduce`` ``exact``)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launcher, Outcome
from PIL import Image
from safetensors.torch import load_file
from tiny_runs import merged
from two_processes import of_two_blocks, run_of

from simpletune.config.load import validate
from simpletune.runs import checkpoint
from simpletune.runs.checkpoint_folders import read_state, with_checksum
from simpletune.runs.folder import read_metrics
from simpletune.training.train import train

PLAN = {"modulation": "plan", "modulation_window": 3}
STREAMED = {"resident_blocks": 1, "offload_checkpoint_inputs": True}
INT8 = {"weights": "int8", "compute": "fp32"}
CASES: dict[str, dict[str, Any]] = {
    "streamed": {"memory": STREAMED},
    "plan": {"memory": PLAN | STREAMED, "precision": INT8},
    "checkpointed": {"memory": {"checkpointing": "all", "vae_tile": 128, "crop_positions": True}},
    "nf4": {"precision": {"weights": "nf4", "compute": "fp32"}, "memory": PLAN},
    "bf16": {"precision": {"weights": "bf16"}, "optimizer": {"name": "adamw_bf16"}, "adapter": {"dtype": "bf16"}},
    "fp16": {"precision": {"weights": "int8", "compute": "fp16"}, "optimizer": {"name": "adamw8bit"}},
    "prior": {"prior": {"method": "base_prediction", "prompt": "a picture"}},
    "dora": {"adapter": {"method": "dora", "rank": 2, "dropout": 0.0}},
    "full": {"adapter": {"method": "full"}, "optimizer": {"name": "adamw", "lr": 0.001}},
    "schedule_free": {"optimizer": {"name": "adamw_schedule_free"}, "ema": None},
    "per_parameter": {"train": {"clip": "per_parameter", "clip_norm": 0.01}},
    "skip": {"train": {"on_nonfinite": "skip"}},
}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with two buckets, whose epoch of 11 micro-batches ends with a step of three."""
    place = tmp_path_factory.mktemp("elastic")
    data = of_two_blocks(place, count=11, pixels=64)
    for file in sorted((place / "pictures").glob("*.png"))[:4]:
        Image.open(file).resize((96, 32)).save(file)
    return merged(
        data,
        name="one",
        adapter={"dropout": 0.2},
        train={"steps": 6, "gradient_accumulation": 4, "reduce": "exact"},
        validation={"prompts": []},
        profile={"max_traces": 0},
    )


def changed(ground: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    """Another method has no options of the ground's."""
    kept = {section: values for section, values in ground.items() if "method" not in (changes.get(section) or {})}
    return merged(kept, name=name, **changes)


def trained(launcher: Launcher, data: dict[str, Any], processes: int, **how: Any) -> Outcome:
    outcome = launcher.train(*[data] * processes, **how)
    assert outcome.codes == [0] * processes, outcome.said
    return outcome


def bits(run: Path, step: int = 6) -> dict[str, torch.Tensor]:
    """Weights, optimizer and average of a checkpoint, as integers, so that signs of zero count."""
    folder = checkpoint.checkpoint_folder(run, step)
    files = (folder / name for name in (checkpoint.TRAINABLE, checkpoint.OPTIMIZER, checkpoint.AVERAGE))
    found = {
        f"{file.name}:{name}": tensor for file in files if file.exists() for name, tensor in load_file(file).items()
    }
    return {name: tensor.contiguous().view(-1).view(torch.uint8) for name, tensor in found.items()}


def require_same_bits(run: Path, other: Path) -> None:
    mine, others = bits(run), bits(other)
    assert mine.keys() == others.keys()
    assert [name for name in mine if not torch.equal(mine[name], others[name])] == []
    rows, other_rows = ([{**row, "seconds": 0} for row in read_metrics(each)] for each in (run, other))
    assert rows == other_rows and len(rows) == 6


@pytest.fixture(scope="module")
def one(ground: dict[str, Any]) -> Path:
    """One process, never stopped."""
    return train(validate(ground, "test"))


def killed(launcher: Launcher, data: dict[str, Any], processes: int) -> None:
    """The first process, which has saved step 4, is killed at its beginning; a launcher then ends the others."""
    outcome = launcher.train(*[data] * processes, moments={0: "step.begun:5=kill"})
    assert outcome.codes[0] == -9 and 0 not in outcome.codes, outcome.said


def test_two_processes_and_a_change_to_one_give_the_bits_of_one(
    launcher: Launcher, one: Path, ground: dict[str, Any]
) -> None:
    data = changed(ground, "two-then-one")
    killed(launcher, data, 2)
    said = trained(launcher, data, 1, resume="auto").said[0]
    assert "resume  changed processes: 2 -> 1 (train.reduce exact: the same bits)" in said and "step 4 of 6" in said
    require_same_bits(run_of(data), one)


def test_the_sum_in_their_order_differs_in_the_last_bits_only(one: Path, ground: dict[str, Any]) -> None:
    """So the tests of exact sums can fail."""
    fast = train(validate(changed(ground, "fast", train={"reduce": "fast"}), "test"))
    assert any(not torch.equal(a, b) for a, b in zip(bits(fast).values(), bits(one).values(), strict=True))
    losses = [[row[key] for row in read_metrics(run) for key in ("loss", "grad_norm")] for run in (fast, one)]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-6)


def test_a_checkpoint_of_several_processes_of_an_earlier_version_is_refused(
    launcher: Launcher, one: Path, ground: dict[str, Any]
) -> None:
    """Its steps had ``gradient_accumulation`` micro-batches for each process."""
    file = checkpoint.checkpoint_folder(one, 6) / checkpoint.STATE
    whole = file.read_text()
    state = {name: value for name, value in read_state(file).items() if name != "micro_batches"}
    data = changed(ground, "one", train={"steps": 8})
    try:
        file.write_text(with_checksum({**state, "processes": 2}))
        outcome = launcher.train(data, data, resume="latest")
        assert outcome.codes[0] == 2
        assert "was made by 2 processes with an earlier version, in which the samples of a step" in outcome.said[0]
    finally:
        file.write_text(whole)


@pytest.mark.slow
@pytest.mark.parametrize("later", [1, 2])
def test_four_processes_and_what_is_saved_on_four(
    launcher: Launcher, one: Path, ground: dict[str, Any], later: int
) -> None:
    data = changed(ground, f"four-then-{later}")
    killed(launcher, data, 4)
    trained(launcher, data, later, resume="auto")
    require_same_bits(run_of(data), one)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_levers_and_options(launcher: Launcher, ground: dict[str, Any], case: str) -> None:
    """One, two and four processes, the last of which go on as one."""
    alone, two, four = (changed(ground, f"{case}-{count}", **CASES[case]) for count in (1, 2, 4))
    trained(launcher, alone, 1)
    trained(launcher, two, 2)
    killed(launcher, four, 4)
    trained(launcher, four, 1, resume="auto")
    for other in (two, four):
        require_same_bits(run_of(other), run_of(alone))


@pytest.mark.slow
def test_random_kills_and_numbers_of_processes_end_in_the_same_bits(
    launcher: Launcher, one: Path, ground: dict[str, Any]
) -> None:
    """Each start has one, two or four processes, of which one or all are killed at a random moment."""
    chance, data = random.Random(20), changed(ground, "torn")
    moments = ["step.begun", "step.updated", "checkpoint.weights", "checkpoint.before-rename", "model.loaded"]
    kills = 0
    while kills < 10:
        processes = chance.choice([1, 2, 4])
        hit = range(processes) if chance.random() < 0.5 else [chance.randrange(processes)]
        moment = f"{chance.choice(moments)}:{chance.randint(1, 3)}=kill"
        outcome = launcher.train(*[data] * processes, resume="auto", moments=dict.fromkeys(hit, moment))
        kills += -9 in outcome.codes
        if outcome.codes == [0] * processes:
            require_same_bits(run_of(data), one)
            data = changed(ground, f"torn-{kills}")
    trained(launcher, data, 2, resume="auto")
    require_same_bits(run_of(data), one)
