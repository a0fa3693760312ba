"""What a start does not pay for: modules that nobody uses, and collecting what was imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from simpletune.importing import _hidden

UNUSED = (
    "bitsandbytes", "torchao", "optimum", "wandb", "tensorboard", "torch.utils.tensorboard", "tensorflow", "xformers",
    "torch._inductor.compile_fx", "torchvision", "pandas", "scipy", "sklearn", "pyarrow", "datasets", "matplotlib",
    "diffusers.pipelines", "transformers.trainer", "transformers.pipelines",
)  # fmt: skip


def test_a_plain_run_imports_nothing_that_it_does_not_use(tiny_config: dict, write_config) -> None:
    file = write_config(tiny_config | {"train": {"steps": 1}, "tracking": {"tensorboard": False}})
    code = (
        "import gc, json, sys; from simpletune.__main__ import main; main(['train', sys.argv[1]]); "
        "print(json.dumps([sorted(sys.modules), gc.get_freeze_count(), gc.isenabled()]))"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    modules, frozen, enabled = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in UNUSED if name in modules] == []
    assert "peft" in modules and frozen > 100_000 and enabled


def test_what_is_hidden_cannot_be_imported_and_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with _hidden("colorsys"), pytest.raises(ImportError):
        import colorsys
    import colorsys

    with _hidden("colorsys"):
        assert sys.modules["colorsys"] is colorsys  # imported before: it is paid for
