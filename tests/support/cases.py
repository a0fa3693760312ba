"""Cases over every member of every union: which are allowed, a few that hold every pair of choices, their JSON."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny_sd15
import tiny_sdxl
from slow_cases import SEED, drawn

from simpletune.config.schema import TrainConfig
from simpletune.system.options import union_of


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
MODELS = [
    {"family": "sd3"}, {"family": "sd15", "version": "sd15"}, {"family": "sd15", "version": "sd2"}, {"family": "sdxl"},
]  # fmt: skip
Case = tuple[dict, ...]
Pairs = set[frozenset[tuple[str, str]]]
CASES: list[Case] = list(itertools.product(members("adapter"), members("precision"), members("optimizer"), MODELS))


def pairs(case: Case) -> Pairs:
    """Every two choices that a case makes together (adapter, weights, compute type, optimizer, ...), and LoRA's and
    full fine-tuning's with every precision."""
    adapter, precision, *_ = case
    chosen = [item for part in case for item in part.items()]
    two = {frozenset(pair) for pair in itertools.combinations(chosen, 2)}
    return two | ({frozenset([*adapter.items(), *precision.items()])} if adapter["method"] in WHOLE else set())


def choices(case: Case) -> Pairs:
    """Every choice of a case, and LoRA and full fine-tuning with every version of the model."""
    adapter, *_, model = case
    single = {frozenset([item]) for part in case for item in part.items()}
    return single | ({frozenset([*adapter.items(), *model.items()])} if adapter["method"] in WHOLE else set())


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


def name_of(case: Case) -> str:
    return "-".join("".join(f"{value}" for value in part.values()) or "default" for part in case)


def case_json(tiny_config: dict, case: Case, unet: Callable[[str], dict[str, str]] | None = None) -> dict:
    """The tiny run with one case's adapter, precision, optimizer and model.

    Args:
        tiny_config: the tiny run's JSON.
        case: one case.
        unet: makes the option ``model`` of a U-Net, by version; else it is that of a whole pipeline.
    """
    adapter, precision, optimizer, model = case
    data = copy.deepcopy(tiny_config)
    if model["family"] != "sd3":
        version = unet_version(model)
        data["model"] = unet(version) if unet else {"family": model["family"], "pretrained": str(tiny_unet(version))}
        data["data"]["resolution"] = 64
    data["adapter"] = adapter | ({"rank": 2} if adapter.get("method") == "lora" else {})
    data["precision"] = precision
    if not member("adapter", adapter).trains:
        rate = {} if member("optimizer", optimizer).steps_in_backward else {"learning_rate": None}
        data["text"] = {"embeddings": {"token": "flat", "initial": "striped", **rate}}
    data["optimizer"] = {"lr": 0.001} | optimizer | ({"lr": 1.0, "d0": 1e-3} if optimizer["name"] == "prodigy" else {})
    return data


def unet_version(model: dict) -> str:
    """Which of the U-Nets of tests a case's model is."""
    return model.get("version", model["family"])


@functools.cache
def tiny_unet(version: str) -> Path:
    """A tiny pipeline of Stable Diffusion 1.5, 2 or XL, built once in a session."""
    folder = Path(tempfile.mkdtemp(prefix="simpletune-unet-")) / version
    return tiny_sdxl.build(folder) if version == "sdxl" else tiny_sd15.build(folder, version)


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
    """By capabilities: what changes an attention's context needs a model that allows it."""
    return member("model", case[3]).words.no_hypernetwork is None or not member("adapter", case[0]).needs_contexts


def is_allowed(case: Case) -> bool:
    return is_trainable(case) and fits_fp16(case) and fits_model(case)


ALLOWED = [case for case in CASES if is_allowed(case)]
