"""Measuring a device: rates of operations and of the machine, and what is said of those that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from simpletune.options import UserError
from simpletune.timing import calibrate, composite, machine_probes, stopwatch
from simpletune.timing.constants import Constants
from simpletune.timing.probes import Probe

CPU = torch.device("cpu")


def broken(point: tuple[int, ...]) -> Callable[[], object]:
    raise RuntimeError("no such kernel")


def product(point: tuple[int, ...]) -> Callable[[], object]:
    m, n, k = point
    a, b = torch.ones(m, k), torch.ones(k, n)
    return lambda: a @ b


PROBES = [
    Probe("product.fp32", {"m": [8, 16], "n": [8], "k": [8]}, product, lambda point: 4096),
    Probe("add.fp32", {"bytes": [2**10]}, lambda point: torch.ones(point[0]).clone, lambda point: point[0]),
    Probe("convolution.fp32", {"bytes": [2**10]}, broken, lambda point: point[0]),
]


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "probes_of", lambda device: PROBES)
    monkeypatch.setattr(composite, "ON_CPU", ())
    monkeypatch.setattr(stopwatch, "ENOUGH", 1e-4)
    monkeypatch.setattr(stopwatch, "reference_load", lambda: torch.ones(1).sum)
    monkeypatch.setattr(machine_probes, "SIDE", 64)
    monkeypatch.setattr(machine_probes, "WRITTEN", 2**12)


@pytest.mark.usefixtures("brief")
def test_what_can_be_measured_is_written_and_the_rest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cpu.json"
    with pytest.raises(UserError, match=r"not measured: convolution.fp32 \(.*no such kernel") as ended:
        calibrate.calibrate("cpu", out, tmp_path, 60)
    assert ended.value.code == 1
    found = Constants.model_validate_json(out.read_text())
    assert set(found.grids) == {"product.fp32", "add.fp32"} and set(found.failed) == {"convolution.fp32"}
    assert all(seconds is not None and seconds > 0 for grid in found.grids.values() for seconds in grid.seconds)
    for name in ("read_jpeg", "write_png", "noise", "write_byte", "reference_seconds"):
        assert found.rates[name] > 0
    assert (found.kind, found.capability, found.threads) == ("cpu", None, torch.get_num_threads())
    said = capsys.readouterr().out
    for words in ("products in fp32: ", "add fp32: ", "us to queue an operation", "2 kinds of operations"):
        assert words in said


@pytest.mark.usefixtures("brief")
def test_nothing_is_begun_after_the_budget() -> None:
    found = calibrate.measure(stopwatch.stopwatch_of(CPU), PROBES, -1.0)
    assert found.grids == {} and set(found.failed) == {probe.name for probe in PROBES}
    assert all("were over" in why for why in found.failed.values())


def test_familiar_figures_by_hand() -> None:
    """2 m n k operations of 4 x 6 x 8 in 1 ns are 0.384 TFLOP/s; 16 MiB in 2 ms are 8.4 GB/s."""
    about = calibrate.described(stopwatch.stopwatch_of(CPU))
    product_of = calibrate.Grid(axes={"m": [4], "n": [6], "k": [8]}, seconds=[1e-9])
    copy = calibrate.Grid(axes={"bytes": [2**24]}, seconds=[2e-3])
    grids = {"product.fp32": product_of, "to_host.pinned": copy, "norm.fp32": copy}
    lines = calibrate.in_words(about.model_copy(update={"grids": grids, "host": {"operation": 5e-6}}))
    assert lines[0].endswith("products in fp32: 0.38 TFLOP/s") and "to_host pinned: 8.4 GB/s" in lines[1]
    assert "5.0 us to queue" in lines[2] and len(lines) == 3
