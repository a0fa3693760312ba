"""Skip the GPU tests that the software GPU cannot run, with the reason: pytest -p softgpu_selection (make softgpu)."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import pytest
import torch

from simpletune.engine.kernels import adaln, rms_norm, rotary, swiglu

LEFT_OUT = {
    r"test_compiled_blocks": "torch.compile's kernels are launched by Inductor, which the interpreter does not run",
    r"test_speed_of_int8_products|test_a_row_of_the_speed_grid": "measures speed",
    r"test_the_trace_holds": "reads the kernel events of CUPTI",
    r"test_int8_products_are_those.*-(1024|4429|16384)\]": "slow in Triton's interpreter; 17 and 333 rows are run",
}


SOME_SEED = "test_copies_that_do_not_wait_show"
"""A test of a broken wait, which some orders must expose, not every one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them, with the reason."""
    for item in items:
        for pattern, reason in LEFT_OUT.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f"GPU in software: {reason}"))


@pytest.fixture(autouse=True)
def norms_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, gates and activations are slow in Triton's interpreter; test_softgpu.py runs their kernels."""
    for operators in (adaln, rms_norm, rotary, swiglu):
        failed = {torch.device("cuda", number): "slow in Triton's interpreter" for number in range(2)}
        monkeypatch.setattr(operators.FALLBACK, "failed", failed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Try orders until one shows it; the last one's failure stands."""
    if not item.name.startswith(SOME_SEED):
        return (yield)
    from softgpu import queues

    honest, before = item.obj, os.environ.get("SOFT_SEED", str(queues.AT_ONCE))

    def some_seed(**arguments: object) -> None:
        for seed in range(10):
            queues.seed(seed)
            with contextlib.suppress(pytest.fail.Exception):
                return honest(**arguments)
        raise AssertionError("no seed shows it")

    item.obj = some_seed
    try:
        return (yield)
    finally:
        item.obj = honest
        queues.seed(int(before))
