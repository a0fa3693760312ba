"""Pages that show code: what the map names exists, what add-a-method adds trains, and add-a-family shows a family."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from simulated import assert_same_bytes
from tiny_runs import resumed_from, run_with, saved_weights

from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.runs.folder import read_metrics
from simpletune.training.train import train

ROOT = Path(__file__).resolve().parents[2]
MAP, HOW_TO = ROOT / "docs" / "explanation" / "how-it-works.md", ROOT / "docs" / "how-to"
LISTING = re.compile(r"\*\*([\w./\\]+)\*\*[^\n`]*:\n\n```(\w+)\n(.*?)```", re.S)
ADDED = {  # by the page: the class's file, the union's, its name there, the field of TrainConfig
    "simpletune/adapters/methods/bias.py": ("simpletune.adapters.methods", "Adapter", "adapter"),
    "simpletune/engine/quant/fp8.py": ("simpletune.engine.quant", "Precision", "precision"),
    "simpletune/engine/optim/sgd.py": ("simpletune.engine.optim", "Optimizer", "optimizer"),
}


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
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The listings of add-a-method, after their classes have joined the unions of the configuration."""
    page = (HOW_TO / "add-a-method.md").read_text()
    files = {path.replace("\\", ""): code for path, _, code in LISTING.findall(page)}
    folder, fields = tmp_path / "listings", TrainConfig.model_fields
    folder.mkdir()
    before = {field: fields[field].annotation for _, _, field in ADDED.values()}
    for path, (package, name, field) in ADDED.items():
        module_of(files[path], path.removesuffix(".py").replace("/", "."), folder, monkeypatch)
        union: dict[str, object] = {}
        exec(
            files[package.replace(".", "/") + "/__init__.py"], vars(sys.modules[package]) | {"__name__": "union"}, union
        )
        old, new = (members_of(annotated) for annotated in (vars(sys.modules[package])[name], union[name]))
        assert len(new - old) == 1 and old < new  # the page's union has all members
        fields[field].annotation = get_args(union[name])[0]
    TrainConfig.model_rebuild(force=True)
    yield files
    for field, annotation in before.items():
        fields[field].annotation = annotation
    TrainConfig.model_rebuild(force=True)


def members_of(annotated: object) -> set[str]:
    return {member.__name__ for member in get_args(get_args(annotated)[0])}


def test_the_added_method_trains_the_biases_alone(
    added: dict[str, str], tiny_config: dict, tiny_pipeline: Path
) -> None:
    data = tiny_config | {"adapter": {"method": "bias"}, "train": {"steps": 1}}
    run = train(validate(data, "bias"))
    assert len(list(read_metrics(run))) == 1
    base = load_file(tiny_pipeline / "transformer" / "diffusion_pytorch_model.safetensors")
    tuned = load_file(run / "transformer" / "diffusion_pytorch_model.safetensors")
    changed = {name for name, tensor in tuned.items() if not torch.equal(tensor, base[name])}
    assert changed and all(name.startswith("transformer_blocks.") and name.endswith(".bias") for name in changed)


def test_the_added_method_s_test_passes(
    added: dict[str, str], tiny_config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = module_of(added["tests/adapters/methods/test_bias.py"], "page_test_bias", tmp_path, monkeypatch)
    own.test_losses_are_those_of_partial(tiny_config)


def test_the_added_precision_and_optimizer_train_resume_and_are_predicted(
    added: dict[str, str], tiny_config: dict
) -> None:
    changes = {"precision": {"weights": "fp8"}, "optimizer": {"name": "sgd", "lr": 0.01}, "checkpoint": {"every": 2}}
    data = tiny_config | changes
    assert_same_bytes(validate(data, "predicted"))
    whole = run_with(data)
    losses = [row["loss"] for row in read_metrics(whole)]
    plain = [row["loss"] for row in read_metrics(run_with(data, name="plain", precision={"weights": "bf16"}))]
    assert losses != plain and losses == pytest.approx(plain, rel=0.05)  # stored in 8 bits, and near
    after = saved_weights(whole, 4)
    torch.testing.assert_close(saved_weights(resumed_from(whole, data, 2), 4), after, rtol=0, atol=0)


def test_the_page_of_a_family_shows_a_family_that_runs() -> None:
    """Its listings stand in made_up.py, which test_made_up_family.py trains and draws with."""
    source = (ROOT / "tests" / "support" / "made_up.py").read_text()
    page = (HOW_TO / "add-a-family.md").read_text()
    listings = re.findall(r"```python\n(.*?)```", page, re.S)
    parts = [part.strip("\n") for listing in listings for part in re.split(r"^ *\.\.\.\n", listing, flags=re.M)]
    assert len(listings) >= 4 and [part for part in parts if part not in source] == []
