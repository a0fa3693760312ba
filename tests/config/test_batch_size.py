"""``train.global_batch`` and ``train.batch_size: auto``: what divides a step, predicted, then tried out."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launcher
from safetensors.torch import load_file

from simpletune.apps.cli.main import main
from simpletune.config.batches import share_of_process, sizes_of, smaller_batch, with_batch
from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.snapshot import round_to_block
from simpletune.estimate import auto_settings
from simpletune.estimate.auto_settings import choose_batch, peak_of
from simpletune.estimate.estimate_command import resolve_auto
from simpletune.estimate.simulate.simulate import simulate
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.gpus import find_card
from simpletune.system.options import ConfigError, UserError
from simpletune.training.train import train

SIZE = (64, 64)


def config_of(tiny_config: dict[str, Any], **changes: Any) -> TrainConfig:
    data = copy.deepcopy(tiny_config)
    for section, values in changes.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return validate(data, "test")


def auto(tiny_config: dict[str, Any], budget: float | None = 1.0, **train: Any) -> TrainConfig:
    """A run of two steps of four pictures, whose micro-batch is to be chosen."""
    settings = {"steps": 2, "batch_size": "auto", "global_batch": 4, **train}
    return config_of(tiny_config, train=settings, memory={"budget_gib": budget})


def resolved(config: TrainConfig) -> TrainConfig:
    memory = config.memory.model_copy(update={"modulation": "resident"})
    return resolve_folders(config.model_copy(update={"memory": memory}))


# Rules


PER_UPDATE = {"optimizer_in_backward": True}


@pytest.mark.parametrize(
    ("memory", "train", "problem"),
    [
        ({}, {"batch_size": "auto"}, "train.batch_size: auto lets the card decide how to divide train.global_batch"),
        ({}, {"global_batch": 8, "gradient_accumulation": 2}, "global_batch 8 and gradient_accumulation 2"),
        ({}, {"global_batch": 12, "batch_size": 5}, "5 does not divide train.global_batch 12. Use 4, or auto"),
        ({}, {"global_batch": 2, "batch_size": 5}, "Use 2, or auto"),
        ({}, {"batch_size": "large"}, "train.batch_size"),
        (PER_UPDATE, {"clip": "per_parameter", "reduce": "exact"}, "train.reduce: "),
        (PER_UPDATE, {"clip": "per_parameter", "global_batch": 2}, "train.global_batch: "),
        ({"budget_gib": 1.0}, {}, "only checkpointing auto and train.batch_size auto use the budget"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tiny_config: dict, memory: dict, train: dict, problem: str
) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(tiny_config, memory=memory, train=train)
    assert problem in str(error.value)


def test_a_step_is_divided_by_the_global_batch(tiny_config: dict) -> None:
    for batch_size, micros in ((1, 12), (3, 4), (12, 1)):
        train_ = config_of(tiny_config, train={"batch_size": batch_size, "global_batch": 12}).train
        assert (train_.micro_batch, train_.accumulation) == (batch_size, micros)
    assert "up to 12 pictures" in explain(config_of(tiny_config, train={"batch_size": "auto", "global_batch": 12}))
    assert auto(tiny_config).memory.checkpointing != "auto"
    config = config_of(tiny_config, train={"batch_size": 2, "global_batch": 24})
    assert share_of_process(config, 1) is config
    assert [share_of_process(config, processes).train.accumulation for processes in (2, 5, 12)] == [6, 3, 1]


def test_candidates_give_every_process_as_many_and_at_most_half_comes_next(tiny_config: dict) -> None:
    assert sizes_of(12, 1) == [1, 2, 3, 4, 6, 12]
    assert sizes_of(12, 2) == [1, 2, 3, 6]
    assert sizes_of(12, 4) == [1, 3]
    assert sizes_of(12, 5) == [1, 2]  # never as many
    assert sizes_of(2, 4) == [1]  # which is refused elsewhere
    config = config_of(tiny_config, train={"batch_size": 6, "global_batch": 12})
    for processes in (1, 4):
        half = smaller_batch(config, processes)
        assert half is not None and half.train.micro_batch == 3
    assert smaller_batch(with_batch(config, 1), 1) is None


# Prediction


def test_the_largest_that_fits_is_chosen_and_not_predicted_again(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = resolved(auto(tiny_config, global_batch=2))
    peaks = {size: peak_of(with_batch(config, size), SIZE) for size in (1, 2)}
    assert peaks[1] < peaks[2]

    def never(*_: object) -> None:
        raise AssertionError("the prediction is kept")

    monkeypatch.setattr(auto_settings, "simulate", never)
    for size, peak in peaks.items():
        for spare, expected in ((0, size), (-1, max(1, size // 2))):
            memory = config.memory.model_copy(update={"budget_gib": (peak + spare) / 2**30})
            settled = choose_batch(config.model_copy(update={"memory": memory}), SIZE)
            assert settled.train.micro_batch == expected
    assert "batch   auto: 1 micro-batch of 2 pictures a step, predicted peak" in capsys.readouterr().out
    assert choose_batch(settled, SIZE) is settled


def test_sums_by_the_tree_are_predicted(tiny_config: dict) -> None:
    """Four micro-batches keep the sums of two levels beside the gradients of the last."""
    fast, exact = (
        simulate(resolved(config_of(tiny_config, train={"gradient_accumulation": 4, "reduce": how})), SIZE)
        for how in ("fast", "exact")
    )
    sums = sum(round_to_block(4 * math.prod(shape)) for shape in exact.trained.values())
    more = exact.phases["backward"].bytes - fast.phases["backward"].bytes
    assert sums <= more <= 2 * sums and sums > 0  # of those of the last block's last text layer there are no gradients


def test_estimate_chooses_by_the_card_and_plan_asks_for_a_number(
    tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = auto(tiny_config, budget=None)
    file = tmp_path / "auto.json"
    file.write_text(config.model_dump_json(by_alias=True))
    for command in (["estimate", str(file)], ["estimate", "--compare", str(file)]):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert "train.batch_size: auto depends on the card's memory, and there is no card here" in told
    with monkeypatch.context() as patch:
        patch.setattr(auto_settings, "peak_of", lambda config, size: config.train.micro_batch * 2**33)
        assert resolve_auto(config, find_card("L4"), 0).train.micro_batch == 2
        assert resolve_auto(config, find_card("L4"), 8 * 2**30).train.micro_batch == 1
        assert main(["estimate", "--compare", str(file), "--device", "L4"]) == 0  # as for one configuration
        assert "batch   auto: 2 micro-batches of 2 pictures" in capsys.readouterr().out
    assert main(["plan", str(file), "--device", "L4"]) == 2
    assert "Add train.batch_size=N" in capsys.readouterr().err
    with pytest.raises(UserError, match="this run is on the CPU. Set memory.budget_gib too, or set a number"):
        train(config)


# Training


def losses(run: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in read_metrics(run)]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.checkpoint_folder(run, step) / checkpoint.TRAINABLE)


def test_the_number_is_part_of_the_run_which_never_chooses_anew(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = resolved(auto(tiny_config, batch_size="auto"))
    monkeypatch.setattr(auto_settings, "peak_of", lambda config, size: config.train.micro_batch * 2**29)
    run = train(config)
    assert json.loads((run / "config.json").read_text())["train"]["batch_size"] == 2
    assert "batch   auto: 2 micro-batches of 2 pictures" in capsys.readouterr().out
    monkeypatch.setattr(auto_settings, "choose_batch", None)
    assert train(config, resume="auto") == run and "is already finished" in capsys.readouterr().out
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 3})})
    train(longer, resume="latest")
    assert json.loads((run / "config.json").read_text())["train"]["batch_size"] == 2
    other = with_batch(longer, 4)
    with pytest.raises(UserError, match="train.batch_size: 2 -> 4"):
        train(other, resume="latest")


@pytest.fixture
def everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As predicted."""
    monkeypatch.setattr(auto_settings, "peak_of", lambda config, size: 1)


def too_large(monkeypatch: pytest.MonkeyPatch, most: int, at: tuple[int, int] | None = None) -> list[int]:
    """Let the device be full with more than ``most`` pictures of one latent size; returns the rows of all passes."""
    honest, rows = TrainStep.compute, []

    def compute(self: TrainStep, batch: Batch) -> torch.Tensor:
        rows.append(len(batch.z_0))
        loss = honest(self, batch)
        if len(batch.z_0) > most and at in (None, tuple(batch.z_0.shape[2:])):
            raise torch.OutOfMemoryError("full")
        return loss

    monkeypatch.setattr(TrainStep, "compute", compute)
    return rows


@pytest.mark.usefixtures("everything_fits")
@pytest.mark.parametrize("reduce", ["fast", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_micro_batch_that_does_not_fit_is_halved_before_the_first_step(
    tiny_config: dict, reduce: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing of the trial is left: the run is, bit for bit, one with that number."""
    plain = train(auto(tiny_config | {"name": "plain"}, budget=None, batch_size=2, reduce=reduce))
    capsys.readouterr()
    config = auto(tiny_config | {"name": "guarded"}, reduce=reduce)
    plan_sizes = {tuple(row["bucket"]) for row in json.loads((plain / "data.json").read_text())["samples"]}
    smallest = min(plan_sizes, key=math.prod)
    rows = too_large(monkeypatch, 2, (smallest[1] // 8, smallest[0] // 8))
    run = train(config)
    said = capsys.readouterr().out
    width, height = smallest
    assert f"out of memory with 4 pictures of {width} x {height} px: starts again with 2 micro-batches of 2" in said
    assert json.loads((run / "config.json").read_text())["train"]["batch_size"] == 2
    assert rows[0] == 4 and rows[-1] == 2
    assert losses(run) == losses(plain)
    torch.testing.assert_close(weights(run, 2), weights(plain, 2), rtol=0, atol=0)


@pytest.mark.usefixtures("everything_fits")
def test_where_not_even_one_picture_fits_the_run_ends(tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    too_large(monkeypatch, 0)
    with pytest.raises(UserError, match="the device's memory is full with 1 picture of .* in a micro-batch") as error:
        train(auto(tiny_config, global_batch=2))
    assert error.value.code == 5


@pytest.mark.slow
def test_two_processes_agree_on_a_number(launcher: Launcher, tiny_config: dict) -> None:
    data = json.loads(auto(tiny_config, reduce="exact").model_dump_json(by_alias=True))
    outcome = launcher.train(data, data)
    assert outcome.codes == [0, 0], outcome.said
    run = Path(data["output"]["runs"]) / data["name"]
    assert json.loads((run / "config.json").read_text())["train"]["batch_size"] == 2  # two micro-batches, one each
