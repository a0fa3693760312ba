"""Optimizers over tensors large enough for 8-bit state: learning in bf16, and state to disk and back."""

from __future__ import annotations

import json

import bitsandbytes.optim
import pytest
import torch
from optimizers import LR, NAMES, STEPS, option_of
from reference.lion import lion_step
from safetensors.torch import load, save
from torch import nn

from simpletune.engine.optim import eight_bit_steps
from simpletune.engine.optim.in_backward import step_in_backward
from simpletune.engine.optim.options import OptimizerOption
from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.engine.optim.schedule import Constant, Cosine, CosineWithRestarts, Linear, Polynomial, Rex, Schedule
from simpletune.engine.optim.state import begin_step, state_to_tensors


def drift(option: OptimizerOption) -> float:
    """How far bf16 weights of 1 come in STEPS updates of about LR, all of one sign."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
    optimizer = option.build([weight])
    for _ in range(STEPS):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return 1 - weight.float().mean().item()


@pytest.mark.parametrize("name", NAMES)
def test_small_updates_of_bf16_weights_add_up_and_are_lost_if_rounded_to_nearest(name: str) -> None:
    if name not in ("prodigy", "adamw_schedule_free"):  # whose weights do not move by the learning rate in each step
        assert drift(option_of(name)) == pytest.approx(STEPS * LR, rel=0.08)
    if name != "adamw_bf16":
        assert drift(option_of(name, rounding="nearest")) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_state_goes_to_disk_and_back_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    option = option_of(name)

    def steps(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
        for step in range(first, first + count):
            torch.manual_seed(step)
            begin_step(optimizer)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape).to(dtype)
            optimizer.step()

    torch.manual_seed(99)
    start = [torch.randn(64, 128).to(dtype), torch.randn(96, 64).to(dtype), torch.randn(5).to(dtype)]
    whole = [nn.Parameter(tensor.clone()) for tensor in start]
    optimizer = option.build(whole)
    steps(whole, optimizer, 0, 3)
    tensors, scalars = state_to_tensors(optimizer)
    on_disk = save({key: tensor.contiguous() for key, tensor in tensors.items()}), json.dumps(scalars)
    halves = [nn.Parameter(parameter.detach().clone()) for parameter in whole]
    steps(whole, optimizer, 3, 3)

    tables = [key for key in tensors if ".qmap" in key]
    assert len(tables) <= 2 and bool(tables) == ("8bit" in name)
    again = option.build(halves)
    loaded = load(on_disk[0])
    option.load_state(again, loaded, json.loads(on_disk[1]))
    held = [value for state in again.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert not {tensor.data_ptr() for tensor in held} & {tensor.data_ptr() for tensor in loaded.values()}
    steps(halves, again, 3, 3)
    for ours, theirs in zip(halves, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_state_takes_the_bytes_that_are_promised(name: str) -> None:
    option = option_of(name)
    dtype = torch.bfloat16 if name == "adamw_bf16" else torch.float32
    weight = nn.Parameter(torch.randn(512, 512).to(dtype))
    optimizer = option.build([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    tensors = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
    taken = sum(t.numel() * t.itemsize for t in tensors if t.numel() > 256) / weight.numel()
    assert taken == pytest.approx(option.bytes_per_parameter, rel=0.03, abs=0.01)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Constant(warmup_steps=3), [0.25, 0.5, 0.75, 1, 1, 1, 1]),
        (Linear(warmup_steps=3), [0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25]),
        (Linear(), [1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7]),
        (Cosine(warmup_steps=1), [0.5, 1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873]),
        (Polynomial(power=2, end=0.2, warmup_steps=3), [0.25, 0.5, 0.75, 1, 0.65, 0.4, 0.25]),
        (CosineWithRestarts(cycles=2, warmup_steps=1), [0.5, 1, 0.75, 0.25, 1, 0.75, 0.25]),
        (CosineWithRestarts(cycles=1, warmup_steps=1), [0.5, 1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873]),
        (Rex(warmup_steps=3), [0.25, 0.5, 0.75, 1, 6 / 7, 2 / 3, 2 / 5]),
    ],
)
def test_schedules_by_hand(schedule: Schedule, factors: list[float]) -> None:
    assert [schedule.factor(step, 7) for step in range(7)] == pytest.approx(factors)


def test_a_restart_begins_at_the_full_rate() -> None:
    """Also where float64 puts it just before the restart, as 22 of 44 steps do at step 30."""
    for steps in range(2, 70):
        for cycles in range(1, steps):
            restarts = [step for step in range(steps) if step * cycles % steps == 0]
            factors = [CosineWithRestarts(cycles=cycles).factor(step, steps) for step in restarts]
            assert len(factors) == len(restarts) >= 1 and min(factors) > 0.999, (steps, cycles)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keeps what would make the host wait for the whole device."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: found.append("torch"))
    monkeypatch.setattr("bitsandbytes.optim.optimizer.sync_gpu", lambda *_: found.append("bitsandbytes"))
    return found


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_no_update_waits_for_the_device(name: str, dtype: torch.dtype, in_backward: bool, waits: list[str]) -> None:
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((64, 128), (5,), (96, 64))]
    option = option_of(name, lr=0.05, **({"d0": 1.0} if name == "prodigy" else {}))
    if in_backward and not option.steps_in_backward:
        pytest.skip(f"{name} is refused with memory.optimizer_in_backward")
    optimizer = option.build(parameters, in_backward)
    if in_backward:
        assert isinstance(optimizer, RoundedOptimizer)
        step_in_backward(optimizer, clip_norm=1.0)
    for _ in range(3):
        begin_step(optimizer)
        torch.stack([parameter.float().square().sum() for parameter in parameters]).sum().backward()
        optimizer.step()
    assert all(optimizer.state[parameter] and (parameter < 1).all() for parameter in parameters)
    assert waits == []


@pytest.mark.parametrize("kind", ["AdamW8bit", "PagedAdamW8bit", "Lion8bit"])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_queued_updates_are_those_of_bitsandbytes(kind: str, waits: list[str]) -> None:
    found, numbers = [], []
    for made in (getattr(bitsandbytes.optim, kind), getattr(eight_bit_steps, f"Queued{kind}")):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in ((64, 128), (5,), (70, 100), (3,))]
        optimizer = made(parameters, lr=0.01, weight_decay=0.1)
        for step in range(5):
            for parameter in parameters[: 3 + step % 2]:  # the last has no gradient in every other step
                parameter.grad = torch.randn(parameter.shape)
            optimizer.step()
            optimizer.zero_grad()
        states = [value for p in parameters for value in optimizer.state[p].values()]
        found.append([*parameters, *(value for value in states if isinstance(value, torch.Tensor))])
        numbers.append(len(waits))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert numbers[0] == numbers[1] >= 17  # of bitsandbytes' own steps, and none of ours


@pytest.mark.parametrize("size", [5, 8192])  # with state of 32 and of 8 bits
def test_lion_decays_weights_apart_from_the_gradient(size: int) -> None:
    """bitsandbytes added the decay to the gradient of 32-bit states on a card until its #1993 and #2001."""
    generator = torch.Generator().manual_seed(0)
    exact = 40 * torch.randn(size, generator=generator, dtype=torch.float64)  # a decay that outweighs the gradient
    weight = nn.Parameter(exact.float())
    optimizer = option_of("lion8bit", lr=0.01, weight_decay=0.1).build([weight])
    mean, signs = torch.zeros_like(exact), torch.empty_like(exact).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
    for step in range(6):  # the first gradient outweighs the others, which change their signs: rounding turns no update
        weight.grad = (signs * (-1) ** step * (30 if step == 0 else 1)).float()
        optimizer.step()
        exact, mean = lion_step(exact, weight.grad.double(), mean, 0.01, (0.9, 0.99), 0.1)
    torch.testing.assert_close(weight.detach().double(), exact, rtol=1e-5, atol=1e-6)
    assert optimizer.state[weight]["state1"].dtype == (torch.uint8 if size == 8192 else torch.float32)


def test_paged_state_is_read_when_the_device_has_written_it(waits: list[str]) -> None:
    """Kernels write it while the host goes on, and a copy on the host would not wait for them."""
    optimizer = option_of("paged_adamw8bit").build([weight := nn.Parameter(torch.ones(64, 128))])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state_to_tensors(optimizer)
    assert waits == []
    optimizer.state[weight]["state1"].is_paged = True  # as bitsandbytes marks it
    state_to_tensors(optimizer)
    assert waits == ["torch"]
