"""What the doctor's child process answers on this machine, asked in this process."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from simpletune.commands.doctor.probe import bitsandbytes_facts, host_facts, product_facts, quanto_facts, torch_facts
from simpletune.commands.doctor.probe_steps import take_steps

without_a_card = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


@without_a_card
def test_torch_and_the_devices_that_it_sees() -> None:
    found = torch_facts()
    assert found["version"] == torch.__version__ and found["cuda"] == torch.version.cuda
    assert found["devices"] == [] and "no NVIDIA GPU was found" in found["refused"]
    assert "not the demo model" not in found["refused"]  # which was asked for


@without_a_card
def test_the_processor_is_timed_where_there_is_no_card() -> None:
    found = host_facts()
    assert found["processor"] and found["core"] > 0 and found["launch"] is None


@pytest.mark.dry
def test_a_simulated_card_is_timed() -> None:
    """Its L4 takes no time to multiply."""
    found = product_facts()
    assert found["dtype"] == "bf16" and found["tflops"] > found["expected"] == pytest.approx(56.6, rel=0.1)
    assert host_facts()["launch"] < 5e-6


def test_versions_of_the_libraries() -> None:
    assert bitsandbytes_facts()["version"] == importlib.metadata.version("bitsandbytes")
    assert quanto_facts() == {"version": importlib.metadata.version("optimum-quanto")}


@without_a_card
def test_steps_of_the_demo_are_finite_and_repeatable() -> None:
    plain, first, again = (take_steps(weights, 2) for weights in ("bf16", "int8", "int8"))
    for found in (plain, first):
        assert len(found["losses"]) == 2 and all(torch.tensor(found["losses"]).isfinite())
        assert found["seconds_per_step"] > 0 and "measured_mib" not in found
    assert first["losses"] == again["losses"] != plain["losses"]  # drawn from the same seed
