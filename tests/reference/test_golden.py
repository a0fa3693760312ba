"""Golden losses: a change that should not change numbers shows identical losses, for each adapter and precision.

They were recorded on an x86-64 CPU with torch 2.13.0; other machines agree within the tolerance. To record them again
after a change that should change numbers: ``pytest -s`` prints them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import losses_of, merged

GOLDEN = json.loads((Path(__file__).parent / "golden_losses.json").read_text())
CASES = [
    (adapter, weights, compute)
    for adapter, precisions in {
        "lora": [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("int8", "fp32"), ("int8", "bf16"),
                 ("int8-quanto", "fp32"), ("int8-quanto", "bf16"), ("nf4", "fp32"), ("nf4", "bf16"),
                 ("fp32", "fp16"), ("bf16", "fp16"), ("int8", "fp16"), ("int8-quanto", "fp16"), ("nf4", "fp16"),
                 ("int8+hadamard", "fp32"), ("int8+hadamard", "bf16"), ("nf4+hadamard", "fp32"),
                 ("nf4+hadamard", "fp16")],
        "full": [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("fp32", "fp16")],
        "partial": [("fp32", "fp32"), ("bf16", "bf16")],
        "lokr": [("fp32", "fp32"), ("int8", "bf16")],
        "loha": [("fp32", "fp32")],
        "dora": [("fp32", "fp32"), ("int8", "bf16"), ("int8+hadamard", "fp32")],
        "oft": [("fp32", "fp32"), ("int8", "bf16"), ("int8+hadamard", "fp32")],
    }.items()
    for weights, compute in precisions
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_losses_are_those_recorded(case: tuple[str, str, str], tiny_config: dict) -> None:
    losses = losses_of(tiny_config, *case)
    print(f'GOLDEN "{"-".join(case)}": {json.dumps(losses)}')
    assert losses == pytest.approx(GOLDEN["-".join(case)], rel=1e-5 if case[2] == "fp32" else 5e-3)


def test_lion_with_decay_has_the_losses_recorded(tiny_config: dict) -> None:
    data = merged(tiny_config, optimizer={"name": "lion8bit", "lr": 1e-3, "weight_decay": 0.1})
    losses = losses_of(data, "full", "fp32", "fp32")
    print(f'GOLDEN "full-lion8bit": {json.dumps(losses)}')
    assert losses == pytest.approx(GOLDEN["full-lion8bit"], rel=1e-5)
