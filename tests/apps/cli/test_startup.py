"""What a start does not pay for: modules that nobody uses, and collecting what was imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).resolve().parents[2]
UNUSED = (
    "bitsandbytes", "torchao", "optimum", "wandb", "tensorboard", "torch.utils.tensorboard", "tensorflow", "xformers",
    "torch._inductor.compile_fx", "torchvision", "pandas", "scipy", "sklearn", "pyarrow", "datasets", "matplotlib",
    "diffusers.pipelines", "transformers.trainer", "transformers.pipelines",
    "simpletune.estimate.job_estimate", "simpletune.estimate.simulate.simulate_stages", "simpletune.runs.report",
)  # fmt: skip
TOLD_LAST = "import atexit, gc, json, sys; atexit.register(lambda: print(json.dumps(gc.get_freeze_count()))); "


def told(code: str, *arguments: object) -> list[Any]:
    """What a Python process of its own says in JSON, one value a line, at its end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-2:]]


def test_a_plain_run_imports_nothing_that_it_does_not_use(tiny_config: dict, write_config) -> None:
    file = write_config(tiny_config | {"train": {"steps": 1}, "tracking": {"tensorboard": False}})
    code = (
        "from simpletune.apps.cli.main import main; main(['train', sys.argv[1]]); "
        "print(json.dumps([sorted(sys.modules), gc.get_freeze_count(), gc.isenabled()]))"
    )
    (modules, frozen, enabled), at_exit = told(TOLD_LAST + code, file)
    assert [name for name in UNUSED if name in modules] == []
    assert "peft" in modules and frozen > 100_000 and enabled
    assert (at_exit > 100_000) == (torch.version.cuda is None and torch.version.hip is None)


@pytest.mark.slow
def test_imports_are_not_collected_and_with_a_torch_for_gpus_thawed_at_the_end() -> None:
    code = (
        "import torch; torch.version.cuda = '13.0'; found = []; gc.callbacks.append(lambda *args: found.append(args)); "
        "from simpletune.system.startup import import_libraries; import_libraries(); "
        "print(json.dumps([len(found), 'diffusers.models.autoencoders' in sys.modules]))"
    )
    assert told(TOLD_LAST + code) == [[0, False], 0]


def test_a_library_that_was_imported_first_does_not_miss_bitsandbytes() -> None:
    """diffusers remembers at its first import that bitsandbytes is there, and imports it with its models."""
    code = (
        "import diffusers; from simpletune.system.startup import import_libraries; import_libraries(); "
        "print(json.dumps('bitsandbytes' in sys.modules))"
    )
    assert told(TOLD_LAST + code)[0] is True


def test_the_process_that_distributes_tests_does_not_import_torch() -> None:
    """Each would take seconds, and trainings of a helper that is imported before they are wrapped would not count."""
    code = "import conftest; print(json.dumps(sorted({'torch', 'bitsandbytes', 'tiny_runs'} & set(sys.modules))))"
    assert told(TOLD_LAST + f"sys.path[:0] = {[str(TESTS), str(TESTS / 'support')]}; " + code)[0] == []
