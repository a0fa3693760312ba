"""One table of cases over every member of every union: each allowed combination trains, saves, resumes and reloads."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.options import ConfigError, option_classes, union_of
from simpletune.runs import checkpoint
from simpletune.step.core import attach
from simpletune.tensors import trained_parameters
from simpletune.training.loop import train


def members(field: str) -> list[dict]:
    """The JSON of every member of a union, and of every compute type that a precision has."""
    info = TrainConfig.model_fields[field]
    union = union_of(info)
    if union is None:
        return [{}]
    found = []
    for tag, option in union.members.items():
        compute = option.model_fields.get("compute")
        kinds = compute.annotation.__args__ if compute is not None else [None]
        found += [{union.tag: tag} | ({"compute": kind} if kind else {}) for kind in kinds]
    return found


CASES = list(itertools.product(members("adapter"), members("precision"), members("optimizer")))


def name_of(case: tuple[dict, ...]) -> str:
    return "-".join("".join(f"{value}" for value in part.values()) or "default" for part in case)


def case_json(tiny_config: dict, case: tuple[dict, ...]) -> dict:
    """The tiny run with one case's adapter, precision and optimizer."""
    adapter, precision, optimizer = case
    data = copy.deepcopy(tiny_config)
    data["adapter"] = adapter | ({"rank": 2} if adapter.get("method") == "lora" else {})
    data["precision"] = precision
    data["optimizer"] = {"lr": 0.001} | optimizer
    return data


def is_allowed(case: tuple[dict, ...]) -> bool:
    """By capabilities: what trains the base needs a trainable precision."""
    trains_base = union_of(TrainConfig.model_fields["adapter"]).members[case[0]["method"]].trains_base
    trainable = union_of(TrainConfig.model_fields["precision"]).members[case[1]["weights"]].trainable
    return trainable or not trains_base


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.checkpoint_folder(run, step) / checkpoint.TRAINABLE)


def test_the_table_covers_every_member() -> None:
    for field in ("adapter", "precision", "optimizer"):
        classes = option_classes(TrainConfig.model_fields[field].annotation)
        assert len(members(field)) >= len(classes)


@pytest.mark.parametrize("case", [c for c in CASES if is_allowed(c)], ids=name_of)
def test_trains_saves_resumes_reloads(case: tuple[dict, ...], tiny_config: dict) -> None:
    data = case_json(tiny_config, case)
    data["checkpoint"] = {"every": 2}
    whole = train(validate(data, "whole"))
    for step in (2, 4):
        assert all(torch.isfinite(tensor).all() for tensor in weights(whole, step).values())
    assert any((weights(whole, 2)[name] != tensor).any() for name, tensor in weights(whole, 4).items())

    data["name"], data["train"]["steps"] = "halves", 2
    halves = train(validate(data, "first half"))
    data["train"]["steps"] = 4
    train(validate(data, "second half"), resume="latest")
    torch.testing.assert_close(weights(halves, 4), weights(whole, 4), rtol=0, atol=0)

    config = resolve_folders(validate(data, "reload"))
    model = config.model.load_transformer(config.precision, torch.device("cpu"))
    optimizer = attach(config, model)
    checkpoint.restore(checkpoint.find("latest", whole), model, optimizer, config.optimizer)
    torch.testing.assert_close(trained_parameters(model), weights(whole, 4), rtol=0, atol=0)
    assert (whole / config.adapter.output_name).exists()


@pytest.mark.parametrize("case", [c for c in CASES if not is_allowed(c)], ids=name_of)
def test_refuses_with_the_reason(case: tuple[dict, ...], tiny_config: dict) -> None:
    with pytest.raises(ConfigError, match="precision.weights: .* weights are frozen.*Use precision.weights bf16"):
        validate(case_json(tiny_config, case), "refused")
