"""docs and CONTRIBUTING: every path and function of the map exists, and the walkthrough's adapter trains."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import losses_of

import simpletune.adapters.methods
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.runs.folder import read_metrics
from simpletune.training.train import train

ROOT = Path(__file__).resolve().parents[2]
MAP = ROOT / "docs" / "explanation" / "how-it-works.md"
LISTING = re.compile(r"\*\*([\w./]+)\*\*[^\n`]*:\n\n```(\w+)\n(.*?)```", re.S)
ADAPTER = "simpletune/adapters/methods/bias.py"


def names_in(file: Path) -> set[str]:
    """Functions and classes of a module, and methods as ``Class.method``."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_how_it_works_names_what_exists_and_every_room() -> None:
    named = re.findall(r"`(simpletune/[\w/]+(?:\.py)?)(?:::([\w.]+))?`", MAP.read_text())
    assert [path for path, _ in named if not (ROOT / path).exists()] == []
    functions = [(path, name) for path, name in named if name]
    assert [each for each in functions if each[1] not in names_in(ROOT / each[0])] == []
    assert len(functions) >= 12
    rooms = {folder.parent.name for folder in (ROOT / "simpletune").glob("*/__init__.py")}
    assert sorted(rooms - set(re.findall(r"[\w]+", MAP.read_text()))) == []


def module_of(code: str, name: str, folder: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """Import a listing under the name that it will have; from a file, because options read their own source."""
    file = folder / f"{name.rpartition('.')[2]}.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def walkthrough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The listings, after their adapter has joined the union ``adapter`` of the configuration."""
    files = {path: code for path, _, code in LISTING.findall((ROOT / "CONTRIBUTING.md").read_text())}
    folder = tmp_path / "listings"
    folder.mkdir()
    module_of(files[ADAPTER], "simpletune.adapters.methods.bias", folder, monkeypatch)
    union: dict[str, object] = {}
    exec(
        files["simpletune/adapters/methods/__init__.py"],
        vars(simpletune.adapters.methods) | {"__name__": "union"},
        union,
    )
    field = TrainConfig.model_fields["adapter"]
    before = field.annotation
    field.annotation = get_args(union["Adapter"])[0]
    TrainConfig.model_rebuild(force=True)
    yield files
    field.annotation = before
    TrainConfig.model_rebuild(force=True)


def test_the_walkthrough_s_union_has_all_members_and_its_configuration_fits(walkthrough: dict[str, str]) -> None:
    members = {member.__name__ for member in get_args(TrainConfig.model_fields["adapter"].annotation)}
    before = {member.__name__ for member in get_args(get_args(simpletune.adapters.methods.Adapter)[0])}
    assert members == before | {"Bias"}
    config = json.loads(walkthrough["configs/sd3_medium_bias.json"])
    here = config | {"data": config["data"] | {"path": "demo:pictures"}}
    assert validate(here, "walkthrough").adapter.method == "bias"
    assert len(config["about"]) > 30


def test_the_walkthrough_s_adapter_trains_the_biases_alone(
    walkthrough: dict[str, str], tiny_config: dict, tiny_pipeline: Path
) -> None:
    data = tiny_config | {"adapter": {"method": "bias"}, "train": {"steps": 1}}
    run = train(validate(data, "bias"))
    assert len(list(read_metrics(run))) == 1
    base = load_file(tiny_pipeline / "transformer" / "diffusion_pytorch_model.safetensors")
    tuned = load_file(run / "transformer" / "diffusion_pytorch_model.safetensors")
    changed = {name for name, tensor in tuned.items() if not torch.equal(tensor, base[name])}
    assert changed and all(name.startswith("transformer_blocks.") and name.endswith(".bias") for name in changed)


def test_the_walkthrough_s_golden_losses(walkthrough: dict[str, str], tiny_config: dict) -> None:
    recorded = json.loads("{" + walkthrough["tests/reference/golden_losses.json"].rstrip().rstrip(",") + "}")
    losses = losses_of(tiny_config, "bias", "fp32", "fp32")
    assert losses == pytest.approx(recorded["bias-fp32-fp32"], rel=1e-5)


def test_the_walkthrough_s_tests_pass(
    walkthrough: dict[str, str], tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = module_of(walkthrough["tests/adapters/methods/test_bias.py"], "walkthrough_test_bias", tmp_path, monkeypatch)
    (cases,) = own.test_the_last_blocks_train.pytestmark
    for values in cases.args[1]:
        own.test_the_last_blocks_train(*values)
    own.test_more_blocks_than_the_model_has_are_refused()
    own.test_losses_are_those_of_partial(tiny_config)
