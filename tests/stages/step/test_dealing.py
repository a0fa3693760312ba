"""How a step's micro-batches are dealt to processes, and the tree that sums their gradients."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import reduction as reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import Launcher, free_port

from simpletune.config.batches import require_processes
from simpletune.config.load import validate
from simpletune.models.shared.conditioning import Conditioning
from simpletune.stages.step import exact_sums
from simpletune.stages.step.assignment import RankMicroBatches, leaves
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.exact_sums import TreeSum, _add, top_of_tree
from simpletune.system.options import ConfigError

AREAS = st.lists(st.sampled_from([1024, 4096, 4608, 6144]), min_size=1, max_size=33)
POWERS = st.sampled_from([1, 2, 4, 8, 16])


@given(AREAS, POWERS)
def test_exact_shares_are_the_reference_s_aligned_subtrees(areas: list[int], processes: int) -> None:
    if processes > 2 ** reference.width_of(len(areas)):
        processes = 1
    for process in range(processes):
        found = RankMicroBatches(process, processes, exact=True).select(areas)
        assert found == reference.share(areas, process, processes)


@given(AREAS, st.integers(1, 9), st.booleans())
def test_every_micro_batch_has_one_process_and_no_process_is_far_heavier(
    areas: list[int], processes: int, exact: bool
) -> None:
    shares = [RankMicroBatches(process, processes, exact).select(areas) for process in range(processes)]
    assert Counter(place for share in shares for place in share) == Counter(range(len(areas)))
    weights = [sum(areas[place] for place in share) for share in shares]
    assert max(weights) - min(weights) <= max(areas)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_process_takes_them_in_their_order_unless_it_sums_exactly() -> None:
    areas = [1, 3, 2, 3, 1]
    assert RankMicroBatches().select(areas) == [0, 1, 2, 3, 4]
    assert RankMicroBatches(exact=True).select(areas) == [1, 4, 2, 3, 0]  # ranks 1, 3, 2, 0, 4 at leaves 0, 4, 2, 1, 3
    assert leaves(8) == [0, 4, 2, 6, 1, 5, 3, 7] and leaves(0) == [] and leaves(3) == [0, 2, 1]


class Computed:
    """Stands in for the step core: each batch adds its gradients, none to the last parameter."""

    def __init__(self, gradients: dict[int, np.ndarray], dtype: torch.dtype = torch.float32):
        self.gradients = gradients
        self.used = torch.nn.Parameter(torch.zeros(3, 7, dtype=dtype))
        self.unused = torch.nn.Parameter(torch.zeros(2))

    def __call__(self, batch: Batch) -> torch.Tensor:
        gradient = torch.tensor(self.gradients[int(batch.names[0])], dtype=self.used.dtype)
        self.used.grad = gradient if self.used.grad is None else self.used.grad + gradient
        return gradient[0, 0].detach().float()


def batch_of(place: int, parts: float = 1.0) -> Batch:
    nothing = torch.zeros(1)
    return Batch(nothing, nothing, nothing, Conditioning(nothing), names=(str(place),), parts=parts)


@pytest.mark.parametrize(
    ("count", "dtype"),
    [(1, torch.float32), (2, torch.bfloat16), (5, torch.float32), (8, torch.bfloat16), (13, torch.float32)],
)
def test_the_sum_is_the_reference_s_bit_for_bit(count: int, dtype: torch.dtype) -> None:
    numbers = np.random.default_rng(count)
    areas = [int(area) for area in numbers.choice([1024, 4096], count)]
    gradients = {
        n: (numbers.standard_normal((3, 7)) * 10.0 ** numbers.integers(-4, 4)).astype("f4") for n in range(count)
    }
    rounded = [torch.from_numpy(gradients[n]).to(dtype).float().numpy() for n in range(count)]
    expected = torch.from_numpy(reference.tree_sum(rounded, areas))
    compute = Computed(gradients, dtype)
    order = RankMicroBatches(exact=True).select(areas)
    loss = TreeSum({"used": compute.used, "unused": compute.unused}).accumulate(
        [batch_of(place) for place in order], compute
    )
    assert compute.unused.grad is None and compute.used.grad is not None
    assert compute.used.grad.dtype == dtype
    assert torch.equal(compute.used.grad, expected.to(dtype))
    assert loss.shape == () and loss.item() == expected[0, 0].item()
    if count == 13:
        assert not torch.equal(expected, torch.stack(list(map(torch.from_numpy, rounded))).sum(0)), "the order shows"


@given(AREAS, POWERS)
def test_what_several_processes_add_up_is_what_one_does(areas: list[int], processes: int) -> None:
    numbers = np.random.default_rng(len(areas))
    gradients = {n: numbers.standard_normal((3, 7)).astype("f4") for n in range(len(areas))}
    rows = []
    for process in range(processes):
        compute = Computed(gradients)
        places = RankMicroBatches(process, processes, exact=True).select(areas)
        given = [batch_of(place) for place in places] or [batch_of(0, parts=math.inf)]
        TreeSum({"used": compute.used}).accumulate(given, compute)
        assert compute.used.grad is not None
        rows.append(compute.used.grad.flatten())
    expected = torch.from_numpy(reference.tree_sum(list(gradients.values()), areas)).flatten()
    assert torch.equal(top_of_tree(torch.stack(rows)), expected)


def test_a_gradient_that_only_one_side_has_is_the_sum() -> None:
    one = torch.ones(2)
    assert _add(one, None) is one and _add(None, one) is one and _add(None, None) is None


def test_a_process_without_a_micro_batch_changes_nothing_not_even_the_sign_of_zero() -> None:
    compute = Computed({0: np.full((3, 7), np.nan, dtype="f4")})
    loss = TreeSum({"used": compute.used}).accumulate([batch_of(0, parts=math.inf)], compute)
    nothing = compute.used.grad
    assert nothing is not None and loss.item() == 0
    for value in (-0.0, 0.0, 3.5):
        assert math.copysign(1, (torch.tensor(value) + nothing[0, 0]).item()) == math.copysign(1, value)


def test_both_passes_of_a_micro_batch_make_one_leaf() -> None:
    numbers = np.random.default_rng(0)
    gradients = {n: numbers.standard_normal((3, 7)).astype("f4") for n in range(6)}
    compute = Computed(gradients)
    TreeSum({"used": compute.used}, passes=2).accumulate([batch_of(n) for n in (0, 1, 4, 5, 2, 3)], compute)
    pairs = [gradients[2 * n] + gradients[2 * n + 1] for n in range(3)]
    expected = reference.tree_sum(pairs, [1, 1, 1])
    assert compute.used.grad is not None and np.array_equal(compute.used.grad.numpy(), expected)


def test_large_sums_are_exchanged_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that hold the same: every number doubles, whatever the portions and the padding."""
    kept: list[torch.Tensor] = []

    def all_to_all(rows: torch.Tensor, sent: torch.Tensor) -> None:
        rows.copy_(torch.cat([sent[: len(sent) // 2]] * 2))
        kept.append(sent.clone())

    def all_gather(whole: torch.Tensor, part: torch.Tensor) -> None:
        assert torch.equal(part, 2 * kept[-1][: len(part)])
        whole.copy_(2 * kept[-1])

    monkeypatch.setattr(exact_sums, "BUCKET", 10)
    monkeypatch.setattr(exact_sums.distributed, "all_to_all_single", all_to_all)
    monkeypatch.setattr(exact_sums.distributed, "all_gather_into_tensor", all_gather)
    sums: list[torch.Tensor | None] = [torch.randn(1), torch.randn(4, 2), None, torch.randn(23), torch.randn(3, 2).t()]
    expected = [None if each is None else 2 * each for each in sums]
    exact_sums.exchange(sums, 2)
    assert [each is None for each in sums] == [False, False, True, False, False]
    assert all(a is None or torch.equal(a, b) for a, b in zip(sums, expected, strict=True))
    assert [len(each) for each in kept] == [10, 10, 10, 4, 6]


# Two processes freeze the same parameter, then one of them alone.
UNEVEN = """
import os, sys
rank, port = sys.argv[1:]
os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
import torch
from torch import distributed
from simpletune.models.shared.conditioning import Conditioning
from simpletune.stages.step.batch_loader import Batch
from simpletune.stages.step.exact_sums import TreeSum
distributed.init_process_group("gloo")
parameters = {name: torch.nn.Parameter(torch.ones(3)) for name in ("first", "second")}
def compute(batch):
    for name, parameter in parameters.items():
        parameter.grad = None if name in frozen else torch.ones(3)
    return torch.ones(())
one = torch.zeros(1)
tree, batches = TreeSum(parameters, 2), [Batch(one, one, one, Conditioning(one), names=("x",), parts=1.0)]
for frozen in ([], ["second"]):  # in both processes alike
    tree.accumulate(batches, compute)
    assert parameters["first"].grad.tolist() == [2, 2, 2]
    assert parameters["second"].grad is None or not frozen
frozen = ["second"] if rank == "1" else []
TreeSum(parameters, 2).accumulate(batches, compute)
"""


def test_a_gradient_that_only_one_process_has_is_an_error_in_both(launcher: Launcher) -> None:
    with free_port() as port:
        outcome = launcher.programs(UNEVEN, ["0", port], ["1", port], limit=100)
    assert outcome.codes == [1, 1], outcome.said
    for said in outcome.said:
        assert "RuntimeError: train.reduce exact: second has a gradient in 1 of 2 processes" in said


@pytest.mark.parametrize(
    ("train", "processes", "problem"),
    [
        ({}, 2, "train.gradient_accumulation: a step has 1 micro-batch over all .* there are 2 processes. "
         "Use train.gradient_accumulation=2, which makes 2 pictures a step, or fewer processes"),
        ({"global_batch": 8, "batch_size": 4}, 4, "train.global_batch: a step has 2 micro-batches over all .* there "
         "are 4 processes. Use a smaller train.batch_size, or train.global_batch=16, or fewer processes"),
        ({"gradient_accumulation": 6, "reduce": "exact"}, 6,
         "train.reduce: exact joins processes in pairs, and there are 6. Use 4 processes, or fast"),
    ],
)  # fmt: skip
def test_what_a_number_of_processes_cannot_do(
    tiny_config: dict, train: dict[str, Any], processes: int, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        require_processes(validate(tiny_config | {"train": train}, "test"), processes)


def test_what_a_number_of_processes_can_do(tiny_config: dict) -> None:
    for train, processes in (({"reduce": "exact"}, 4), ({}, 6)):
        config = validate(tiny_config | {"train": {"gradient_accumulation": 6} | train}, "test")
        require_processes(config, processes)
