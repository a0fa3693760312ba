"""Cases over every member of every union train, save, resume and reload: each choice; `slow`: each pair and triple."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import (
    ALLOWED,
    CASES,
    WHOLE,
    Case,
    case_json,
    choices,
    covering,
    fits_fp16,
    fits_model,
    is_trainable,
    member,
    name_of,
    pairs,
    parametrized,
    with_every_pair,
)
from safetensors.torch import load_file

from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.engine.tensors import trained_parameters
from simpletune.models.flux2.flux2_option import Klein
from simpletune.models.qwen_image.qwen_image_option import QwenImage
from simpletune.models.zimage.zimage_option import ZImage
from simpletune.runs import checkpoint
from simpletune.runs.folder import METRICS
from simpletune.runs.result import result_files
from simpletune.stages.step.train_step import attach
from simpletune.stages.text_side import empty_text_side
from simpletune.system.options import ConfigError, option_classes
from simpletune.training.train import train


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Spread the test that trains over its cases."""
    if metafunc.function is test_trains_saves_resumes_reloads:
        parametrized(metafunc, FAST, ALLOWED)


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.checkpoint_folder(run, step) / checkpoint.TRAINABLE)


QUICK = [case for case in ALLOWED if case[3]["family"] == "sd3" or case[0]["method"] in (*WHOLE, "hypernetwork")]
FAST = covering(QUICK, choices)  # what ./test.sh trains; others of ALLOWED are slow
REFUSED = [case for case in CASES if not is_trainable(case)]
REASONS = {(case[0]["method"], case[1]["weights"]): case for case in reversed(REFUSED)}  # what the rule looks at


OWN_PRODUCTS = {Klein, ZImage, QwenImage}  # whose folders in tests/models train each method in each precision


def test_the_few_cases_hold_every_option_class_and_every_pair() -> None:
    few = covering(ALLOWED)
    for place, field in enumerate(("adapter", "precision", "optimizer", "model")):
        classes = set(option_classes(TrainConfig.model_fields[field].annotation)) - OWN_PRODUCTS
        assert {member(field, case[place]) for case in few} == classes
    for of in (
        lambda adapter, precision, optimizer, model: (*adapter.values(), precision["weights"]),
        lambda adapter, precision, optimizer, model: (*adapter.values(), precision.get("compute")),
        lambda adapter, precision, optimizer, model: (*adapter.values(), *optimizer.values()),
        lambda adapter, precision, optimizer, model: (precision["weights"], *optimizer.values()),
        lambda adapter, precision, optimizer, model: (precision.get("compute"), *optimizer.values()),
        lambda adapter, precision, optimizer, model: (*model.values(), *adapter.values()),
        lambda adapter, precision, optimizer, model: (*model.values(), precision["weights"]),
        lambda adapter, precision, optimizer, model: (*model.values(), precision.get("compute")),
        lambda adapter, precision, optimizer, model: (*model.values(), *optimizer.values()),
    ):
        assert {of(*case) for case in few} == {of(*case) for case in ALLOWED}
    assert len(few) < len(ALLOWED)


def test_a_seed_draws_every_pair_and_a_tenth_of_the_rest() -> None:
    cases = ALLOWED[::5]
    few, some, others = covering(cases), with_every_pair(cases, "1"), with_every_pair(cases, "2")
    assert set().union(*map(pairs, some)) == set().union(*map(pairs, cases))
    names = set(map(name_of, some))
    assert len(names) == len(some) == len(few) + (len(cases) - len(few)) // 10
    assert names < set(map(name_of, cases))
    assert [name_of(case) for case in with_every_pair(cases, "1")] == [name_of(case) for case in some]
    assert names != set(map(name_of, others))
    assert with_every_pair(cases, "all") == cases


def test_trains_saves_resumes_reloads(
    case: Case, tiny_config: dict, small_unet: Callable[[str], dict[str, str]]
) -> None:
    data = case_json(tiny_config, case, small_unet) | {"train": {"steps": 2}, "checkpoint": {"every": 1}}
    whole = train(validate(data, "whole"))
    for step in (1, 2):
        assert all(torch.isfinite(tensor).all() for tensor in weights(whole, step).values())
    metrics = (whole / METRICS).read_text(encoding="utf-8").splitlines()
    updated = any(json.loads(line)["step"] > 1 for line in metrics)  # fp16 undoes steps that overflow
    assert updated or data["precision"].get("compute") == "fp16"
    changed = any((weights(whole, 1)[name] != tensor).any() for name, tensor in weights(whole, 2).items())
    assert changed == updated

    data["name"] = "halves"
    halves = whole.with_name("halves")
    shutil.copytree(whole, halves)
    shutil.rmtree(checkpoint.checkpoint_folder(halves, 2))
    train(validate(data, "second half"), resume="latest")
    torch.testing.assert_close(weights(halves, 2), weights(whole, 2), rtol=0, atol=0)

    config = resolve_folders(validate(data, "reload"))
    model = config.model.load_denoiser(config.precision, torch.device("cpu"))
    optimizer = attach(config, model, text=empty_text_side(config, torch.device("cpu")))
    checkpoint.restore(checkpoint.find_checkpoint("latest", whole), model, optimizer, config.optimizer)
    torch.testing.assert_close(trained_parameters(model), weights(whole, 2), rtol=0, atol=0)
    assert all(file.exists() for file in result_files(config.model_copy(update={"name": whole.name}), whole))


REFUSAL = "precision.weights: .* weights are frozen.*Use precision.weights bf16"


@pytest.mark.parametrize("case", REASONS.values(), ids=name_of)
def test_refuses_with_the_reason(case: Case, tiny_config: dict) -> None:
    with pytest.raises(ConfigError, match=REFUSAL):
        validate(case_json(tiny_config, case), "refused")


def test_refuses_what_the_model_has_no_place_for(tiny_config: dict) -> None:
    refused = {case[0]["method"]: case for case in CASES if is_trainable(case) and not fits_model(case)}
    assert list(refused) == ["hypernetwork"]
    for case in refused.values():
        with pytest.raises(ConfigError, match="adapter.method: hypernetwork .*Use adapter.method lora"):
            validate(case_json(tiny_config, case), "refused")


NOT_IN_FP16 = [case for case in CASES if is_trainable(case) and not fits_fp16(case) and fits_model(case)]


def test_refuses_what_fp16_cannot_do(tiny_config: dict) -> None:
    for case in covering(NOT_IN_FP16, choices):
        with pytest.raises(ConfigError, match="(optimizer.name|precision.weights): .* fp16"):
            validate(case_json(tiny_config, case), "refused")


@pytest.mark.slow
def test_refuses_every_other_combination(tiny_config: dict) -> None:
    for case in REFUSED:
        with pytest.raises(ConfigError, match=REFUSAL):
            validate(case_json(tiny_config, case), "refused")
    for case in NOT_IN_FP16:
        with pytest.raises(ConfigError, match="(optimizer.name|precision.weights): .* fp16"):
            validate(case_json(tiny_config, case), "refused")
