"""Saved tensors computed a second time: the same bits as torch's checkpoint, freed as early, with fewer books."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from simpletune.engine.memory.recompute import recompute

Run = Callable[..., Tensor]


class Block(nn.Module):
    """A network with dropout, whose input is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)
        self.passes = 0

    def forward(self, x: Tensor, scale: float) -> Tensor:
        self.passes += 1
        return x + self.dropout(torch.tanh(self.linear(x)) * x) * scale


def by_torch(block: Block, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(block, x, 3.0, use_reentrant=False)
    return found


def by_ours(block: Block, x: Tensor) -> Tensor:
    return recompute(block, (x, 3.0), random=True)


def learned(run: Callable[[Block, Tensor], Tensor], autocast: bool) -> list[Tensor]:
    """The output of two blocks, and the gradients of input and weights."""
    torch.manual_seed(0)
    blocks, start = [Block(), Block()], torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = run(blocks[1], run(blocks[0], start))
    out.square().mean().backward()
    assert [block.passes for block in blocks] == [2, 2]
    return [out.detach(), *(each.grad for each in (start, *blocks[0].parameters(), *blocks[1].parameters()))]  # type: ignore[misc]


@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_and_gradients_have_the_bits_of_torchs_checkpoint(autocast: bool) -> None:
    for own, theirs in zip(learned(by_ours, autocast), learned(by_torch, autocast), strict=True):
        assert torch.equal(own, theirs)


def test_the_second_pass_ends_with_the_last_saved_tensor() -> None:
    reached: list[str] = []

    def run(x: Tensor) -> Tensor:
        y = x.sin()
        reached.append("saved")
        y = y + 1  # saves nothing
        reached.append("end")
        return y

    recompute(run, (torch.ones(3, requires_grad=True),)).sum().backward()
    assert reached == ["saved", "end"], "sin saves its input before it computes"


def test_a_recomputed_tensor_is_freed_with_the_node_that_saved_it() -> None:
    alive: list[weakref.ref[Tensor]] = []
    seen: list[int] = []

    def run(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.exp()  # saves its result
            alive.append(weakref.ref(x.untyped_storage()))  # type: ignore[arg-type]
        return x

    start = torch.ones(3, requires_grad=True)
    first = start * 2
    first.register_hook(lambda _: seen.append(sum(each() is not None for each in alive[3:])))
    out = recompute(run, (first,))
    assert [each() is not None for each in alive] == [False, False, True], "only the output is kept"
    out.sum().backward()
    assert seen == [0]


def test_a_second_backward_pass_is_refused() -> None:
    out = recompute(torch.exp, (torch.ones(3, requires_grad=True),)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        out.backward()


def test_a_function_that_saves_less_the_second_time_is_an_error() -> None:
    passes: list[int] = []

    def run(x: Tensor) -> Tensor:
        passes.append(1)
        return x.exp().exp() if len(passes) == 1 else x.exp()

    out = recompute(run, (torch.ones(3, requires_grad=True),)).sum()
    with pytest.raises(RuntimeError, match="saved 1 tensors, and the forward pass 2"):
        out.backward()


def test_one_checkpoint_inside_another_recomputes_from_the_outer_ones_second_pass() -> None:
    def inner(x: Tensor) -> Tensor:
        return torch.tanh(x).exp()

    def outer(x: Tensor) -> Tensor:
        return recompute(inner, (x * 2,)) * x

    grads = []
    for run in (outer, lambda x: recompute(outer, (x,))):
        start = torch.linspace(0, 1, 5, requires_grad=True)
        run(start).sum().backward()
        grads.append(start.grad)
    assert torch.equal(*grads)  # type: ignore[arg-type]
