"""Replayed passes without a card: what makes two passes of one kind, when none is replayed, and their memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import merged

from simpletune.config.load import validate
from simpletune.config.resolve import resolve_model_folder
from simpletune.engine.graphs import MOST, NODE_BYTES
from simpletune.estimate.simulate.simulate import simulate
from simpletune.models.shared.conditioning import Conditioning
from simpletune.stages.step import replay
from simpletune.stages.step.batch_loader import Batch

BATCH = Batch(
    z_0=torch.zeros(2, 4, 8, 8),
    noise=torch.ones(2, 4, 8, 8),
    level=torch.full((2,), 0.5),
    conditioning=Conditioning(torch.zeros(2, 6, 24), pooled=torch.zeros(2, 16), extra={"sizes": torch.ones(2, 6)}),
    names=("a", "b"),
    parts=2.0,
)
CHANGES: dict[str, Callable[[Batch], Batch]] = {
    "fillers": lambda batch: replace(batch, fillers=1),
    "parts": lambda batch: replace(batch, parts=3.0),
    "weights": lambda batch: replace(batch, weight=torch.ones(2, 1, 1, 1)),
    "the base's weights": lambda batch: replace(batch, prior=torch.ones(2, 1, 1, 1)),
    "size": lambda batch: replace(batch, z_0=torch.zeros(2, 4, 8, 16)),
    "type": lambda batch: batch.map(lambda tensor: tensor.bfloat16()),
    "a mask": lambda batch: replace(batch, conditioning=replace(batch.conditioning, mask=torch.ones(2, 6))),
    "a plan's rows": lambda batch: batch.with_modulations(torch.zeros(2, 16)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_passes_of_one_kind_differ_only_in_values(what: str) -> None:
    values = replace(BATCH.map(torch.randn_like), names=("c", "d"), key=(1, "step", 2, 3))
    assert values.kind() == BATCH.kind() != CHANGES[what](BATCH).kind()
    assert replace(BATCH, weight=torch.ones(2, 1, 1, 1)).kind() != replace(BATCH, prior=torch.ones(2, 1, 1, 1)).kind()


def test_a_batch_takes_tensors_in_the_order_in_which_it_gives_them() -> None:
    others = BATCH.map(torch.randn_like)
    made = BATCH.with_tensors(others.tensors())
    assert len(made.tensors()) == 6 and all(map(lambda a, b: a is b, made.tensors(), others.tensors()))
    assert made.noise is others.noise and made.conditioning.extra["sizes"] is others.conditioning.extra["sizes"]


def core_of(config: dict) -> Any:
    return SimpleNamespace(
        config=validate(config, "test"), device=torch.device("cpu"), accelerator=SimpleNamespace(num_processes=1)
    )


def test_a_run_on_the_cpu_says_why_it_replays_nothing(tiny_config: dict, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.graphs_of(core_of(tiny_config)) is None and capsys.readouterr().out == ""
    assert replay.graphs_of(core_of(merged(tiny_config, speed={"graphs": True}))) is None
    assert capsys.readouterr().out == "graphs  off: they are CUDA's, and the run is not on a CUDA device\n"


def test_predictions_count_the_pool_beside_the_rest_of_the_step(tiny_config: dict) -> None:
    def predicted(**changes: Any) -> Any:
        return simulate(resolve_model_folder(validate(merged(tiny_config, **changes), "test")))

    graphs = {"graphs": True}
    plain = predicted()
    one = predicted(speed=graphs, data={"aspect": "square"})
    inputs = 4 * (2 * 16 * 4 * 4 + 1)  # z_0 and noise, and the level
    outside = ("clip", "optimizer")
    rest = max(each.bytes for name, each in one.phases.items() if name in outside) - one.steady.bytes
    within = max(each.bytes for name, each in one.phases.items() if name not in outside)
    nodes = (one.peak.bytes - within - max(0, rest)) / NODE_BYTES
    assert 100 < nodes == int(nodes)
    assert within >= max(plain.phases[name].bytes for name in ("forward", "backward")) + inputs
    assert one.steady.bytes >= plain.steady.bytes + one.trained_bytes  # gradients stay
    several = predicted(speed=graphs)
    assert several.peak.bytes - one.peak.bytes >= (MOST - 1) * (NODE_BYTES * nodes + inputs)
    streamed = {"memory": {"checkpointing": "all", "offload_checkpoint_inputs": True}}
    assert predicted(speed=graphs, **streamed).peak == predicted(**streamed).peak  # refused
