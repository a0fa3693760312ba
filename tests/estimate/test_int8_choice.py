"""``precision.products: auto``: how a run decides, what it says, and that it stays so."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.quant.precision import Int8
from simpletune.estimate import int8_choice
from simpletune.estimate.int8_choice import (
    CALLS,
    TIMES,
    WARM,
    Product,
    Timed,
    choose_products,
    largest_product,
    time_product,
)
from simpletune.system.options import ConfigError, Json
from simpletune.training import set_up
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


class Clocks:
    """A host and a card that take given seconds for a layer's pass: the card begins when the host has queued it."""

    def __init__(self, host: Callable[[int], float], card: Callable[[int], float]):
        self.now = self.busy_until = 0.0
        self.inputs: list[Tensor] = []
        self._host, self._card, self._passes = host, card, 0

    def take_pass(self) -> None:
        number, self._passes = self._passes // 2, self._passes + 1  # of the call
        self.now += self._host(number)
        self.busy_until = max(self.busy_until, self.now) + self._card(number)

    def synchronise(self, device: torch.device) -> None:
        self.now = max(self.now, self.busy_until)


class Event:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self, clocks: Clocks, enable_timing: bool):
        assert enable_timing
        self.clocks, self.at = clocks, 0.0

    def record(self) -> None:
        self.at = max(self.clocks.now, self.clocks.busy_until)

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, clocks: Clocks, outputs: int) -> Tensor:
        ctx.clocks, ctx.shape = clocks, x.shape
        clocks.inputs.append(x)
        clocks.take_pass()
        return x.new_zeros(len(x), outputs)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.clocks.take_pass()
        return grads[0].new_zeros(ctx.shape), None, None


@pytest.fixture
def run_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[bool, Clocks]], None]:
    """Let products take the seconds of clocks: those in int8 (True), and dequantised ones."""
    current: list[Clocks] = []

    def convert(precision: Int8, linear: nn.Linear, by_kind: dict[bool, Clocks]) -> Callable[[Tensor], Tensor]:
        current.append(by_kind[precision.products == "int8"])
        return lambda x: Pass.apply(x, current[-1], linear.out_features)

    def run(by_kind: dict[bool, Clocks]) -> None:
        monkeypatch.setattr(Int8, "convert", lambda precision, linear: convert(precision, linear, by_kind))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(current[-1], enable_timing))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: current[-1].synchronise(device))
        monkeypatch.setattr(int8_choice, "time", SimpleNamespace(perf_counter=lambda: current[-1].now))

    return run


@pytest.mark.parametrize(("host", "card"), [(1e-6, 10e-6), (10e-6, 1e-6)])
def test_a_product_is_timed_forward_and_backward_by_card_and_host_and_the_least_loop_counts(
    run_on: Callable[[dict[bool, Clocks]], None], host: float, card: float
) -> None:
    def in_loop(number: int) -> int:
        return (number - WARM) // CALLS

    clocks = Clocks(
        host=lambda call: host * (1.0 if in_loop(call) in (1, 3) else 2.0),
        card=lambda call: card * (1.0 if in_loop(call) in (2, 3) else 5.0) * (50 if call < WARM else 1),
    )
    run_on({True: clocks})
    found = time_product(Int8(products="int8"), Product(32, 16, 8), torch.device("cpu"))
    assert found.host == pytest.approx(2 * host)
    queued = host + 2 * CALLS * card if card > host else 2 * CALLS * host + card  # the first, or the last, shows
    assert found.device == pytest.approx(queued / CALLS)
    assert found.counts == max(found)
    assert len({id(x) for x in clocks.inputs}) == len(clocks.inputs) == WARM + TIMES * CALLS, "no rows are shared"


def test_int8_is_taken_where_the_card_limits_and_left_where_the_host_does(
    config: TrainConfig,
    monkeypatch: pytest.MonkeyPatch,
    run_on: Callable[[dict[bool, Clocks]], None],
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(int8_choice, "int8_problem", lambda device: None)
    monkeypatch.setattr(int8_choice, "largest_product", lambda *_: Product(32, 16, 8))
    on_cpu = time_product
    monkeypatch.setattr(
        int8_choice, "time_product", lambda precision, product, device: on_cpu(precision, product, torch.device("cpu"))
    )
    for launch, taken, said in (
        (2.5e-6, "int8", "123 us in int8 and 201 dequantised; the host 30 and 15"),
        (25e-6, "dequantised", "312 us in int8 and 215 dequantised; the host 300 and 150"),
    ):

        def clocks(launches: int, card: float, launch: float = launch) -> Clocks:
            return Clocks(host=lambda _: launches * launch, card=lambda _: card)

        run_on({True: clocks(6, 60e-6), False: clocks(3, 100e-6)})
        assert kinds(choose_products(config, CARD))[0] == taken and said in capsys.readouterr().out


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


def test_several_processes_multiply_as_the_first_finds_faster(
    config: TrainConfig, timed: dict[bool, Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    firsts = choose_products(config, torch.device("cpu")).precision
    monkeypatch.setattr(set_up, "gather_object", lambda own: [firsts, *own])
    timed |= {True: Timed(1e-6, 1e-6), False: Timed(2e-6, 2e-6)}
    for processes, products in ((1, "int8"), (2, "dequantised")):
        accelerator = SimpleNamespace(device=CARD, num_processes=processes)
        settled = set_up.settle_products(config, accelerator, None)  # type: ignore[arg-type]
        assert isinstance(settled, Int8) and settled.products == products


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
