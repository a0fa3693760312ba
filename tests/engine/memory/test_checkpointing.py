"""Checkpointing block by block: exact, it keeps what it says, and the fewest blocks for a budget are the fewest."""

from __future__ import annotations

import weakref

import pytest
import torch
from blocks import BLOCKS, LateCopies, Setting, loss_of, prepare, shake_updates, transformer
from torch import Tensor, nn

from simpletune.adapters.methods.lora import Lora
from simpletune.engine.memory.checkpointing import budget_error, draws_random_numbers, find_fewest, set_passes
from simpletune.engine.memory.offload_inputs import CheckpointInputOffload
from simpletune.engine.quant.precision import FP32

HIDDEN, TEXT, WIDTH, SAMPLES = 16, 6, 32, 2
BOUNDARY_BYTES = SAMPLES * (HIDDEN + TEXT) * WIDTH * 4


def gradients(setting: Setting, dropout: float) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two micro-batches and the gradients that add up."""
    model = transformer(FP32())
    Lora(rank=2, dropout=dropout).attach(model, 7)
    shake_updates(model)
    prepare(model.train(), setting)
    torch.manual_seed(0)
    losses = []
    for micro in range(2):
        loss = loss_of(model, FP32(), micro)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


SOME, EVERY = Setting(checkpointed=2), Setting(checkpointed=BLOCKS)
SOME_LATE = Setting(checkpointed=3, host=True, queue=LateCopies)
EVERY_ON_HOST = Setting(checkpointed=BLOCKS, host=True)


@pytest.mark.parametrize(("dropout", "settings"), [(0.0, [SOME, SOME_LATE]), (0.5, [EVERY, EVERY_ON_HOST])])
def test_any_number_of_blocks_and_either_place_give_the_same_bits(dropout: float, settings: list[Setting]) -> None:
    plain = gradients(Setting(checkpointed=0), dropout)
    for setting in settings:
        torch.testing.assert_close(gradients(setting, dropout), plain, rtol=0, atol=0)


def kept_bytes(checkpointed: int) -> int:
    """Measured: bytes of what a forward pass keeps on the device for the backward pass, weights left out."""
    model = transformer(FP32())
    Lora(rank=2).attach(model, 7)
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    prepare(model, Setting(checkpointed=checkpointed))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, FP32(), 0).backward()
    return sum(kept.values())


def test_every_checkpointed_block_keeps_less_and_the_fewest_for_a_budget_are_those_that_brute_force_finds() -> None:
    measured = [kept_bytes(number) for number in range(BLOCKS + 1)]
    assert measured == sorted(measured, reverse=True) and len(set(measured)) == BLOCKS + 1
    assert measured[0] - measured[1] > 4 * BOUNDARY_BYTES
    for budget in sorted({size + change for size in measured for change in (-1, 0, 1)}):
        fits = [number for number, size in enumerate(measured) if size <= budget]
        assert find_fewest(BLOCKS, measured.__getitem__, budget) == (fits[0] if fits else None)
    for blocks in (1, 2, 24):
        for answer in range(blocks):
            asked: list[int] = []
            peak = lambda number: asked.append(number) or 1000 - number  # noqa: B023, E731
            assert find_fewest(blocks, peak, 1000 - answer) == answer
            assert len(asked) <= 1 + blocks.bit_length()


def test_the_error_names_a_budget_that_works() -> None:
    gib = 2**30
    said = str(budget_error(gib, 5 * gib // 2 + 5))
    assert (
        "memory.budget_gib: 1 GiB is too little: with every block checkpointed" in said and "Raise it to 2.51," in said
    )
    assert find_fewest(4, lambda number: 5 * gib // 2 + 5, int(2.51 * gib)) == 0


def test_offloaded_inputs_take_their_arithmetic_in_host_memory_once() -> None:
    """Those of a dropped forward pass are forgotten, and a second backward pass would find others there."""
    model = transformer(FP32())
    Lora(rank=2).attach(model, 7)
    inputs = CheckpointInputOffload(torch.device("cpu"))
    set_passes(model.transformer_blocks, BLOCKS, inputs)
    for micro in range(3):
        loss_of(model, FP32(), micro).backward()
        assert inputs.host_bytes == BLOCKS * BOUNDARY_BYTES
    loss_of(model, FP32(), 0)
    loss_of(model, FP32(), 0).backward()
    assert len(inputs._before) == len(inputs._block) == 0
    loss = loss_of(model, FP32(), 0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass"):
        loss.backward()


def test_random_state_is_kept_only_for_dropout() -> None:
    for dropout in (0.0, 0.1):
        model = transformer(FP32())
        Lora(rank=2, dropout=dropout).attach(model, 7)
        assert all(draws_random_numbers(block) is (dropout > 0) for block in model.transformer_blocks)


def test_nothing_is_kept_or_computed_twice_without_gradients() -> None:
    model = transformer(FP32()).requires_grad_(False)
    prepare(model, Setting(host=True))
    passes: list[int] = []
    model.transformer_blocks[1].attn.register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        loss_of(model, FP32(), 0)
    assert passes == [1]


def test_a_block_gets_its_keyword_arguments_again() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, **named: Tensor) -> Tensor:
            return self.linear(x).tanh() * named["scale"]

    x, scale, gradients = torch.randn(2, 4), torch.full((4,), 3.0, requires_grad=True), []
    for checkpointed in (0, 1):
        torch.manual_seed(0)
        block = Scaled()
        set_passes([block], checkpointed)
        block(x, scale=scale).sum().backward()
        gradients.append((block.linear.weight.grad, scale.grad))
        scale.grad = None
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_an_offloaded_input_is_freed_before_the_next_block_but_one() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.linear(x).tanh()
            return found

    blocks, alive = [Plain() for _ in range(3)], []
    set_passes(blocks, 3, CheckpointInputOffload(torch.device("cpu")))
    x = torch.randn(1, 2, 4)
    for block in blocks:
        alive.append(weakref.ref(x.untyped_storage()))
        x = block(x)
    assert [each() is not None for each in alive] == [False, False, True], "the last one is leaving"
    x.sum().backward()
