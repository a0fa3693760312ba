"""``precision.products: auto``: how a run decides, what it says, and that it stays so."""

from __future__ import annotations

import json

import pytest
import torch

from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.quant.precision import Int8
from simpletune.estimate import int8_choice
from simpletune.estimate.int8_choice import Product, Timed, choose_products, largest_product
from simpletune.system.options import ConfigError, Json
from simpletune.training.train import train

AUTO = {"weights": "int8", "products": "auto", "input_gradient": "int8"}
CARD = torch.device("cuda")


@pytest.fixture
def config(tiny_config: Json) -> TrainConfig:
    return validate(tiny_config | {"precision": AUTO}, "x")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[bool, Timed]:
    """Seconds of a product in int8 (True) and dequantised, which a test sets."""
    found: dict[bool, Timed] = {}
    monkeypatch.setattr(int8_choice, "int8_problem", lambda device: None)
    monkeypatch.setattr(int8_choice, "rotation_problem", lambda device: "rows differ")
    monkeypatch.setattr(
        int8_choice, "time_product", lambda precision, product, device: found[precision.products == "int8"]
    )
    return found


def kinds(config: TrainConfig) -> tuple[str, str]:
    assert isinstance(config.precision, Int8)
    return config.precision.products, config.precision.input_gradient


@pytest.mark.parametrize(
    ("int8", "plain", "faster"),
    [
        (Timed(80e-6, 30e-6), Timed(100e-6, 20e-6), True),  # the card limits both
        (Timed(40e-6, 120e-6), Timed(100e-6, 20e-6), False),  # its host limits int8, as on an H100
        (Timed(40e-6, 90e-6), Timed(100e-6, 20e-6), True),
    ],
)
def test_of_each_kind_the_larger_counts_and_the_smaller_of_the_two_decides(
    config: TrainConfig, timed: dict[bool, Timed], capsys: pytest.CaptureFixture, int8: Timed, plain: Timed,
    faster: bool,
) -> None:  # fmt: skip
    timed |= {True: int8, False: plain}
    assert kinds(choose_products(config, CARD)) == (("int8", "int8") if faster else ("dequantised", "dequantised"))
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and ("products in int8 (auto" if faster else "products dequantised (auto") in said
    assert f"take {1e6 * int8.device:,.0f} us in int8 and {1e6 * plain.device:,.0f} dequantised" in said
    assert f"the host {1e6 * int8.host:,.0f} and {1e6 * plain.host:,.0f})" in said


def test_where_int8_cannot_run_the_reason_is_said(
    config: TrainConfig, timed: dict[bool, Timed], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rotated = config.model_copy(update={"precision": config.precision.model_copy(update={"rotation": "hadamard"})})
    for each, device, reason in ((config, "cpu", "on the CPU"), (rotated, "cuda", "rows differ")):
        assert kinds(choose_products(each, torch.device(device))) == ("dequantised", "dequantised")
        assert capsys.readouterr().out == f"int8    products dequantised (auto: {reason})\n"
    monkeypatch.setattr(int8_choice, "int8_problem", lambda device: "it is sm_75")
    assert kinds(choose_products(config, CARD))[0] == "dequantised" and "sm_75" in capsys.readouterr().out


def test_a_resumed_run_multiplies_as_it_did(config: TrainConfig, timed: dict[bool, Timed]) -> None:
    for before in ("int8", "dequantised"):
        assert kinds(choose_products(config, CARD, {"precision": {"products": before}}))[0] == before
    settled = choose_products(config, CARD, {"precision": {"products": "int8"}})
    assert choose_products(settled, CARD) is settled, "not auto: nothing is timed"


def test_the_product_that_is_timed_is_the_one_with_most_operations(config: TrainConfig) -> None:
    assert isinstance(config.precision, Int8)
    found = largest_product(config, config.precision)
    assert isinstance(found, Product) and found.rows > 16
    twice = config.model_copy(update={"train": config.train.model_copy(update={"batch_size": 2})})
    assert largest_product(twice, config.precision) == found._replace(rows=2 * found.rows)


def test_a_run_records_what_it_chose_and_goes_on_so(tiny_config: Json) -> None:
    data = tiny_config | {"precision": AUTO, "train": {"steps": 1}}
    run = train(validate(data, "x"))
    recorded = json.loads((run / "config.json").read_text())["precision"]
    assert (recorded["products"], recorded["input_gradient"]) == ("dequantised", "dequantised")
    assert train(validate(data | {"train": {"steps": 2}}, "x"), resume="latest") == run


def test_gradients_in_int8_need_products_that_may_be(tiny_config: Json) -> None:
    with pytest.raises(ConfigError, match="needs precision.products int8"):
        validate(tiny_config | {"precision": AUTO | {"products": "dequantised"}}, "x")
