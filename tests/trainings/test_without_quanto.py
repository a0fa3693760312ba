"""A missing or broken optimum-quanto is a matter of ``int8-quanto`` alone."""

from __future__ import annotations

import importlib.abc
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
from tiny_runs import run_with

from simpletune.apps.cli.main import main
from simpletune.system.options import UserError


class Broken(importlib.abc.MetaPathFinder):
    """What importing a library does that torch has outgrown."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "optimum.quanto":
            raise RuntimeError("no such operator")


@pytest.fixture(params=["missing", "broken"])
def no_quanto(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "optimum"]:
        monkeypatch.delitem(sys.modules, name)
    if request.param == "broken":
        monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
        return
    monkeypatch.setitem(sys.modules, "optimum", None)

    def version_of(name: str) -> str:
        if name == "optimum-quanto":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("simpletune.system.environment.version", version_of)


def test_int8_is_estimated_and_trained_without_quanto(no_quanto: None, tiny_config: dict, write_config) -> None:
    config = tiny_config | {"precision": {"weights": "int8"}}
    assert main(["estimate", str(write_config(config)), "--device", "L4"]) == 0
    assert (run_with(config) / "pytorch_lora_weights.safetensors").exists()


def test_int8_quanto_names_what_it_lacks_and_what_does_without(no_quanto: None, tiny_config: dict) -> None:
    with pytest.raises(UserError, match="optimum-quanto, which cannot be imported: .*Use precision.weights=int8"):
        run_with(tiny_config, precision={"weights": "int8-quanto"})
