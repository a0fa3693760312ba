"""Runs that train nothing: what `check` says of their settings, and the warning of those that have tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletune.config.explain import explain
from simpletune.config.load import read_config, validate
from simpletune.config.schema import TrainConfig
from simpletune.system.signals import handle_signals
from simpletune.training import trainer
from simpletune.training.train import train


def shipped(name: str, *changes: str) -> TrainConfig:
    return read_config(Path(name), list(changes), needs_data=False)[0]


IDLE = "steps trained nothing: the loss or its gradient is 0 in each"


@pytest.mark.parametrize("alpha, steps, warned", [(1e-40, 12, "10 "), (1e-40, 3, "3 "), (1.0, 12, None)])
def test_a_run_whose_gradient_is_always_zero_is_warned_of(
    alpha: float, steps: int, warned: str | None, tiny_config: dict
) -> None:
    options = {"adapter": tiny_config["adapter"] | {"alpha": alpha}, "train": {"steps": steps}}
    config = validate(tiny_config | options, "test")
    assert ("adapter.alpha 1e-40 is so small that nothing trains" in explain(config)) == (warned is not None)
    warnings = json.loads((train(config) / "summary.json").read_text())["warnings"]
    assert [each.partition("steps")[0] for each in warnings if IDLE in each] == ([warned] if warned else [])


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ({"min_snr_gamma": 1e-30}, "objective.min_snr_gamma 1e-30 is so small that nothing trains"),
        ({"min_snr_gamma": 5.0}, None),
        ({"prediction": "v", "zero_terminal_snr": True, "min_snr_gamma": 5.0, "min_timestep": 999}, "a weight of 0"),
        ({"prediction": "v", "zero_terminal_snr": True, "min_snr_gamma": 5.0, "min_timestep": 998}, None),
        ({"prediction": "v", "zero_terminal_snr": True, "min_timestep": 999}, None),
    ],
)
def test_check_names_levels_without_weight(objective: dict, said: str | None) -> None:
    config = shipped("demo_sdxl", *[f"objective.{name}={json.dumps(value)}" for name, value in objective.items()])
    shown = explain(config)
    assert ("nothing trains" in shown) == (said is not None) and (said or "") in shown


@pytest.mark.parametrize("change", ["optimizer.lr=1e-13", "train.clip_norm=1e-20"])
def test_check_names_a_factor_that_leaves_nothing(change: str) -> None:
    path, _, value = change.partition("=")
    assert f"{path} {value} is so small that nothing trains" in explain(shipped("demo", change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optimizer.name=adamw8bit", "optimizer.name adamw8bit gains nothing here: the state of adamw takes 0."),
        ("optimizer.name=paged_adamw8bit", "optimizer.name paged_adamw8bit gains nothing here"),
        ("optimizer.name=lion8bit", ""),
        ("optimizer.name=adamw", ""),
    ],
)
def test_check_says_where_state_in_8_bits_gains_nothing(change: str, said: str) -> None:
    shown = explain(shipped("demo", change))
    assert said in shown and ("gains nothing" in shown) == bool(said)


def test_a_large_state_in_8_bits_is_no_note() -> None:
    assert "gains nothing" not in explain(shipped("sd3_medium_full_24gb"))


@pytest.mark.parametrize("command", [True, False])
def test_a_command_freezes_what_it_has_set_up_before_the_first_step(
    command: bool, tiny_config: dict, monkeypatch
) -> None:
    """Only a command's process: one that trains again could not free the model before."""
    frozen: list[str] = []
    monkeypatch.setattr(trainer, "freeze", lambda: frozen.append("now"))
    monkeypatch.setattr(trainer.Metrics, "record_launch", lambda *_: frozen.append("step") or 1 / 0)
    config = validate(tiny_config, "test")
    with pytest.raises(ZeroDivisionError):
        if command:
            with handle_signals():
                train(config)
        else:
            train(config)
    assert frozen == (["now", "step"] if command else ["step"])
