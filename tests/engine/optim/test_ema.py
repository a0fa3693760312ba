"""The average of the weights: its arithmetic, what is made of it, and that resuming is exact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from slow_cases import slow_but
from torch import nn

from simpletune.config.load import validate
from simpletune.engine.optim.ema import Ema
from simpletune.runs import checkpoint
from simpletune.system.options import UserError
from simpletune.training.train import train


def run_with(config: dict, resume: str | None = None, **changes: object) -> Path:
    return train(validate(config | changes, "test"), resume)


def saved(run: Path, step: int, file: str) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.checkpoint_folder(run, step) / file)


def test_the_average_is_that_of_the_formula_and_is_exported(tiny_config: dict) -> None:
    many = {"every": 1, "keep_last": 9}
    run = run_with(tiny_config, ema={"decay": 0.3}, checkpoint=many, train={"steps": 6}, optimizer={"lr": 0.05})
    steps = [saved(run, step, checkpoint.TRAINABLE) for step in range(1, 7)]
    result = load_file(run / "pytorch_lora_weights.safetensors")
    assert any((steps[0][name] != steps[5][name]).any() for name in steps[0])
    for name in steps[0]:
        average = steps[0][name].double()  # the first step's decay is 0
        for number in range(2, 7):
            decay = min(0.3, number / (9 + number))
            average = decay * average + (1 - decay) * steps[number - 1][name].double()
            kept = saved(run, number, checkpoint.AVERAGE)[name]
            torch.testing.assert_close(kept, average.float(), rtol=1e-5, atol=1e-7)
        assert torch.equal(result[f"transformer.{name.replace('.default.', '.')}"], kept)
    assert any((saved(run, 6, checkpoint.AVERAGE)[name] != steps[5][name]).any() for name in steps[0])


@pytest.mark.parametrize("adapter", slow_but(["lora"], ["lora", "full"]))
def test_resuming_is_exact_and_refused_without_the_average(adapter: str, tiny_config: dict) -> None:
    config = tiny_config | {"adapter": {"method": adapter}, "ema": {"decay": 0.8}, "checkpoint": {"every": 3}}
    whole = run_with(config, name="whole", train={"steps": 5})
    halves = shutil.copytree(whole, whole.with_name("halves"))
    shutil.rmtree(checkpoint.checkpoint_folder(halves, 5))
    with pytest.raises(UserError, match=r"ema: \{\"decay\": 0.8\} -> null"):
        run_with(config, "latest", name="halves", train={"steps": 5}, ema=None)
    run_with(config, "latest", name="halves", train={"steps": 5})
    for file in (checkpoint.AVERAGE, checkpoint.TRAINABLE):
        torch.testing.assert_close(saved(halves, 5, file), saved(whole, 5, file), rtol=0, atol=0)


def test_bf16_weights_have_an_average_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    average = Ema(decay=0.99).build({"w": weight})
    average.update()
    with torch.no_grad():
        weight.add_(0.0078125)  # one unit in the last place of 1.0
    for _ in range(3):
        average.update()
    kept = average.tensors()["w"]
    assert kept.dtype == torch.float32 and (kept > 1).all() and (kept < 1.0078125).all()
    with average.swap_in():
        assert weight.dtype == torch.bfloat16
    assert (weight == 1.0078125).all()
