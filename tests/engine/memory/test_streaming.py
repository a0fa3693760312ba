"""Block offload: bit for bit the resident run, and a stale or early use of a slot shows as NaN."""

from __future__ import annotations

import copy
import gc
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import (
    ACCUMULATION,
    BLOCKS,
    PRECISIONS,
    STEPS,
    UNETS,
    UNITS,
    EagerCopies,
    LateCopies,
    Setting,
    UpdateInBackward,
    assert_same_run,
    break_the_hold,
    break_the_order,
    break_the_wait,
    lora_run,
    loss_of,
    plain_run,
    prepare,
    shake_updates,
    transformer,
    unit_names,
)  # fmt: skip
from slow_cases import slow_but
from tiny_runs import saved_weights
from torch import Tensor, nn

from simpletune.adapters.methods.full import Full
from simpletune.adapters.methods.lora import Lora
from simpletune.config.load import validate
from simpletune.engine.memory import Memory
from simpletune.engine.memory import block_offload as streaming
from simpletune.engine.memory.block_offload import BlockOffload
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.precision import FP32
from simpletune.engine.tensors import plain_tensors
from simpletune.runs.folder import read_metrics
from simpletune.system.options import ConfigError
from simpletune.training.train import train

RESIDENT = {"K=0": (0, 1, 2, 3), "K=1": (0, 1, 3), "K=2": (0, 2)}
UNITS_OF = {"sd3": BLOCKS, **{version: len(unit_names(version)) for version in UNETS}}


FAST = [("bf16", "K=2"), ("int8-quanto", "K=2"), ("int8-rotated", "K=0"), ("nf4-rotated", "K=1")]


@pytest.mark.parametrize(("precision", "resident"), slow_but(FAST, product(PRECISIONS, RESIDENT)))
def test_a_lora_run_is_the_resident_one_bit_for_bit(precision: str, resident: str) -> None:
    setting = {
        "K=0": Setting(RESIDENT["K=0"], poison=True),  # shows weights that are given up too early
        "K=1": Setting(RESIDENT["K=1"], poison=True, host=True, queue=LateCopies),  # shows what does not wait
        "K=2": Setting(RESIDENT["K=2"]),  # with the copies that the turn saves
    }[resident]
    assert_same_run(lora_run(PRECISIONS[precision], setting), plain_run(precision))


def test_dropout_draws_the_same_numbers_again() -> None:
    streamed = lora_run(PRECISIONS["fp32-autocast"], Setting(RESIDENT["K=1"], poison=True), dropout=0.5)
    assert_same_run(streamed, plain_run("fp32-autocast", dropout=0.5))


@pytest.mark.parametrize("backward", [False, True])
def test_a_dropped_model_leaves_no_copy_in_its_queues(backward: bool) -> None:
    """A prefetch of a forward pass that was dropped, or the fills at the end of a pass, would write to freed memory."""
    queues: list[LateCopies] = []
    setting = Setting(RESIDENT["K=0"], host=True, poison=True, queue=lambda: queues.append(LateCopies()) or queues[-1])
    model = transformer(FP32())
    Lora(rank=2).attach(model, 7)
    prepare(model, setting)
    loss = loss_of(model, FP32(), 0)
    if backward:
        loss.backward()
    assert any(queue._queue for queue in queues)
    del model, loss
    gc.collect()
    assert not any(queue._queue for queue in queues)


FAULTS = [
    (break_the_wait, LateCopies, "sd3"), (break_the_order, None, "sd3"), (break_the_order, None, "sd15"),
    (break_the_order, None, "sdxl"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "queue", "family"), slow_but(FAULTS[:2], FAULTS))
def test_a_broken_order_shows(fault: Any, queue: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = plain_run("int8", family)
    fault(monkeypatch)
    setting = Setting(tuple(range(UNITS_OF[family])), poison=True, queue=queue)
    losses, _ = lora_run(PRECISIONS["int8"], setting, family=family)
    assert losses != expected


@pytest.mark.parametrize("family", slow_but(["sd2"], ["sd3", "sd2", "sdxl"]))
def test_weights_given_up_too_early_show(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early stopping leaves the recomputation by an exception; either way the hold must outlast it."""
    break_the_hold(monkeypatch)
    monkeypatch.setattr("torch.utils.checkpoint._enable_checkpoint_early_stop", False)
    monkeypatch.setattr("simpletune.engine.memory.block_offload.HostBlock.point_at_host", lambda self: None)
    losses, _ = lora_run(PRECISIONS["int8"], Setting(tuple(range(UNITS_OF[family])), poison=True), family=family)
    assert losses[-1] != losses[-1]


@pytest.mark.parametrize("precision", ["int8", "int8-quanto"])
def test_gradients_are_those_of_the_plain_fp32_model(precision: str) -> None:
    """Quantised linears against dequantised ``nn.Linear`` layers."""
    option = PRECISIONS[precision]
    _, ours = plain_run(precision)
    model = transformer(option)
    for block in model.transformer_blocks:
        for name, module in list(block.named_modules()):
            if option.quantises(module):
                parent, _, leaf = name.rpartition(".")
                setattr(block.get_submodule(parent), leaf, dequantised(module))
    Lora(rank=2, targets="all_linear").attach(model, 7)
    shake_updates(model)
    for micro in range(ACCUMULATION):
        loss_of(model, FP32(), micro).backward()
    theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(ours[0], theirs, rtol=1e-4, atol=1e-6)


def dequantised(linear: Any) -> nn.Linear:
    plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    weight = linear.dequantise() if isinstance(linear, Int8Linear) else linear.weight.dequantize()
    plain.weight.data = weight.detach().clone()
    if linear.bias is not None:
        plain.bias.data = linear.bias.detach().clone()
    return plain


def test_the_device_holds_two_blocks_and_the_host_the_rest() -> None:
    model = transformer(PRECISIONS["bf16"])
    sizes = [sum(t.nbytes for t in [*b.parameters(), *b.buffers()]) for b in model.transformer_blocks]
    count = [len([*b.parameters(), *b.buffers()]) for b in model.transformer_blocks]
    Lora(rank=2).attach(model, 0)
    streamed = prepare(model, Setting(RESIDENT["K=1"]))
    largest = max(streamed.homes[index].nbytes for index in streamed.homes)
    assert sum(slot.flat.numel() for slot in streamed._slots) == 2 * largest
    for index, home in streamed.homes.items():
        assert sizes[index] <= home.nbytes < sizes[index] + 512 * count[index]


def test_weights_are_at_home_between_passes() -> None:
    for name in ("int8", "int8-quanto"):
        precision = PRECISIONS[name]
        model = transformer(precision)
        Lora(rank=2).attach(model, 0)
        before = {n: [p.clone() for p in plain_tensors(t)] for n, t in model.state_dict().items()}
        streamed = prepare(model, Setting(RESIDENT["K=1"], poison=True))

        def assert_home(model: Any = model, streamed: Any = streamed, before: dict = before) -> None:
            slots = {slot.flat.untyped_storage().data_ptr() for slot in streamed._slots}
            for key, tensor in model.state_dict().items():
                for plain, old in zip(plain_tensors(tensor), before[key], strict=True):
                    assert plain.untyped_storage().data_ptr() not in slots
                    assert torch.equal(plain, old), key

        assert_home()
        with torch.no_grad():
            loss_of(model, precision, 0)
        assert_home()
        loss = loss_of(model, precision, 0)
        assert_home()
        loss.backward()
        assert_home()


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    precision = PRECISIONS["fp32"]
    model = transformer(precision)
    Lora(rank=2).attach(model, 0)
    streamed = prepare(model, Setting(RESIDENT["K=0"], poison=True))
    expected = loss_of(model, precision, 0).item()
    loss = loss_of(model, precision, 1)
    hook = model.transformer_blocks[2].attn.to_q.lora_A["default"].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    assert loss_of(model, precision, 0).item() == expected
    assert not streamed._in_backward


def test_changed_weights_are_seen_by_the_next_pass() -> None:
    """A slot's content does not outlive its pass; the turn from forward to backward copies nothing twice."""
    precision, filled, fill = PRECISIONS["fp32"], [], BlockOffload._fill
    losses = []
    for streamed in ((), RESIDENT["K=0"]):
        model = transformer(precision).requires_grad_(False)
        prepare(model, Setting(streamed))
        with torch.no_grad():
            loss_of(model, precision, 0)
            for parameter in model.transformer_blocks.parameters():
                parameter.data.mul_(1.5)
            losses.append(loss_of(model, precision, 0).item())
    assert losses[0] == losses[1]
    Lora(rank=2).attach(model, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockOffload, "_fill", lambda self, *where: filled.append(where[1]) or fill(self, *where))
        loss_of(model, precision, 0).backward()
    assert filled == [0, 1, 2, 3, 1, 0]


QUEUES: dict[str, dict[str, Any]] = {
    "in order": {"poison": True}, "late": {"poison": True, "queue": LateCopies},
    "race": {"queue": LateCopies, "inward": EagerCopies},
}  # fmt: skip


def full_run(precision: str, kind: str, setting: Setting) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """Losses, weights and state of full fine-tuning, updated in the backward pass."""
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05), "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    }[kind]  # fmt: skip
    option = PRECISIONS[precision]
    model = transformer(option)
    Full().attach(model, 0)
    hooks = UpdateInBackward(model, prepare(model, setting), make)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, option, step)
        loss.backward()
        losses.append(loss.item())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, weights, [v.clone() for state in hooks.state.values() for v in state.values() if v is not None]


@pytest.mark.parametrize(
    ("precision", "kind", "resident", "queues"),
    slow_but(
        [("fp32-autocast", "adamw", "K=0", "late"), ("bf16", "adamw", "K=2", "race")],
        product(["fp32", "fp32-autocast", "bf16"], ["sgd", "adamw"], ["K=0", "K=2"], QUEUES),
    ),
)
def test_full_fine_tuning_is_the_resident_one_bit_for_bit(
    precision: str, kind: str, resident: str, queues: str
) -> None:
    plain = full_run(precision, kind, Setting(checkpointed=0))
    start = transformer(PRECISIONS[precision]).state_dict()
    assert any((start[name] != value).any() for name, value in plain[1].items() if "blocks.0" in name)
    setting = Setting(RESIDENT[resident], host=True, trained=True, **QUEUES[queues])
    torch.testing.assert_close(full_run(precision, kind, setting), plain, rtol=0, atol=0)


def test_optimizer_state_of_streamed_weights_is_on_the_host_but_for_their_update() -> None:
    """An update outside of the backward pass is refused."""
    model = transformer(PRECISIONS["fp32"])
    Full().attach(model, 0)
    streamed = prepare(model, Setting(RESIDENT["K=2"], trained=True))
    hooks = UpdateInBackward(model, streamed, lambda p: torch.optim.AdamW(p, lr=1e-2))
    inside: dict[nn.Parameter, int] = {}
    update = hooks.update

    def spy(parameter: nn.Parameter, state: dict) -> None:
        update(parameter, state)
        inside[parameter] = state["exp_avg"].data_ptr()

    hooks.update = spy
    for step in range(2):
        loss_of(model, PRECISIONS["fp32"], step).backward()
    large = [p for i in RESIDENT["K=2"] for p in model.transformer_blocks[i].parameters() if p.nbytes >= 4096]
    assert large and all(inside[p] != hooks.state[p]["exp_avg"].data_ptr() for p in large)
    resident = model.transformer_blocks[1].attn.to_q.weight
    assert inside[resident] == hooks.state[resident]["exp_avg"].data_ptr()
    with pytest.raises(RuntimeError, match="block 0 was updated outside"):
        with streamed.updating(model.transformer_blocks[0].attn.to_q.weight, {}):
            pass


def test_optimizer_state_is_fetched_one_parameter_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second pass on; a state that was loaded since is not mistaken for the one that was kept."""
    model = transformer(PRECISIONS["fp32"])
    Full().attach(model, 0)
    streamed = prepare(model, Setting(RESIDENT["K=0"], trained=True))
    hooks = UpdateInBackward(model, streamed, lambda p: torch.optim.AdamW(p, lr=1e-2))
    events: list[str] = []
    copies, update = streamed._in.run, hooks.update

    def copied(work: Any, after: Any) -> Any:
        if "_fetch_state" in work.__qualname__:
            events.append("fetch")
        return copies(work, after)

    def updated(parameter: nn.Parameter, state: dict) -> None:
        if streamed._state_homes.get(id(parameter)):
            events.append("update")
        update(parameter, state)

    monkeypatch.setattr(streamed._in, "run", copied)
    hooks.update = updated
    for step in range(2):
        events.clear()
        loss_of(model, PRECISIONS["fp32"], step).backward()
    count = len(streamed._state_homes) - list(streamed._state_homes.values()).count({})
    assert count > 20 and events == ["fetch", *["fetch", "update"] * (count - 1), "update"]
    largest = max(sum(home.nbytes for home in homes.values()) for homes in streamed._state_homes.values())
    assert [slot.flat.numel() for slot in streamed._state_slots] == [largest] * streaming.SLOTS

    own, seen = model.transformer_blocks[0].ff.net[0].proj.weight, []
    hooks.state[own]["exp_avg"] = loaded = torch.full_like(own, 7.0)
    hooks.update = lambda parameter, state: seen.append(state["exp_avg"].clone()) if parameter is own else None
    loss_of(model, PRECISIONS["fp32"], 2).backward()
    assert torch.equal(seen[0], loaded) and torch.equal(hooks.state[own]["exp_avg"], loaded)


def test_resident_blocks_are_spread_and_streamed_ones_never_stand_on_the_device() -> None:
    spread = {None: [], 0: [0, 1, 2, 3], 1: [0, 1, 3], 2: [0, 2], 3: [1]}
    assert {resident: Memory(resident_blocks=resident).offloaded_blocks(BLOCKS) for resident in spread} == spread
    for blocks in (1, 2, 24, 38):
        counts = [len(Memory(resident_blocks=resident).offloaded_blocks(blocks)) for resident in range(blocks)]
        assert counts == [blocks - resident for resident in range(blocks)]
    stays = Memory(resident_blocks=1).host_filter(UNITS)
    names = ("transformer_blocks.0", "transformer_blocks.1.attn.to_q", "transformer_blocks.3.ff.net.0.proj")
    assert all(stays(name) for name in names)
    assert not any(stays(name) for name in ("transformer_blocks.2", "transformer_blocks", "proj_out", ""))
    assert not any(Memory().host_filter(UNITS)(name) for name in names)
    assert streaming.SLOTS == 2


@pytest.fixture
def config(tiny_config: dict, three_blocks: Path) -> dict:
    """A run of three blocks with dropout, evaluation and pictures."""
    data = copy.deepcopy(tiny_config)
    data["model"]["pretrained"] = str(three_blocks)
    data["adapter"]["dropout"] = 0.2
    data["train"] = {"steps": 3}
    data["validation"] = {"prompts": ["a dot"], "steps": 1, "loss_samples": 1}
    data["memory"] = {"checkpointing": "all"}
    return data


@pytest.mark.parametrize("weights", slow_but(["int8"], ["int8", "fp32", "bf16", "int8-quanto"]))
def test_whole_runs_are_equal(weights: str, config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    build = BlockOffload.__init__
    monkeypatch.setattr(BlockOffload, "__init__", lambda self, *a, **k: build(self, *a, **k | {"poison": True}))
    config["precision"] = {"weights": weights}
    resident = train(validate(config, "resident"))
    memory = {"checkpointing": "all", "resident_blocks": 1, "offload_checkpoint_inputs": True}
    streamed = train(validate(config | {"name": "streamed", "memory": memory}, "streamed"))
    assert [row["loss"] for row in read_metrics(streamed)] == [row["loss"] for row in read_metrics(resident)]
    ours, theirs = (saved_weights(run, 3) for run in (streamed, resident))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    image = Path("samples") / "step-000003" / "prompt-00.png"
    assert (streamed / image).read_bytes()[-2000:] == (resident / image).read_bytes()[-2000:]
    summaries = [json.loads((run / "summary.json").read_text()) for run in (streamed, resident)]
    assert summaries[0]["eval_loss_after"] == summaries[1]["eval_loss_after"]
    assert summaries[0]["eval_loss_after"] != summaries[0]["eval_loss_before"]


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"resident_blocks": 1, "checkpointing": "none"}, "memory.checkpointing: none with memory.resident_blocks"),
        ({"resident_blocks": 1, "checkpointing": 2}, "memory.checkpointing: 2 with memory.resident_blocks"),
        ({"resident_blocks": 1, "method": "full"}, "resident_blocks: adapter.method full"),
        ({"resident_blocks": 1, "can_offload": False}, "fp32 weights cannot be offloaded block by block"),
        ({"resident_blocks": 3}, "resident_blocks: 3 leaves none of the model's 3 blocks"),
        ({"checkpointing": 4}, "memory.checkpointing: 4 is more than the model's 3 blocks"),
        ({"checkpointing": 0}, "memory.checkpointing"),
        ({"offload_checkpoint_inputs": True, "checkpointing": "none"}, "offload_checkpoint_inputs: true needs"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    memory: dict, message: str, config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = copy.copy(memory)
    monkeypatch.setattr(FP32, "can_offload", memory.pop("can_offload", True))
    changes = {"adapter": {"method": memory.pop("method")}} if "method" in memory else {}
    with pytest.raises(ConfigError, match=message):
        validate(config | changes | {"memory": memory}, "refused")
