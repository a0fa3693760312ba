"""Levers over U-Nets against the plain run, bit for bit: skip connections, two sizes, convolutions in int8.

A U-Net's skip connections carry activations past many units, so poisoned slots (NaN as soon as a unit is done) would
show every use of weights outside of their unit's passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from blocks import (
    DENOISERS,
    PRECISIONS,
    STEPS,
    EagerCopies,
    LateCopies,
    Setting,
    UpdateInBackward,
    assert_same_run,
    lora_run,
    plain_run,
    prepare,
    unit_names,
)  # fmt: skip
from PIL import Image
from slow_cases import slow_but
from tiny_runs import saved_weights
from torch import Tensor, nn

from simpletune.adapters.methods.full import Full
from simpletune.adapters.methods.lora import Lora
from simpletune.config.load import validate
from simpletune.engine.denoiser import model_units, unit_filter
from simpletune.engine.memory import Memory
from simpletune.engine.memory.block_offload import BlockOffload
from simpletune.engine.memory.checkpointing import set_passes
from simpletune.engine.memory.offload_inputs import CheckpointInputOffload
from simpletune.engine.quant.int8_conv import Int8Conv2d
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.runs.folder import read_metrics
from simpletune.stages.step.batch_loader import BatchLoader, Prefetcher
from simpletune.training import trainer
from simpletune.training.train import train

UNITS = len(unit_names("sd15"))
ALL = tuple(range(UNITS))
SOME = tuple(Memory(resident_blocks=4).offloaded_blocks(UNITS))
XL = len(unit_names("sdxl"))  # residual blocks, single transformer blocks; projections lie between them
ALL_XL, SOME_XL = tuple(range(XL)), tuple(Memory(resident_blocks=4).offloaded_blocks(XL))


LORA: dict[str, tuple[str, str, Setting]] = {
    "checkpointed": ("sd2", "fp32", Setting()),
    "some checkpointed": ("sd15", "fp32", Setting(checkpointed=6)),
    "inputs on the host": ("sd15", "fp32", Setting(host=True)),
    "inputs of some on the host, late": ("sd2", "fp32", Setting(checkpointed=9, host=True, queue=LateCopies)),
    "streamed": ("sd15", "fp32", Setting(ALL, poison=True)),
    "streamed late": ("sd2", "fp32", Setting(ALL, poison=True, queue=LateCopies)),
    "some resident": ("sd15", "fp32", Setting(SOME, poison=True, host=True, queue=LateCopies)),
    "int8 streamed": ("sd15", "int8", Setting(ALL, poison=True, queue=LateCopies)),
    "int8 some resident": ("sd2", "int8-bf16", Setting(SOME, poison=True, host=True)),
    "nf4 streamed": ("sd2", "nf4", Setting(ALL, poison=True)),
    "quanto streamed": ("sd15", "int8-quanto", Setting(SOME, poison=True, queue=LateCopies)),
    "bf16 streamed": ("sd15", "bf16", Setting(ALL, poison=True, host=True)),
    "single blocks": ("sdxl", "fp32", Setting(checkpointed=9, host=True, queue=LateCopies)),
    "single blocks, int8 streamed": ("sdxl", "int8", Setting(ALL_XL, poison=True, host=True, queue=LateCopies)),
    "single blocks, nf4, some resident": ("sdxl", "nf4", Setting(SOME_XL, poison=True)),
    "single blocks, int8 products": ("sdxl", "int8-products", Setting(ALL_XL, poison=True, host=True)),
    "single blocks, rotated": ("sdxl", "nf4-rotated", Setting(SOME_XL, poison=True, queue=LateCopies)),
    "single blocks, quanto": ("sdxl", "int8-quanto-bf16", Setting(ALL_XL, poison=True)),
    "single blocks, bf16": ("sdxl", "bf16", Setting(SOME_XL, poison=True, host=True)),
}


FAST = ("inputs of some on the host, late", "single blocks, int8 streamed")


@pytest.mark.parametrize("case", slow_but(FAST, LORA))
def test_a_lora_run_is_the_plain_one_bit_for_bit(case: str) -> None:
    family, precision, setting = LORA[case]
    assert_same_run(lora_run(PRECISIONS[precision], setting, family=family), plain_run(precision, family))


def test_layers_between_units_are_quantised_and_stay_on_the_device() -> None:
    """The projections around single transformer blocks; not what comes before the first unit and after the last."""
    model = DENOISERS["sdxl"].build(PRECISIONS["int8"], "cpu")
    quantised = {name for name, layer in model.named_modules() if isinstance(layer, Int8Linear | Int8Conv2d)}
    between = {name for name in quantised if not unit_filter(model.units)(name)}
    attentions = {name.partition(".transformer_blocks")[0] for name in model.units if ".attentions." in name}
    assert len(attentions) == 4
    assert between == {f"{place}.{name}" for place in attentions for name in ("proj_in", "proj_out")}
    assert not quantised & {"conv_in", "time_embedding.linear_1", "add_embedding.linear_1", "conv_out"}
    on_host = Memory(resident_blocks=0).host_filter(model.units)
    assert not any(on_host(name) for name in between) and all(on_host(name) for name in quantised - between)


def test_offloaded_inputs_are_those_of_units_with_a_backward_pass_and_their_memory_is_used_again() -> None:
    """Features [b, c, h, w] with their skip connections, and the text [b, t, e] of each attention."""
    model = DENOISERS["sd15"].build(PRECISIONS["fp32"], "cpu")
    Lora(rank=2).attach(model, 7)
    read: dict[int, int] = {}

    def note(module: nn.Module, args: tuple[Tensor, ...], named: dict[str, object]) -> None:
        tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor) and value.dim() > 2]
        read[id(module)] = sum(tensor.nbytes for tensor in tensors)

    first, *others = model_units(model)  # nothing before the first attention trains
    for unit in others:
        unit.register_forward_pre_hook(note, with_kwargs=True)
    inputs = CheckpointInputOffload(torch.device("cpu"))
    set_passes([first, *others], UNITS, inputs)
    for _ in range(3):
        DENOISERS["sd15"].loss(model, PRECISIONS["fp32"], 0, "cpu").backward()
        assert inputs.host_bytes == sum(read.values()) > 0
    assert len(read) == UNITS - 1


FULL: dict[str, tuple[str, str, Setting]] = {
    "some checkpointed": ("sd2", "fp32", Setting(checkpointed=6, trained=True)),
    "streamed late": ("sd15", "fp32", Setting(ALL, host=True, poison=True, trained=True, queue=LateCopies)),
    "race": ("sd2", "fp32", Setting(SOME, host=True, trained=True, queue=LateCopies, inward=EagerCopies)),
    "bf16 streamed": ("sd15", "bf16", Setting(ALL, poison=True, trained=True)),
    "single blocks": ("sdxl", "bf16", Setting(ALL_XL, host=True, poison=True, trained=True, queue=LateCopies)),
    "single blocks, race": ("sdxl", "fp32", Setting(SOME_XL, trained=True, queue=LateCopies, inward=EagerCopies)),
}
FAST_FULL = ("race", "single blocks")


def full_run(family: str, precision: str, setting: Setting) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """Losses, weights and AdamW's state of full fine-tuning, updated in the backward pass."""
    option, of = PRECISIONS[precision], DENOISERS[family]
    model = of.build(option, "cpu")
    Full().attach(model, 0)
    hooks = UpdateInBackward(model, prepare(model, setting), lambda p: torch.optim.AdamW(p, lr=1e-2))
    losses = []
    for step in range(STEPS):
        loss = of.loss(model, option, step, "cpu")
        loss.backward()
        losses.append(loss.item())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, weights, [value for state in hooks.state.values() for value in state.values()]


@pytest.mark.parametrize("case", slow_but(FAST_FULL, FULL))
def test_full_fine_tuning_is_the_plain_one_bit_for_bit(case: str) -> None:
    family, precision, setting = FULL[case]
    plain = full_run(family, precision, Setting(checkpointed=0))
    assert len(set(plain[0])) == STEPS
    torch.testing.assert_close(full_run(family, precision, setting), plain, rtol=0, atol=0)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The options of pictures of two sizes."""
    data = tmp_path_factory.mktemp("pictures")
    for number, size in enumerate([(128, 128), (256, 64)]):
        Image.effect_noise(size, 60 + number).convert("RGB").save(data / f"{number}.png")
        (data / f"{number}.txt").write_text(f"noise {number}")
    return {"data": {"path": str(data), "resolution": 128}}


FULL_BASE = {
    "adapter": {"method": "full"},
    "optimizer": {"name": "adamw8bit", "lr": 1e-3},
    "train": {"steps": 2, "clip": "per_parameter", "clip_norm": 0.5},
}
STREAMED = {"checkpointing": "all", "resident_blocks": 3, "offload_checkpoint_inputs": True}
BASES: dict[str, tuple[dict, dict]] = {
    "lora": ({"precision": {"weights": "int8"}, "train": {"steps": 2}}, STREAMED),
    "full": (FULL_BASE | {"precision": {"weights": "bf16"}}, STREAMED | {"optimizer_in_backward": True}),
    "full fp32": (FULL_BASE, {"optimizer_in_backward": True}),
}


CASES = [(base, "sd2") for base in BASES] + [("lora", "sdxl"), ("full", "sdxl")]
FAST_RUNS = [("full", "sd2")]


@pytest.mark.parametrize(("base", "version"), slow_but(FAST_RUNS, CASES))
def test_whole_runs_with_every_lever_are_the_plain_ones(
    base: str, version: str, sources: dict[str, dict], small_unet: Callable[[str], dict], tiny_config: dict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two sizes in one run; the plain one neither checkpoints nor prefetches, which runs on the CPU do not."""
    build = BlockOffload.__init__
    monkeypatch.setattr(BlockOffload, "__init__", lambda self, *a, **k: build(self, *a, **k | {"poison": True}))
    changes, memory = BASES[base]
    data = copy.deepcopy(tiny_config | changes | sources | {"model": small_unet(version)})
    results = []
    for name, levers in (("plain", {"checkpointing": "none"}), ("levers", memory)):

        def prefetcher(batches: BatchLoader, steps: int, on: bool, prefetches: bool = name == "levers") -> Prefetcher:
            assert not on
            return Prefetcher(batches, steps, prefetches)

        monkeypatch.setattr(trainer, "Prefetcher", prefetcher)
        run = train(validate(data | {"name": name, "memory": levers}, name))
        results.append(([row["loss"] for row in read_metrics(run)], saved_weights(run, 2)))
    assert len(set(results[0][0])) == 2
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
