"""Cases over every member of every union train, save, resume and reload: each choice; `slow`: each pair and triple."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny_sd15
import torch
from safetensors.torch import load_file
from slow_cases import SEED, drawn

from simpletune.commands.train.train import train
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.engine.tensors import trained_parameters
from simpletune.runs import checkpoint
from simpletune.runs.folder import METRICS
from simpletune.runs.result import result_files
from simpletune.stages.step.train_step import attach
from simpletune.stages.text_side import empty_text_side
from simpletune.system.options import ConfigError, option_classes, union_of


def members(field: str) -> list[dict]:
    """The JSON of every member of a union, and of every compute type that a precision has, apart from auto."""
    info = TrainConfig.model_fields[field]
    union = union_of(info)
    if union is None:
        return [{}]
    found = []
    for tag, option in union.members.items():
        compute = option.model_fields.get("compute")
        kinds = [kind for kind in compute.annotation.__args__ if kind != "auto"] if compute is not None else [None]
        found += [{union.tag: tag} | ({"compute": kind} if kind else {}) for kind in kinds]
    return found


WHOLE = ("lora", "full")  # methods whose every pair of weights and compute type is trained in the fast suite
MODELS = [{"family": "sd3"}, {"family": "sd15", "version": "sd15"}, {"family": "sd15", "version": "sd2"}]

Case = tuple[dict, ...]
CASES: list[Case] = list(itertools.product(members("adapter"), members("precision"), members("optimizer"), MODELS))


def pairs(case: Case) -> set[frozenset[tuple[str, str]]]:
    """Every two choices that a case makes together (adapter, weights, compute type, optimizer, ...), and LoRA's and
    full fine-tuning's with every precision."""
    adapter, precision, *_ = case
    chosen = [item for part in case for item in part.items()]
    two = {frozenset(pair) for pair in itertools.combinations(chosen, 2)}
    return two | ({frozenset([*adapter.items(), *precision.items()])} if adapter["method"] in WHOLE else set())


def choices(case: Case) -> set[frozenset[tuple[str, str]]]:
    """Every choice of a case, and LoRA and full fine-tuning with every version of the model."""
    adapter, *_, model = case
    single = {frozenset([item]) for part in case for item in part.items()}
    return single | ({frozenset([*adapter.items(), *model.items()])} if adapter["method"] in WHOLE else set())


Pairs = set[frozenset[tuple[str, str]]]


def covering(cases: Sequence[Case], of_case: Callable[[Case], Pairs] = pairs) -> list[Case]:
    """A few of the cases, in which every pair of choices occurs that occurs in any; always the same ones, and of two
    that have as many missing pairs a transformer, whose steps take less than a U-Net's."""
    made = [(case, of_case(case)) for case in cases]
    missing, found = set().union(*(of for _, of in made)), []
    while missing:
        best, of = max(made, key=lambda each: (len(each[1] & missing), each[0][3]["family"] == "sd3"))
        found.append(best)
        missing -= of
    return found


def asks_for_slow(metafunc: pytest.Metafunc) -> bool:
    """Whether slow tests are selected."""
    return re.search(r"(?<!not )\bslow\b", metafunc.config.getoption("markexpr") or "") is not None


def with_every_pair(cases: Sequence[Case], seed: str) -> list[Case]:
    """Of thousands of cases those in which every pair of choices occurs, and a tenth of the others, drawn with a seed
    ("all" for every case): hours become minutes, and another seed draws others."""
    if seed == "all":
        return list(cases)
    paired = covering(cases)
    names = set(map(name_of, paired))
    others = [case for case in cases if name_of(case) not in names]
    return paired + drawn(others, len(others) // 10, seed)


def parametrized(metafunc: pytest.Metafunc, few: Sequence[Case], cases: Sequence[Case]) -> None:
    """Give a test the few cases, and where slow tests are asked for those drawn with ``CASES_SEED`` of all others."""
    found, names = [pytest.param(case, id=name_of(case)) for case in few], set(map(name_of, few))
    slow = with_every_pair(cases, SEED) if asks_for_slow(metafunc) and cases else []
    others = [case for case in slow if name_of(case) not in names]
    metafunc.parametrize(
        "case", found + [pytest.param(case, id=name_of(case), marks=pytest.mark.slow) for case in others]
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Spread the test that trains over its cases."""
    if metafunc.function is test_trains_saves_resumes_reloads:
        parametrized(metafunc, FAST, ALLOWED)


def name_of(case: Case) -> str:
    return "-".join("".join(f"{value}" for value in part.values()) or "default" for part in case)


def case_json(tiny_config: dict, case: Case) -> dict:
    """The tiny run with one case's adapter, precision, optimizer and model."""
    adapter, precision, optimizer, model = case
    data = copy.deepcopy(tiny_config)
    if model["family"] == "sd15":
        data["model"] = {"family": "sd15", "pretrained": str(tiny_unet(model["version"]))}
        data["data"]["resolution"] = 64
    data["adapter"] = adapter | ({"rank": 2} if adapter.get("method") == "lora" else {})
    data["precision"] = precision
    if not member("adapter", adapter).trains:
        rate = {} if member("optimizer", optimizer).steps_in_backward else {"learning_rate": None}
        data["text"] = {"embeddings": {"token": "flat", "initial": "striped", **rate}}
    data["optimizer"] = {"lr": 0.001} | optimizer | ({"lr": 1.0, "d0": 1e-3} if optimizer["name"] == "prodigy" else {})
    return data


@functools.cache
def tiny_unet(version: tiny_sd15.Version) -> Path:
    """A tiny pipeline of Stable Diffusion 1.5 or 2, built once in a session."""
    return tiny_sd15.build(Path(tempfile.mkdtemp(prefix="simpletune-unet-")) / version, version)


def member(field: str, case_part: dict) -> type:
    """The option class that a part of a case selects."""
    union = union_of(TrainConfig.model_fields[field])
    return union.members[case_part[union.tag]]


def is_trainable(case: Case) -> bool:
    """By capabilities: what trains the base needs a trainable precision."""
    return member("precision", case[1]).trainable or not member("adapter", case[0]).trains_base


def fits_fp16(case: Case) -> bool:
    """By capabilities: with products in fp16, an update can be undone, and trained weights have 32 bits."""
    wide = member("precision", case[1]).bytes_per_weight == 4 or not member("adapter", case[0]).trains_base
    return case[1].get("compute") != "fp16" or (member("optimizer", case[2]).undoes and wide)


def fits_model(case: Case) -> bool:
    """By capabilities: what changes an attention's context needs attentions that have one."""
    contexts = member("model", case[3]).lora[0].names.contexts
    return contexts is not None or not member("adapter", case[0]).needs_contexts


def is_allowed(case: Case) -> bool:
    return is_trainable(case) and fits_fp16(case) and fits_model(case)


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.checkpoint_folder(run, step) / checkpoint.TRAINABLE)


ALLOWED = [case for case in CASES if is_allowed(case)]
FEW = covering(ALLOWED)
QUICK = [case for case in ALLOWED if case[3]["family"] == "sd3" or case[0]["method"] in (*WHOLE, "hypernetwork")]
FAST = covering(QUICK, choices)  # what ./test.sh trains; the others of FEW and of ALLOWED are slow
REFUSED = [case for case in CASES if not is_trainable(case)]
REASONS = {(case[0]["method"], case[1]["weights"]): case for case in reversed(REFUSED)}  # what the rule looks at


def test_the_few_cases_hold_every_option_class_and_every_pair(tiny_config: dict) -> None:
    configs = [validate(case_json(tiny_config, case), "case") for case in FEW]
    for field in ("adapter", "precision", "optimizer", "model"):
        classes = option_classes(TrainConfig.model_fields[field].annotation)
        assert {type(getattr(config, field)) for config in configs} == set(classes)
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
        assert {of(*case) for case in FEW} == {of(*case) for case in ALLOWED}
    assert len(FEW) < len(ALLOWED)


def test_a_seed_draws_every_pair_and_a_tenth_of_the_rest() -> None:
    some, others = with_every_pair(ALLOWED, "1"), with_every_pair(ALLOWED, "2")
    assert set().union(*map(pairs, some)) == set().union(*map(pairs, ALLOWED))
    names = set(map(name_of, some))
    assert len(names) == len(some) == len(FEW) + (len(ALLOWED) - len(FEW)) // 10
    assert names < set(map(name_of, ALLOWED))
    assert [name_of(case) for case in with_every_pair(ALLOWED, "1")] == [name_of(case) for case in some]
    assert names != set(map(name_of, others))
    assert with_every_pair(ALLOWED, "all") == ALLOWED


def test_trains_saves_resumes_reloads(case: Case, tiny_config: dict) -> None:
    data = case_json(tiny_config, case)
    data["checkpoint"] = {"every": 2}
    whole = train(validate(data, "whole"))
    for step in (2, 4):
        assert all(torch.isfinite(tensor).all() for tensor in weights(whole, step).values())
    metrics = (whole / METRICS).read_text(encoding="utf-8").splitlines()
    updated = any(json.loads(line)["step"] > 2 for line in metrics)  # fp16 undoes steps that overflow
    assert updated or data["precision"].get("compute") == "fp16"
    changed = any((weights(whole, 2)[name] != tensor).any() for name, tensor in weights(whole, 4).items())
    assert changed == updated

    data["name"] = "halves"
    halves = whole.with_name("halves")
    shutil.copytree(whole, halves)
    shutil.rmtree(checkpoint.checkpoint_folder(halves, 4))
    train(validate(data, "second half"), resume="latest")
    torch.testing.assert_close(weights(halves, 4), weights(whole, 4), rtol=0, atol=0)

    config = resolve_folders(validate(data, "reload"))
    model = config.model.load_denoiser(config.precision, torch.device("cpu"))
    optimizer = attach(config, model, text=empty_text_side(config, torch.device("cpu")))
    checkpoint.restore(checkpoint.find_checkpoint("latest", whole), model, optimizer, config.optimizer)
    torch.testing.assert_close(trained_parameters(model), weights(whole, 4), rtol=0, atol=0)
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
        with pytest.raises(
            ConfigError, match="adapter.method: hypernetwork .* reads prompt and picture together.*lora"
        ):
            validate(case_json(tiny_config, case), "refused")


def test_refuses_what_fp16_cannot_do(tiny_config: dict) -> None:
    refused = [case for case in CASES if is_trainable(case) and not fits_fp16(case) and fits_model(case)]
    assert len(refused) > 4
    for case in refused:
        with pytest.raises(ConfigError, match="(optimizer.name|precision.weights): .* fp16"):
            validate(case_json(tiny_config, case), "refused")


@pytest.mark.slow
def test_refuses_every_other_combination(tiny_config: dict) -> None:
    for case in REFUSED:
        with pytest.raises(ConfigError, match=REFUSAL):
            validate(case_json(tiny_config, case), "refused")
