"""The simulated training stage: real and fake tensors take the same bytes, and the bytes are what arithmetic says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import (
    ALLOWED,
    MODELS,
    Case,
    Pairs,
    asks_for_slow,
    case_json,
    covering,
    pairs,
    parametrized,
    unet_version,
)
from simulated import LEVERS, assert_same_bytes, real

from benchmarks.predicted_seconds import diffusers_blocks
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.cuda_libraries import cublas_workspaces
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.memory.snapshot import round_to_block
from simpletune.engine.tensors import all_tensors
from simpletune.estimate.simulate.reports import with_workspace
from simpletune.estimate.simulate.simulate import simulate
from simpletune.stages.load import load_base
from simpletune.stages.step.synthetic import CPU
from simpletune.system.options import ConfigError

MIB = 2**20
CHECKPOINTING = ("all", "none")
CHECKPOINTED = [(*case, {"checkpointing": kind}) for case in ALLOWED for kind in CHECKPOINTING]
LAYERED = ("lora", "dora", "lokr", "loha", "oft")  # methods whose layers may have other ranks or rates


def a_unet(adapter: str, weights: str, compute: str, optimizer: str, version: str, last: dict) -> Case:
    precision = {"weights": weights, "compute": compute}
    (model,) = (each for each in MODELS if unet_version(each) == version)
    return {"method": adapter}, precision, {"name": optimizer}, model, last


def with_the_last(case: Case) -> Pairs:
    """The pairs of a case that its last choice (checkpointing, a lever) is in; test_cases.py has the rest."""
    (last,) = case[-1].items()
    return {pair for pair in pairs(case) if last in pair}


OF_TRANSFORMERS = covering([case for case in CHECKPOINTED if case[3]["family"] == "sd3"], with_the_last)
FAST_LAYERED = [  # every such method, and with them every precision
    case for case in OF_TRANSFORMERS if case[-1]["checkpointing"] == "all" and case[0]["method"] in LAYERED
]
FAST_CHECKPOINTED = [  # alternately with one kind and the other; one of U-Nets, whose steps take longer
    *(case for n, case in enumerate(OF_TRANSFORMERS) if n % 2 == n // 2 % 2 and case not in FAST_LAYERED),
    a_unet("lora", "int8", "fp16", "adamw", "sdxl", {"checkpointing": "all"}),
]


def test_real_and_fake_tensors_take_the_same_bytes(case: Case, tiny_config: dict, small_unet: Callable) -> None:
    *chosen, memory = case
    data = case_json(tiny_config, tuple(chosen))
    data["memory"] = memory
    if case[3]["family"] != "sd3":
        data["model"] = small_unet(unet_version(case[3]))
    assert_same_bytes(validate(data, "case"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Spread the tests over their cases."""
    if metafunc.function is test_real_and_fake_tensors_take_the_same_bytes:
        parametrized(metafunc, FAST_CHECKPOINTED, CHECKPOINTED)
    if metafunc.function is test_streamed_layers_of_other_ranks_and_rates_take_the_same_bytes_real_and_fake:
        parametrized(metafunc, FAST_LAYERED, [])
    if metafunc.function is test_levers_take_the_same_bytes_real_and_fake:
        parametrized(metafunc, FAST_LEVERED, allowed_with_a_lever() if asks_for_slow(metafunc) else [])


def with_lever(tiny_config: dict, case: Case) -> dict:
    """The run of a case with its lever, or several that are separated by spaces."""
    *chosen, lever = case
    data = case_json(tiny_config, tuple(chosen)) | {"memory": {}}
    for name in lever["lever"].split():
        for section, values in LEVERS[name].items():
            data[section] = data[section] | values
    return data


def allowed_with_a_lever() -> list[Case]:
    """Every lever with every adapter and precision, and two optimizers, as far as the rules allow; the adapters beside
    LoRA, which touch the same layers, with one optimizer and model."""
    some = [case for case in ALLOWED if case[2]["name"] in ("adamw", "adamw8bit")]
    first = ("lora", "full", "partial")
    models = {case[0]["method"]: case[3] for case in reversed(some)}  # the first that each method is for
    some = [c for c in some if c[0]["method"] in first or c[2:] == ({"name": "adamw"}, models[c[0]["method"]])]
    model = {"name": "rules", "model": {}, "data": {"path": "demo:pictures"}, "train": {"steps": 4}}
    found = []
    for case in ((*case, {"lever": lever}) for lever in LEVERS for case in some):
        try:
            validate(with_lever(model, case), "case")
        except ConfigError as error:  # the reason stands in the test of the rule
            assert "memory." in str(error)
        else:
            found.append(case)
    return found


def levered(adapter: str, lever: str) -> Case:
    """A case of the first transformer in bf16."""
    return {"method": adapter}, {"weights": "bf16", "compute": "bf16"}, {"name": "adamw"}, MODELS[0], {"lever": lever}


FAST_LEVERED = [
    levered("lora", "plan less boundaries"),
    levered("lora", "whole-table streamed"),
    levered("full", "feed-forward-only"),
    levered("none", "plan-streamed"),  # which the layered methods have, too
    levered("lora", "in-backward"),
    levered("full", "in-backward-streamed"),
    a_unet("partial", "bf16", "bf16", "adamw8bit", "sdxl", {"lever": "in-backward-streamed"}),
]


def test_levers_take_the_same_bytes_real_and_fake(
    case: Case, tiny_config: dict, three_blocks: Path, small_unet: Callable
) -> None:
    data = with_lever(tiny_config, case)
    if case[3]["family"] == "sd3":
        data["model"]["pretrained"] = str(three_blocks)
    else:
        data["model"] = small_unet(unet_version(case[3]))
    assert_same_bytes(validate(data, "case"))


def test_streamed_layers_of_other_ranks_and_rates_take_the_same_bytes_real_and_fake(
    case: Case, tiny_config: dict, three_blocks: Path
) -> None:
    data = with_lever(tiny_config, (*case[:-1], {"lever": "plan-streamed"}))
    data["model"]["pretrained"] = str(three_blocks)
    layers = [{"pattern": "blocks.0", "lr_ratio": 0.5}, {"pattern": "to_v", "lr_ratio": 0}]
    if case[0]["method"] != "oft":
        data["adapter"]["rank"] = 3
        layers.append({"pattern": "blocks.1-2", "rank": 2})
    data["adapter"]["layers"] = layers
    assert_same_bytes(validate(data, "case"))


def test_every_lever_layered_method_and_precision_is_tried() -> None:
    assert {lever for case in FAST_LEVERED for lever in case[-1]["lever"].split()} == set(LEVERS)
    assert {case[0]["method"] for case in FAST_LAYERED} == set(LAYERED)
    assert {case[1]["weights"] for case in FAST_LAYERED} == {case[1]["weights"] for case in ALLOWED}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int8-quanto", "nf4"])
def test_the_empty_transformer_is_the_real_ones_twin(precision: str, tiny_config: dict) -> None:
    config = validate(tiny_config | {"precision": {"weights": precision}}, "twin")
    loaded = config.model.load_denoiser(config.precision, CPU)
    with fake_tensors():
        empty = config.model.empty_denoiser(config.precision, CPU)
    kinds, twins = (
        [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in all_tensors(model)] for model in (loaded, empty)
    )
    assert kinds == twins
    assert [type(module) for module in loaded.modules()] == [type(module) for module in empty.modules()]


def with_blocks(tiny_config: dict, three_blocks: Path, **changes: object) -> TrainConfig:
    data = copy.deepcopy(tiny_config) | changes
    data["model"]["pretrained"] = str(three_blocks)
    return validate(data, "three blocks")


def test_weights_gradients_and_states_are_their_arithmetic(tiny_config: dict, three_blocks: Path) -> None:
    config = with_blocks(tiny_config, three_blocks, adapter={"method": "full"})
    model = load_base(config, CPU, [(32, 32)])
    weights = sum(round_to_block(4 * tensor.numel()) for tensor in all_tensors(model))
    trained = sum(round_to_block(4 * parameter.numel()) for parameter in model.parameters())
    report = simulate(config)
    many = len(list(model.parameters()))
    states = 2 * trained + many * round_to_block(4)  # two means, and a step counter each
    workspace = report.steady.by_kind["workspace"]  # norms; "activations" is the loss: if not finite
    assert report.steady.by_kind == {
        "weights": weights, "optimizer": states, "activations": round_to_block(4), "workspace": workspace,
    }  # fmt: skip
    assert workspace <= round_to_block(4 * many)
    assert report.host_bytes == 0
    assert "optimizer" not in report.phases  # the fused update takes nothing
    assert report.phases["clip"].by_kind["gradients"] == trained
    assert report.peak == max(report.phases.values(), key=lambda snapshot: snapshot.bytes)


def test_a_lora_is_its_arithmetic_and_no_cycle_keeps_tensors_between_steps(
    tiny_config: dict, three_blocks: Path
) -> None:
    lora, checkpointed = {"method": "lora", "rank": 2}, {"checkpointing": "all"}
    config = with_blocks(tiny_config, three_blocks, adapter=lora, memory=checkpointed)
    shapes = config.model.architecture.shapes()
    sides = [side for name in config.adapter.modules(shapes) for side in shapes[f"{name}.weight"]]
    apply, resize = torch.nn.Module._apply, torch.UntypedStorage.resize_
    steady = simulate(config).steady.by_kind
    assert steady["adapter"] == sum(round_to_block(4 * 2 * side) for side in sides)
    assert set(steady) <= {"weights", "adapter", "optimizer", "activations", "workspace"}
    assert steady["workspace"] <= 4 * round_to_block(4)  # the last norms
    assert steady["activations"] == round_to_block(4)  # the last loss, for the case that it is not finite
    assert (torch.nn.Module._apply, torch.UntypedStorage.resize_) == (apply, resize)  # nothing is left behind
    assert type(torch.zeros(1)) is torch.Tensor


def test_checkpointing_keeps_the_blocks_boundaries_only(tiny_config: dict, three_blocks: Path) -> None:
    peaks = {}
    for checkpointing in CHECKPOINTING:
        memory = {"checkpointing": checkpointing}
        config = with_blocks(tiny_config, three_blocks, memory=memory, data=tiny_config["data"] | {"resolution": 256})
        peaks[checkpointing] = simulate(config)
    kept, whole = (peaks[name].phases["forward"].by_kind["activations"] for name in ("all", "none"))
    assert kept < whole / 2
    assert peaks["all"].peak.module == "transformer_blocks.2"  # the first whose backward pass runs
    assert peaks["all"].steady == peaks["none"].steady


def test_accumulation_and_batches_and_text_and_a_devices_libraries(tiny_config: dict) -> None:
    train = {"steps": 4, "batch_size": 2, "gradient_accumulation": 3}
    config = validate(tiny_config | {"train": train}, "accumulation")
    single, report = simulate(validate(tiny_config, "single")), simulate(config)
    assert real(config).peak == report.peak
    assert report.peak.by_kind["activations"] > 2 * single.peak.by_kind["activations"] * 0.9
    longer = simulate(validate(tiny_config | {"model": tiny_config["model"] | {"t5_length": 64}}, "longer"))
    assert longer.peak.by_kind["activations"] > single.peak.by_kind["activations"]
    peak = simulate(validate(tiny_config, "device"), capability=(8, 9)).peak
    assert peak == with_workspace(single.peak, cublas_workspaces((8, 9)))
    assert peak.bytes == sum(peak.by_kind.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "checkpointing", "mib"),
    [("bf16", "all", 4673), ("int8", "all", 2667), ("int8-quanto", "all", 2790), ("int8", "none", 5954)],
)
def test_sd3_medium_takes_what_an_independent_simulation_said(
    precision: str, checkpointing: str, mib: int, tiny_images: Path
) -> None:
    data = {
        "name": "medium", "data": {"path": str(tiny_images), "resolution": 1024}, "precision": {"weights": precision},
        "memory": {"checkpointing": checkpointing},
    }  # fmt: skip
    config = validate(data, "medium")
    with diffusers_blocks():  # which the figures are of
        assert simulate(config).peak.bytes / MIB == pytest.approx(mib, rel=0.05)
    assert simulate(config).peak.bytes / MIB < 1.05 * mib
