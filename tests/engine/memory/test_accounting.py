"""The tensor-byte accounting: every way in which storages come, change and go, on real tensors and on fake ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from fresh_caches import uncalled
from optimum.quanto import QLinear, qint8
from torch import nn
from torch.utils.checkpoint import checkpoint

from simpletune.engine.memory import accounting, cuda_libraries
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.cuda_libraries import Workspaces, cublas_workspace, cublas_workspaces
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.memory.kernel_workspace import quanto_product, temporaries
from simpletune.engine.memory.snapshot import HOST, MemorySnapshot, largest_of, round_to_block
from simpletune.estimate.simulate.reports import with_workspace
from simpletune.system.phases import phase

KIB = 1024


@pytest.fixture(params=["real", "fake"], autouse=True)
def tensors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs twice."""
    with fake_tensors() if request.param == "fake" else nullcontext():
        yield


def test_sizes_are_the_caching_allocators_and_temporaries_count_only_at_the_peak() -> None:
    assert [round_to_block(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    with Accounting() as count:
        kept = torch.empty(129)
        assert count.current.bytes == 1024
        del kept
        assert count.current.bytes == 0
    assert count.peak.bytes == 1024
    with Accounting() as count:
        x = torch.zeros(256)
        x = (x + 1) * 2  # x, x + 1, (x + 1) * 2
        assert (count.current.bytes, count.peak.bytes) == (KIB, 3 * KIB)


def test_views_and_in_place_operations_take_nothing() -> None:
    with Accounting() as count:
        x = torch.zeros(4, 256)
        before = count.current.bytes
        y = x.view(256, 4).t()[2:]
        y.mul_(2).add_(1)
        assert count.current.bytes == before == count.peak.bytes == 4 * KIB
        del x
        assert count.current.bytes == 4 * KIB  # the view holds the storage
        del y
        assert count.current.bytes == 0


def test_data_is_swapped_and_storages_are_resized() -> None:
    weight = nn.Parameter(torch.zeros(256))
    with Accounting() as count:
        count.register([weight], "weights")
        with count.allocating("weights"):
            other = torch.zeros(512)
        weight.data = other
        del other
        assert count.current.by_kind == {"weights": 2 * KIB}
        weight.data = torch.zeros(0)
        assert count.current.bytes == 0
        x = torch.zeros(256)
        x.untyped_storage().resize_(0)
        assert count.current.bytes == 0
        x.untyped_storage().resize_(8 * KIB)
        assert count.current.bytes == count.peak.bytes == 8 * KIB
        y = torch.zeros(256)
        y.resize_(512)
        assert count.current.bytes == 10 * KIB
    assert not hasattr(torch.UntypedStorage.resize_, "__closure__") or torch.UntypedStorage.resize_.__closure__ is None


def test_kinds_are_registered_by_context_and_by_phase() -> None:
    weight = torch.zeros(256)
    with Accounting() as count:
        accounting.register([weight, None], "weights")
        with accounting.allocating("plan"):
            plan = torch.zeros(512)
        with accounting.allocating(HOST):
            pinned = torch.zeros(1024)
        with phase("forward"):
            activation = weight + 1
        other = torch.zeros(128)
        assert count.current.by_kind == {
            "weights": KIB, "plan": 2 * KIB, "activations": KIB, "workspace": 512,
        }  # fmt: skip
        assert count.current.bytes == 4 * KIB + 512
        assert count.host_bytes == 4 * KIB
        accounting.register([plan], HOST)
        assert (count.current.bytes, count.host_bytes) == (2 * KIB + 512, 6 * KIB)
    del plan, pinned, activation, other


def test_without_an_accounting_nothing_is_said_and_with_one_an_unknown_kind_is_refused() -> None:
    accounting.register([torch.zeros(1)], "weights")
    with accounting.allocating("weights"):
        assert torch.zeros(1).shape == (1,)
    with Accounting(), pytest.raises(ValueError, match="'wheights' is not a kind of memory.*weights, adapter"):
        accounting.register([], "wheights")


def test_gradients_and_optimizer_state() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with Accounting() as count:
        count.register(model.parameters(), "weights")
        count.watch_gradients(model.parameters())
        with phase("forward"):
            loss = model(torch.ones(2, 64)).sum()
        with phase("backward"):
            loss.backward()
        del loss
        assert count.current.by_kind == {"weights": 16 * KIB, "gradients": 16 * KIB}
        with phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert count.current.by_kind == {"weights": 16 * KIB, "optimizer": 32 * KIB + 512}  # and the step counter
    assert count.peak.phase == "optimizer"
    assert count.peak.by_kind["workspace"] >= 16 * KIB  # foreach: the root of the squares, of all parameters together


class _Square(torch.autograd.Function):
    """Makes a tensor of its own in both passes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x + 0)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0]


class _Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Square.apply(_Square.apply(x))


def test_autograd_functions_and_checkpoints() -> None:
    chain = _Chain()
    x = torch.ones(256, requires_grad=True)
    with Accounting() as count:
        count.phases.watch_modules([("chain", chain)])
        count.register([x], "weights")
        with phase("forward"):
            y = chain(x)
            assert count.current.by_kind["activations"] == 3 * KIB  # two saved copies, the result; the middle is gone
            del y
            y = checkpoint(chain, x, use_reentrant=False)
            assert count.current.by_kind["activations"] == KIB
        with phase("backward"):
            y.sum().backward()
    assert count.peaks["recompute"].by_kind["activations"] >= 4 * KIB  # the result and three of the four
    assert {snapshot.module for snapshot in (count.peaks["recompute"], count.peaks["backward"])} == {"chain"}


def test_the_peaks_place_and_moment() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4096), nn.Linear(4096, 1))
    with Accounting() as count:
        hooks = count.phases.watch_modules(model.named_children())
        with phase("forward"):
            y = model(torch.ones(8, 64))
        assert (count.peak.phase, count.peak.module) == ("forward", "2")
        with phase("backward"):
            y.backward(torch.ones_like(y))
        for hook in hooks:
            hook.remove()
    assert (count.peak.phase, count.peak.module) == ("backward", "1")  # two wide gradients, and that of its weight


def test_wrapper_subclasses_are_seen_inside() -> None:
    linear = QLinear.from_module(nn.Linear(64, 64).bfloat16(), weights=qint8)
    linear.freeze()
    linear.requires_grad_(False)
    x = torch.ones(8, 64, dtype=torch.bfloat16, requires_grad=True)
    with Accounting() as count:
        count.register(linear.parameters(), "weights")
        assert count.current.by_kind == {"weights": 4 * KIB + 512 + 512}  # int8, a scale and a bias a row
        with phase("forward"):
            y = linear(x)
        with phase("backward"):
            y.sum().backward()
    assert count.peaks["backward"].by_kind["activations"] >= 8 * KIB  # the weight dequantised in bf16


def test_a_cycle_lives_until_it_is_collected() -> None:
    class Node:
        pass

    gc.disable()
    try:
        with Accounting() as count:
            node = Node()
            node.itself, node.tensor = node, torch.zeros(256)
            del node
            assert count.current.bytes == KIB
            gc.collect()
            assert count.current.bytes == 0
    finally:
        gc.enable()


def test_what_kernels_hold_counts_within_the_call() -> None:
    q = torch.zeros(1, 2, 100, 64, requires_grad=True)
    peaks = []
    for terms in ({}, temporaries()):
        with Accounting(terms) as count, phase("backward"):
            nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        peaks.append(count.peaks["backward"].bytes)
        q.grad = None
    copied = 2 * q.nbytes  # the output, and the gradient of the sum, are not laid out as [b, S, h, d]
    assert 0 < peaks[1] - peaks[0] <= round_to_block(4 * 2 * 128 * 65 + copied)
    weight, scale = torch.zeros(8, 4, dtype=torch.int8), torch.zeros(8, 1, dtype=torch.bfloat16)
    assert quanto_product(scale, weight, scale) == 64


@pytest.mark.parametrize("version", ["2.13.0+cu130", "2.14.1", "2.15.0+cu132", "2.16.0a0"])
def test_a_workspace_of_cublas_is_kept_until_torch_2_14_and_freed_by_later_ones(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As both allocate on a simulated L4 and H100 (tests/gpu/dry_gpu)."""
    monkeypatch.setattr(cuda_libraries, "version_or_none", lambda name: version)
    monkeypatch.setattr(cuda_libraries, "frees_workspaces", uncalled(cuda_libraries.frees_workspaces))
    l4, h100 = cublas_workspaces((8, 9)), cublas_workspaces((9, 0), threads=1)
    if version < "2.15":
        assert (l4, h100) == ((2 * 8519680, 0), (33554432, 0))
    else:
        assert (l4, h100) == ((0, 8519680), (0, 33554432))
    assert cublas_workspace((8, 9)) == sum(l4)


def test_a_product_is_found_that_is_smaller_than_what_follows_it() -> None:
    """The peak is 10 KiB in the forward pass; products have up to 7 KiB there and 8 KiB in the backward pass."""
    with Accounting() as count:
        x = torch.zeros(16, 16)  # 1 KiB
        with phase("forward"):
            x @ torch.cat([x, x, x], 1)  # beside 3 KiB
            torch.zeros(9 * 256)
        with phase("backward"):
            held = torch.zeros(6 * 256)
            torch.bmm(x[None], x[None])
            del held
    peak = count.peak
    assert (peak.bytes, peak.phase, peak.in_products) == (10 * KIB, "forward", 8 * KIB)
    assert {name: each.in_products for name, each in count.peaks.items() if name} == {
        "forward": 7 * KIB, "backward": 8 * KIB,
    }  # fmt: skip
    kept, within = with_workspace(peak, Workspaces(4 * KIB, 0)), with_workspace(peak, Workspaces(0, 3 * KIB))
    assert (kept.bytes, kept.by_kind["workspace"]) == (14 * KIB, 5 * KIB)  # x is of this kind, too
    assert (within.bytes, within.by_kind["workspace"]) == (11 * KIB, 2 * KIB)
    assert with_workspace(peak, Workspaces(0, 2 * KIB)) == peak
    assert with_workspace(MemorySnapshot(10 * KIB), Workspaces(0, KIB)).bytes == 11 * KIB, "unknown: at the peak"
    assert largest_of([peak, MemorySnapshot(9 * KIB, in_products=9 * KIB)]).in_products == 9 * KIB
