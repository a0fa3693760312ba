"""One copy of frozen weights a machine: the same pages, the same bits, and what is predicted.

``test_together.py`` has runs of two processes that share them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import (
    BLOCKS,
    CONFIG,
    DENOISERS,
    PRECISIONS,
    UNITS,
    Denoiser,
    Setting,
    assert_same_run,
    load,
    lora_run,
    loss_of,
    plain_run,
    transformer,
)
from torch import nn
from two_processes import LEVERS

from simpletune.adapters.methods.dora import Dora
from simpletune.config.load import validate
from simpletune.engine.denoiser import model_units, unit_filter
from simpletune.engine.memory.block_offload import BlockOffload
from simpletune.engine.memory.machine_weights import MachineWeights, SharedFile, is_shared, shared_loading
from simpletune.engine.quant.precision import WeightPrecision
from simpletune.engine.tensors import all_tensors, plain_tensors
from simpletune.estimate.simulate.simulate import simulate
from simpletune.models.sd3.sd3_option import SD3
from simpletune.stages.load import leaves_weights_on_host
from simpletune.system.options import UserError

CPU, ROOM = torch.device("cpu"), 2**24
PLAN = {"modulation": "plan", "modulation_window": 3}
STREAMED = tuple(range(BLOCKS))


def loaded(weights: MachineWeights, precision: WeightPrecision) -> Any:
    """The model of ``blocks.transformer``, whose blocks stay on the host."""
    with shared_loading(weights):
        return load(CONFIG, SD3().architecture.random_tensors(CONFIG, 3), precision, CPU, unit_filter(UNITS))


def both(precision: WeightPrecision) -> tuple[MachineWeights, Any, MachineWeights, Any]:
    """The process that fills and another one, here the same, and the model of each."""
    first = MachineWeights.create(ROOM)
    other = MachineWeights.join(first.offer)
    models = [loaded(weights, precision) for weights in (first, other)]
    other.point(models[1], first.table(models[0]))
    first.close()
    return first, models[0], other, models[1]


def plain(model: nn.Module) -> list[torch.Tensor]:
    return [each for tensor in all_tensors(model) for each in plain_tensors(tensor)]


@pytest.mark.parametrize(
    "name", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8-quanto", "nf4-rotated", "bf16"))]
)
def test_both_train_to_the_bits_of_a_model_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    precision, setting = PRECISIONS[name], Setting(STREAMED, poison=True)
    _, filled, _, joined = both(precision)
    for model in (filled, joined):
        monkeypatch.setitem(DENOISERS, "shared", Denoiser(lambda *_: model, loss_of))  # noqa: B023
        assert_same_run(lora_run(precision, setting, family="shared"), plain_run(name))


def test_both_have_the_same_pages_and_only_the_first_one_writes() -> None:
    first, filled, other, joined = both(PRECISIONS["int8"])
    within = unit_filter(UNITS)
    names = [name for name, _ in (*filled.named_parameters(), *filled.named_buffers()) if within(name)]
    assert names and first.nbytes == other.nbytes > 0
    for name, tensor in (*joined.named_parameters(), *joined.named_buffers()):
        assert is_shared(tensor) == (name in names), name
        theirs = dict((*filled.named_parameters(), *filled.named_buffers()))[name]
        assert torch.equal(tensor, theirs) and tensor.stride() == theirs.stride()
    weight = "transformer_blocks.2.attn.to_q.weight"
    before = joined.get_parameter(weight)[0, 0].item()
    filled.get_parameter(weight).data[0, 0] += 1
    assert joined.get_parameter(weight)[0, 0].item() == before + 1
    again = MachineWeights.create(ROOM)
    loaded(MachineWeights.join(again.offer), PRECISIONS["int8"])
    assert again._pages.bytes_at(4096, 2**16).count_nonzero() == 0


def test_a_streamed_block_takes_no_more_on_host_and_device() -> None:
    """Its pieces hold its weights and nothing else, although a layer that lay between them was detached."""
    _, _, _, joined = both(PRECISIONS["int8"])
    own = transformer(PRECISIONS["int8"])
    for model in (joined, own):
        for block in model.transformer_blocks:
            block.attn.to_k = nn.Identity()
    shared, copied = (BlockOffload(model_units(model), STREAMED, CPU) for model in (joined, own))
    assert [home.nbytes for home in shared.homes.values()] == [home.nbytes for home in copied.homes.values()]
    pieces = [[piece for _, piece in home._pieces if len(piece)] for home in shared.homes.values()]
    assert all(len(each) == 2 and all(map(is_shared, each)) for each in pieces), "before it and after it"
    with shared.forward(1), copied.forward(1):
        found, expected = (dict(model.transformer_blocks[1].named_parameters()) for model in (joined, own))
        assert all(torch.equal(found[name], expected[name]) for name in expected) and len(found) > 10


def test_what_an_adapter_adds_to_a_block_lies_beside_it() -> None:
    """DoRA's norms of the frozen rows are of each process."""
    _, _, _, joined = both(PRECISIONS["int8"])
    own, found = transformer(PRECISIONS["int8"]), []
    for model in (joined, own):
        Dora(rank=2, targets="all_linear", dropout=0.0).attach(model, 7)
        streaming = BlockOffload(model_units(model), STREAMED, CPU, poison=True)
        with streaming.forward(2):
            found.append([tensor.clone() for tensor in plain(model.transformer_blocks[2])])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    squares = [t for n, t in joined.named_buffers() if n.endswith("squares")]
    assert squares and not any(map(is_shared, squares))


def test_another_file_and_another_model_are_refused() -> None:
    first = MachineWeights.create(ROOM)
    process, handle, token = first.offer
    with pytest.raises(OSError, match="is not the file of the first process of this machine"):
        MachineWeights.join(SharedFile(process, handle, token[::-1]))
    filled, other = loaded(first, PRECISIONS["int8"]), MachineWeights.join(first.offer)
    table = dict(first.table(filled))
    del table["transformer_blocks.1.attn.to_q.weight:0"]
    with pytest.raises(UserError, match=r"different weights: transformer_blocks.1.attn.to_q.weight. Start all"):
        other.point(loaded(other, PRECISIONS["int8"]), table)
    first.close()
    with pytest.raises(OSError):
        MachineWeights.join(SharedFile(process, handle, token))


def test_pages_go_with_the_last_tensor_in_them() -> None:
    weights = MachineWeights.create(ROOM)
    weights.close()
    tensor = weights.keep(torch.arange(5))
    maps, own = Path("/proc/self/maps"), re.compile(rf"(?m)^0*{weights._pages.address:x}-.*memfd:simpletune-weights")
    assert own.search(maps.read_text())
    del weights
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    del tensor
    assert not own.search(maps.read_text())


IN_BACKWARD = {"resident_blocks": 1, "checkpointing": "all", "optimizer_in_backward": True}


@pytest.mark.parametrize("memory, shares", [(LEVERS, True), (PLAN, True), ({}, False), (IN_BACKWARD, False)])
def test_what_is_predicted_to_be_shared(
    memory: dict[str, Any], shares: bool, tiny_config: dict[str, Any], three_blocks: Path
) -> None:
    """Frozen weights that wait on the host: not checkpoints' inputs, and not weights that train."""
    full = {"adapter": {"method": "full"}, "train": {"steps": 4, "clip": "per_parameter"}}
    tiny_config["model"]["pretrained"] = str(three_blocks)
    config = validate({**tiny_config, "memory": memory, **(full if memory is IN_BACKWARD else {})}, "test")
    assert leaves_weights_on_host(config.memory) == bool(memory)
    report = simulate(config)
    assert (report.shared_bytes > 0) == shares and report.shared_bytes <= report.host_bytes
    if memory is LEVERS:
        alone = config.model_copy(update={"memory": config.memory.model_copy(update={"offload_checkpoint_inputs": 0})})
        assert report.shared_bytes == simulate(alone).host_bytes < report.host_bytes
