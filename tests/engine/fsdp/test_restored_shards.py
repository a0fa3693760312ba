"""Checkpoints of any number of processes, restored in one: files written by hand, values by arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from simpletune.engine.fsdp.checkpoints import (
    VALUES,
    NonFinite,
    SavedStates,
    load_rows,
    parameter_ranges,
    require_written,
    restore_parts,
    restore_states,
)
from simpletune.engine.fsdp.fsdp_model import KEY
from simpletune.engine.optim.options import AdamW
from simpletune.engine.optim.place import ParameterRange, StatePiece
from simpletune.engine.optim.state import state_to_tensors
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import WeightReader, files_of_index

SHAPES = {"wide": (5, 2), "one": (1, 3)}  # three processes hold 2, 2 and 1 rows of the first; one holds the second
STARTS = {"wide": [0, 4, 8], "one": [0, 3, 3]}


def whole(name: str, offset: int) -> Tensor:
    """Values that tell which element of which tensor they are."""
    shape = SHAPES[name]
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) + offset).view(shape)


WEIGHTS = {"wide": whole("wide", 0), "one": whole("one", 50)}
STATE = {f"{name}/{key}": whole(name, at) for name in SHAPES for key, at in (("exp_avg", 100), ("exp_avg_sq", 200))}


def parts(tensor: Tensor, starts: list[int]) -> list[Tensor]:
    ends = [*starts[1:], tensor.numel()]
    return [tensor.reshape(-1)[a:b].view(-1, tensor.shape[1]) for a, b in zip(starts, ends, strict=True)]


def write(folder: Path) -> tuple[Path, Path]:
    """The files of three processes and their indices, by the layout that ``fsdp.checkpoints`` describes."""
    for kind, tensors in (("trainable", WEIGHTS), ("optimizer", STATE)):
        cut = {name: parts(tensor, STARTS[name.partition("/")[0]]) for name, tensor in tensors.items()}
        files = []
        for rank in range(3):
            own = {name: each[rank].clone() for name, each in cut.items() if each[rank].numel()}
            about = {}
            if kind == "optimizer":
                counters = {f"{name}/step": torch.tensor(7.0) for name in {key.partition("/")[0] for key in own}}
                own |= counters
                about = {VALUES: json.dumps({"values": {}, "shared": {}})}
            name = f"{kind}-{rank:05d}-of-00003.safetensors"
            save_file(own, folder / name, about)
            files.append({"file": name})
        index = {"files": files, "parameters": {n: {"shape": SHAPES[n], "starts": STARTS[n]} for n in SHAPES}}
        (folder / f"{kind}.shards.json").write_text(json.dumps(index))
    return folder / "trainable.shards.json", folder / "optimizer.shards.json"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.one = (nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values())


def test_one_process_restores_what_three_have_written(tmp_path: Path) -> None:
    """The rows of several files are those of the whole."""
    files, model, option = write(tmp_path), Net(), AdamW(rounding="nearest")
    optimizer = option.build(model.parameters())
    assert parameter_ranges(model) == {"wide": ParameterRange(0, 0, 10), "one": ParameterRange(1, 0, 3)}
    restore_parts(model, optimizer, option, files, {})
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, WEIGHTS[name])
        state = optimizer.state[parameter]
        assert set(state) == {"exp_avg", "exp_avg_sq", "step"} and state["step"] == 7
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], STATE[f"{name}/{key}"]), (name, key)
    reader = WeightReader([files[0]])
    assert torch.equal(reader.get("wide"), WEIGHTS["wide"])
    for first, last in [(0, 5), (0, 2), (1, 3), (2, 4), (4, 5), (3, 5)]:
        assert torch.equal(reader.rows("wide", first, last), WEIGHTS["wide"][first:last])


def divided(rows: slice) -> tuple[Net, nn.Parameter]:
    """A model of which this process holds some rows of the first parameter and nothing of the second."""
    model = Net()
    held, place = nn.Parameter(torch.zeros(SHAPES["wide"])[rows]), ParameterRange(0, rows.start * 2, 10)
    model.__dict__[KEY] = SimpleNamespace(
        held={"wide": held}, places=[place], shards={"wide": SimpleNamespace(place=place)}
    )
    return model, held


@pytest.mark.parametrize("rows", [slice(0, 3), slice(3, 5), slice(1, 4)], ids=str)
def test_a_process_restores_its_own_rows_of_parts_that_were_cut_elsewhere(rows: slice, tmp_path: Path) -> None:
    files, (model, held), option = write(tmp_path), divided(rows), AdamW(rounding="nearest")
    optimizer = option.build([held])
    assert parameter_ranges(model) == {"wide": ParameterRange(0, rows.start * 2, 10)}
    restore_parts(model, optimizer, option, files, {})
    assert torch.equal(held, WEIGHTS["wide"][rows])
    assert torch.equal(optimizer.state[held]["exp_avg"], STATE["wide/exp_avg"][rows])
    assert torch.equal(optimizer.state[held]["exp_avg_sq"], STATE["wide/exp_avg_sq"][rows])
    assert [name for name, _ in load_rows(model, WeightReader([files[0]]))] == ["wide"]


def test_the_state_of_one_file_is_cut_for_a_process(tmp_path: Path) -> None:
    """Plain values and shared tables are named by number there; a parameter without state stays without."""
    tensors = {"0.exp_avg": STATE["wide/exp_avg"], "0.exp_avg_sq": STATE["wide/exp_avg_sq"], "0.table": torch.ones(2)}
    save_file(tensors, tmp_path / "optimizer.safetensors")
    scalars: dict[str, Any] = {"values": {"0.step": 9}, "shared": {"0.again": "0.table"}}
    saved = SavedStates(tmp_path / "optimizer.safetensors", {"wide": 10, "one": 3}, scalars)
    (piece,) = saved.pieces("wide", 4, 8)
    assert (piece.start, piece.stop) == (0, 10)
    assert set(piece.values) == {"exp_avg", "exp_avg_sq", "table", "step", "again"} and piece.values["step"] == 9
    assert torch.equal(torch.as_tensor(piece.values["again"]), torch.ones(2))
    assert saved.pieces("one", 0, 3) == []


def test_tables_are_shared_again_and_other_state_has_its_parameter_s_shape() -> None:
    """Which value of saved 8-bit state goes where."""
    own, other = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1, 4))
    optimizer = torch.optim.SGD([own, other])

    def piece_of(name: str, start: int, stop: int) -> list[StatePiece]:
        values = {"qmap1": torch.tensor([0.5, 1.0]), "state1": torch.arange(4.0) + start, "absmax1": torch.ones(1)}
        return [StatePiece(start, stop, {**values, "step": start})]

    saved: Any = SimpleNamespace(pieces=piece_of)
    restore_states(AdamW(), optimizer, {"own": ParameterRange(0, 4, 8), "other": ParameterRange(1, 0, 4)}, saved)
    assert torch.equal(optimizer.state[own]["state1"], torch.tensor([[4.0, 5.0], [6.0, 7.0]]))
    assert torch.equal(optimizer.state[other]["state1"], torch.tensor([[0.0, 1.0, 2.0, 3.0]]))
    assert optimizer.state[own]["absmax1"].shape == (1,)
    assert (optimizer.state[own]["step"], optimizer.state[other]["step"]) == (4, 0)
    assert optimizer.state[own]["qmap1"] is optimizer.state[other]["qmap1"], "one table for all"
    assert len(state_to_tensors(optimizer)[1]["shared"]) == 1
    empty: Any = SimpleNamespace(pieces=lambda name, start, stop: [])
    fresh = torch.optim.SGD([own])
    restore_states(AdamW(), fresh, {"own": ParameterRange(0, 4, 8)}, empty)
    assert dict(fresh.state) == {}


def test_a_process_that_could_not_write_is_said_with_its_reason_and_code(tmp_path: Path) -> None:
    folder = tmp_path / ".step-000002.part"
    require_written([{"trainable": {}}, {"trainable": {}}], folder)
    with pytest.raises(
        UserError, match=r"^process 1 could not write its part of \.step-0+2\.part: disk full"
    ) as caught:
        require_written([{"trainable": {}}, {"error": "disk full", "code": 3}, {"error": "other", "code": 1}], folder)
    assert caught.value.code == 3
    with pytest.raises(NonFinite, match=r"^2 trained parameters are non-finite \(a, b\)") as bad:
        require_written([{"bad": ["a"]}, {"error": "disk full", "code": 3}, {"bad": ["b", "a"]}], folder)
    assert bad.value.names == ["a", "b"], "each once, and before any other failure"


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", r"is damaged \(JSONDecodeError\)"),
        ("{}", r"is damaged \(KeyError\)"),
        ("[]", r"is damaged \(TypeError\)"),
        ('{"files": [{"file": "../other/x.safetensors"}]}', "names files outside its folder. It was not read"),
        ('{"files": [{"file": ".."}]}', "names files outside its folder"),
        ('{"files": [{"file": ""}]}', "names files outside its folder"),
    ],
)
def test_a_damaged_index_and_one_that_leads_elsewhere_are_refused(text: str, said: str, tmp_path: Path) -> None:
    index = tmp_path / "trainable.shards.json"
    index.write_text(text)
    with pytest.raises(UserError, match=rf"trainable\.shards\.json {said}"):
        files_of_index(index)
