"""The GPU tests that the GPU in software cannot run, and why: pytest -p softgpu_selection (make softgpu)."""

from __future__ import annotations

import re

import pytest

LEFT_OUT = {
    r"test_compiled_blocks": "torch.compile's kernels are launched by Inductor, which the interpreter does not run",
    r"test_speed_of_int8_products|test_a_row_of_the_speed_grid": "measures speed",
    r"test_the_trace_holds": "reads the kernel events of CUPTI",
    r"test_int8_products_are_those.*-(1024|4429|16384)\]": "takes hours in Triton's interpreter; 17 and 333 rows are run",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them, with the reason."""
    for item in items:
        for pattern, reason in LEFT_OUT.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f"GPU in software: {reason}"))
