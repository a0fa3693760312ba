"""Shared by the tests of checkpointing and streaming: a transformer, U-Nets, their steps, adversarial copy queues."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simpletune.adapters.methods.lora import Lora
from simpletune.engine.denoiser import model_units
from simpletune.engine.memory.block_offload import BlockOffload
from simpletune.engine.memory.checkpointing import WHOLE, Parts, set_passes
from simpletune.engine.memory.copy_stream import CopyEvent
from simpletune.engine.memory.offload_inputs import CheckpointInputOffload
from simpletune.engine.quant.precision import BF16, FP32, Int8, Int8Quanto, Nf4, WeightPrecision
from simpletune.models.objectives.flow import FlowProcess
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.sdxl.sdxl_text import NUMBERS
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.shared.family import Family
from simpletune.models.shared.weights import MadeTensors, TensorSource, fill_model

BLOCKS = 4
UNITS = tuple(f"transformer_blocks.{index}" for index in range(BLOCKS))
CONFIG = {
    "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": BLOCKS,
    "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24, "caption_projection_dim": 32,
    "pooled_projection_dim": 16, "pos_embed_max_size": 8,
}  # fmt: skip
PRECISIONS = {
    "fp32": FP32(), "fp32-autocast": FP32(compute="bf16"), "bf16": BF16(), "int8": Int8(compute="fp32"),
    "int8-bf16": Int8(), "int8-products": Int8(compute="fp32", products="int8", input_gradient="int8"),
    "int8-quanto": Int8Quanto(compute="fp32"), "int8-quanto-bf16": Int8Quanto(), "nf4": Nf4(compute="fp32"),
    "int8-rotated": Int8(compute="fp32", products="int8", input_gradient="int8", rotation="hadamard"),
    "nf4-rotated": Nf4(compute="fp32", rotation="hadamard"),
}  # fmt: skip
UNET = {
    "_class_name": "UNet2DConditionModel", "sample_size": 8, "block_out_channels": [16, 32], "layers_per_block": 1,
    "norm_num_groups": 8, "cross_attention_dim": 24, "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
}  # fmt: skip
POOLED, TIME = 16, 4
UNETS: dict[str, dict[str, Any]] = {  # 15 units, and 18
    "sd15": UNET | {"attention_head_dim": 2},
    "sd2": UNET | {"attention_head_dim": [1, 2], "use_linear_projection": True},
    "sdxl": UNET | {
        "attention_head_dim": [1, 2], "use_linear_projection": True, "transformer_layers_per_block": [1, 2],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "addition_embed_type": "text_time",
        "addition_time_embed_dim": TIME, "projection_class_embeddings_input_dim": POOLED + NUMBERS * TIME,
    },
}  # fmt: skip
FAMILIES: dict[str, Family] = {"sd15": SD15(), "sd2": SD15(), "sdxl": SDXL()}
STEPS, ACCUMULATION = 2, 2
Run = tuple[list[float], list[dict[str, Tensor]]]
"""Losses of each micro-batch and gradients of each step."""


def load(
    config: dict[str, Any],
    tensors: TensorSource,
    precision: WeightPrecision,
    device: torch.device,
    on_host: Callable[[str], bool] = lambda name: False,
    place: str = "the model",
) -> Any:
    """An SD3 of a ``config.json`` with these tensors."""
    return fill_model(SD3().architecture.empty_model(config), tensors, precision, device, on_host, place)


def predict_velocity(
    model: nn.Module, z_t: Tensor, sigma: Tensor, prompt_embeds: Tensor, pooled: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """SD3's prediction at a noise level."""
    return SD3().predict(model, z_t, 1000.0 * sigma, Conditioning(prompt_embeds, pooled=pooled), dtype)


def transformer(precision: WeightPrecision, device: str = "cpu") -> Any:
    """An SD3 of four blocks with random weights, always the same."""
    return copied("sd3", precision, device)


def shake_updates(model: nn.Module) -> None:
    """Make a LoRA's updates matter from the first step on, because PEFT starts lora_B at zero."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def loss_of(model: nn.Module, precision: WeightPrecision, key: int, device: str = "cpu") -> Tensor:
    """The loss of one micro-batch of two samples that follows from its key."""
    generator = torch.Generator().manual_seed(key)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    z_t, prompts, pooled, target = draw(2, 4, 8, 8), draw(2, 6, 24), draw(2, 16), draw(2, 4, 8, 8)
    sigma = torch.tensor([0.3, 0.8], device=device)
    with precision.autocast_on(z_t.device):
        velocity = predict_velocity(model, z_t, sigma, prompts, pooled, precision.compute_dtype())
    return FlowProcess().loss(velocity, target, sigma)


@dataclass(frozen=True)
class Denoiser:
    """A small model of a family, always the same, and the loss of a micro-batch that follows from its key."""

    build: Callable[[WeightPrecision, str], Any]
    loss: Callable[[nn.Module, WeightPrecision, int, str], Tensor]


def unet(version: str, precision: WeightPrecision, device: str = "cpu") -> Any:
    """A U-Net of two levels, as in Stable Diffusion 1.5, 2 or XL, with random weights, always the same."""
    return copied(version, precision, device)


def copied(version: str, precision: WeightPrecision, device: str) -> Any:
    """A copy of what was built before, which takes a third of the time of building it again."""
    if device != "cpu" or isinstance(precision, Int8Quanto):  # whose tensors cannot be copied
        return built(version, precision, device)
    return copy_model(untouched(version, precision))


def copy_model(model: Any) -> Any:
    """``copy.deepcopy`` of a model in half the time: modules hold many empty dictionaries."""
    parts = (part for module in model.modules() for part in vars(module).values())
    return copy.deepcopy(model, {id(part): type(part)() for part in parts if isinstance(part, dict) and not part})


@functools.cache
def untouched(version: str, precision: WeightPrecision) -> Any:
    """A model on the CPU, only to be read."""
    return built(version, precision, "cpu")


def built(version: str, precision: WeightPrecision, device: str) -> Any:
    """A model of a family or version, ``sd3`` among them."""
    if version == "sd3":
        return load(CONFIG, SD3().architecture.random_tensors(CONFIG, 3), precision, torch.device(device))
    family, config, where = FAMILIES[version], UNETS[version], torch.device(device)
    return fill_model(
        family.architecture.empty_model(config),
        lively_tensors(family, config, 3),
        precision,
        where,
        lambda name: False,
        "the model",
    )


def unit_names(version: str) -> tuple[str, ...]:
    """The units of a U-Net, in the order of the forward pass."""
    return FAMILIES[version].architecture.units_among(FAMILIES[version].architecture.shapes_of(UNETS[version]))


def lively_tensors(family: Family, config: dict[str, Any], seed: int) -> TensorSource:
    """Random weights of a U-Net whose residual branches do not start near zero, so that every error shows."""
    drawn, small = family.architecture.random_tensors(config, seed), re.compile(family.architecture.starts_small)
    return MadeTensors(
        family.architecture.shapes_of(config), lambda name, _: drawn.get(name) * (30 if small.search(name) else 1)
    )


def unet_loss(
    model: nn.Module, precision: WeightPrecision, key: int, device: str = "cpu", version: str = "sd15"
) -> Tensor:
    """The loss of a U-Net's micro-batch of two samples; sizes alternate."""
    generator = torch.Generator().manual_seed(key)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    h, w = ((8, 8), (4, 16))[key % 2]
    z_t, prompts, target = draw(2, 4, h, w), draw(2, 6, UNET["cross_attention_dim"]), draw(2, 4, h, w)
    text = Conditioning(prompts)
    if version == "sdxl":
        pooled, numbers = draw(2, POOLED + NUMBERS).split([POOLED, NUMBERS], dim=1)
        text = Conditioning(prompts, pooled=pooled, extra={"time_ids": numbers})
    time = torch.tensor([300, 800], device=device)
    with precision.autocast_on(z_t.device):
        prediction = FAMILIES[version].predict(model, z_t, time, text, precision.compute_dtype())
    return (prediction.float() - target).square().mean()


DENOISERS = {
    "sd3": Denoiser(transformer, loss_of),
    **{version: Denoiser(partial(unet, version), partial(unet_loss, version=version)) for version in UNETS},
}


@dataclass
class Setting:
    """How a model's blocks are run."""

    streamed: tuple[int, ...] = ()
    checkpointed: int | None = None  # all
    host: bool = False
    poison: bool = False
    queue: Callable[[], Any] | None = None
    inward: Callable[[], Any] | None = None  # the queue to the device, where it differs
    trained: bool = False
    parts: Parts = WHOLE


def prepare(model: Any, setting: Setting, device: str = "cpu") -> BlockOffload | None:
    """Install the passes of a model's blocks."""
    queue = setting.queue
    queues = None if queue is None else ((setting.inward or queue)(), queue())
    where = torch.device(device)
    streaming = None
    if setting.streamed:
        streaming = BlockOffload(model_units(model), setting.streamed, where, setting.trained, queues, setting.poison)
    inputs = CheckpointInputOffload(where, queue() if queue else None) if setting.host else None
    checkpointed = len(model_units(model)) if setting.checkpointed is None else setting.checkpointed
    set_passes(model_units(model), checkpointed, inputs, streaming, setting.parts)
    return streaming


def lora_run(
    precision: WeightPrecision, setting: Setting, dropout: float = 0.0, device: str = "cpu", family: str = "sd3"
) -> Run:
    """A step of two micro-batches and one of a single one."""
    model = DENOISERS[family].build(precision, device)
    Lora(rank=2, targets="all_linear", dropout=dropout).attach(model, 7)
    shake_updates(model)
    prepare(model.train(), setting, device)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses, gradients = [], []
    for step in range(STEPS):
        torch.manual_seed(step)
        for micro in range(ACCUMULATION if step == 0 else 1):
            loss = DENOISERS[family].loss(model, precision, step * ACCUMULATION + micro, device)
            loss.backward()
            losses.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in trained.items() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


@cache
def plain_run(precision: str, family: str = "sd3", dropout: float = 0.0) -> Run:
    """What every lever must give: all weights stay, and nothing is computed again. Only compare it."""
    return lora_run(PRECISIONS[precision], Setting(checkpointed=0), dropout, family=family)


def assert_same_run(ours: Run, theirs: Run) -> None:
    assert ours[0] == theirs[0]
    assert len(set(ours[0])) == len(ours[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=0)
    zero = {name for name, gradient in ours[1][-1].items() if gradient.abs().sum() == 0}
    assert len(zero) < len(ours[1][-1]) / 8  # the last block's text query has none


class UpdateInBackward:
    """A minimal optimizer in the backward pass: a hook and an optimizer for each parameter."""

    def __init__(self, model: nn.Module, streamed: BlockOffload | None, kind: Any):
        self.state: dict[nn.Parameter, dict] = {}
        self.kind, self.streamed = kind, streamed
        self.seen: set[tuple[str, ...]] = set()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.take)

    def take(self, parameter: nn.Parameter) -> None:
        state = self.state.setdefault(parameter, {})
        if self.streamed is None:
            self.update(parameter, state)
        else:
            with self.streamed.updating(parameter, state):
                self.update(parameter, state)
        parameter.grad = None

    def update(self, parameter: nn.Parameter, state: dict) -> None:
        shell = nn.Parameter(parameter.detach().clone())
        shell.grad = parameter.grad
        optimizer = self.kind([shell])
        optimizer.state[shell] = state
        optimizer.step()
        parameter.data.copy_(shell.detach())


class LateCopies:
    """A copy queue that works as late as possible, so that a use without a wait sees the old contents."""

    def __init__(self) -> None:
        self._queue: list[Late] = []

    def mark(self) -> CopyEvent:
        """Do nothing: on the CPU the computation is already done."""
        return None

    def run(self, work: Callable[[], object], after: Iterable[CopyEvent]) -> CopyEvent:
        """Queue the work."""
        late = Late(self, work, list(after))
        self._queue.append(late)
        return late

    def wait(self, ticket: CopyEvent) -> None:
        """Do all work up to this item."""
        if ticket is not None:
            ticket.queue.flush(ticket)

    join = wait

    def finish(self) -> None:
        """Do all work."""
        if self._queue:
            self.flush(self._queue[-1])

    def flush(self, last: Late) -> None:
        """Do the queued work in order, each item after those that it waits for."""
        while not last.done:
            late = self._queue.pop(0)
            for ticket in late.after:
                self.wait(ticket)
            with torch.no_grad():
                late.work()
            late.done = True


class EagerCopies(LateCopies):
    """A copy queue that works as early as possible, so that a copy without a wait overtakes a late one."""

    def run(self, work: Callable[[], object], after: Iterable[CopyEvent]) -> CopyEvent:
        """Do the work right after the items that it names."""
        event = super().run(work, after)
        self.wait(event)
        return event


@dataclass(eq=False)
class Late:
    """Work of a late queue."""

    queue: LateCopies
    work: Callable[[], object]
    after: list[CopyEvent]
    done: bool = False


def write_pipeline(folder: Path) -> None:
    """A pipeline of three blocks on disk."""
    from benchmarks.tiny_models import tiny_sd3

    tiny_sd3.build(folder, replace(tiny_sd3.MINIMAL, layers=3, heads=3), seed=2, dtype="fp32")


def write_unet(
    folder: Path, change: Callable[[dict[str, Tensor]], None] = lambda weights: None, version: Any = "sd2"
) -> dict[str, str]:
    """The option ``model`` of a U-Net of two levels on disk, in a pipeline of Stable Diffusion 1.5, 2 or XL.

    Args:
        folder: to write.
        change: changes the U-Net's weights in place.
        version: ``sd15``, ``sd2`` or ``sdxl``.
    """
    import tiny_sd15
    import tiny_sdxl
    from diffusers import UNet2DConditionModel

    if version == "sdxl":
        pipeline = tiny_sdxl.build(folder / "pipeline", seed=1)
        text = {
            name: tiny_sdxl.UNET[name]
            for name in ("cross_attention_dim", "addition_time_embed_dim", "projection_class_embeddings_input_dim")
        }
    else:
        pipeline = tiny_sd15.build(folder / "pipeline", version, seed=1)
        text = {"cross_attention_dim": tiny_sd15.TEXT[version]}
    family, config = FAMILIES[version], UNETS[version] | text
    model, source = UNet2DConditionModel(**config), lively_tensors(family, config, 3)
    weights = {name: source.get(name) for name in source.names}
    change(weights)
    model.load_state_dict(weights)
    model.save_pretrained(folder / "unet")
    return {"family": family.family, "pretrained": str(pipeline), "unet": str(folder / "unet")}


def on_cuda(operator: str, *given: object) -> Any:
    """Call one of our operators as CUDA dispatches it, over tensors of the CPU."""
    return getattr(torch.ops.simpletune, operator).default._op_dk(torch._C.DispatchKey.CUDA, *given)


def break_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateCopies, "wait", lambda self, ticket: None)


def break_the_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the weights up when the recomputation ends, not when the backward pass of the block does."""
    hold = BlockOffload.recomputation

    def recomputation(self: BlockOffload, index: int) -> Iterator[None]:
        with hold(self, index):
            yield
        self._leave()

    monkeypatch.setattr(BlockOffload, "recomputation", contextmanager(recomputation))


def break_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the slot that is in use."""
    monkeypatch.setattr(BlockOffload, "_free_slots", lambda self, keep: self._slots[::-1])
