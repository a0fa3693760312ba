"""Recomputing less of a block: attention's output kept, feed-forward networks alone. Exact, and less is computed."""

from __future__ import annotations

import copy
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from blocks import (
    BLOCKS,
    PRECISIONS,
    UNETS,
    LateCopies,
    Setting,
    assert_same_run,
    lora_run,
    loss_of,
    plain_run,
    prepare,
    shake_updates,
    transformer,
    unit_names,
)
from diffusers import Flux2Transformer2DModel, QwenImageTransformer2DModel, ZImageTransformer2DModel
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from pydantic import TypeAdapter
from slow_cases import slow_but
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from simpletune.adapters.methods import Adapter
from simpletune.adapters.methods.adapter import TrainingMethod
from simpletune.adapters.methods.full import Full
from simpletune.adapters.methods.lora import Lora
from simpletune.config.load import validate
from simpletune.engine.memory import Memory, feed_forward
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.checkpointing import Parts, set_passes
from simpletune.engine.memory.feed_forward import tiles
from simpletune.engine.memory.offload_inputs import CheckpointInputOffload, OffloadedInput
from simpletune.engine.memory.selective_checkpointing import KERNELS, KernelOutput, SavedAttention, attentions
from simpletune.engine.memory.snapshot import round_to_block
from simpletune.engine.quant.precision import FP32
from simpletune.system.options import ConfigError, UserError

ALONE = Parts(feed_forward="checkpointed", last=True)
BOTH = Parts(2, "checkpointed", last=True)
ALL = tuple(range(BLOCKS))
UNITS = {version: len(unit_names(version)) for version in UNETS}
ALL_UNITS, SOME_UNITS = tuple(range(UNITS["sd15"])), Parts(9, "checkpointed")
ALL_XL, LAST_XL = tuple(range(UNITS["sdxl"])), Parts(9, "checkpointed", last=True)
RUNS: dict[str, tuple[str, str, float, Setting]] = {
    "attention of some kept": ("sd3", "int8", 0.0, Setting(checkpointed=3, parts=Parts(2))),
    "alone, some checkpointed": ("sd3", "nf4", 0.0, Setting(checkpointed=2, parts=ALONE)),
    "feed-forward only": ("sd3", "int8", 0.0, Setting(checkpointed=0, parts=Parts(0, "all", last=True))),
    "feed-forward only, dropout": ("sd3", "fp32", 0.5, Setting(checkpointed=0, parts=Parts(0, "all", last=True))),
    "both, dropout": ("sd3", "fp32", 0.5, Setting(parts=BOTH)),
    "both, inputs on the host": ("sd3", "int8-products", 0.0, Setting(host=True, queue=LateCopies, parts=BOTH)),
    "both, streamed": ("sd3", "int8", 0.0, Setting(ALL, poison=True, parts=BOTH)),
    "both, streamed late": ("sd3", "nf4", 0.0, Setting(ALL, None, True, True, LateCopies, parts=BOTH)),
    "both, autocast": ("sd3", "fp32-autocast", 0.0, Setting(parts=BOTH)),
    "U-Net": ("sd2", "int8", 0.0, Setting(parts=Parts(UNITS["sd2"], "checkpointed"))),
    "U-Net, feed-forward only": ("sd15", "fp32", 0.0, Setting(checkpointed=0, parts=Parts(0, "all"))),
    "U-Net, streamed": ("sd15", "nf4", 0.0, Setting(ALL_UNITS, None, True, True, LateCopies, parts=SOME_UNITS)),
    "single blocks": ("sdxl", "int8", 0.0, Setting(parts=Parts(UNITS["sdxl"], "checkpointed", last=True))),
    "single blocks, networks only": ("sdxl", "fp32", 0.5, Setting(checkpointed=0, parts=Parts(0, "all", last=True))),
    "single blocks, streamed": ("sdxl", "nf4", 0.0, Setting(ALL_XL, None, True, True, LateCopies, parts=LAST_XL)),
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(["both, streamed"], RUNS))
def test_a_lora_run_is_the_plain_one_bit_for_bit(case: str) -> None:
    family, precision, dropout, setting = RUNS[case]
    plain = plain_run(precision, family, dropout)
    assert_same_run(lora_run(PRECISIONS[precision], setting, dropout, family=family), plain)


def model_with(adapter: TrainingMethod, setting: Setting, weights: str = "fp32") -> Any:
    """A model whose blocks run as set."""
    model = transformer(PRECISIONS[weights])
    adapter.attach(model, 7)
    shake_updates(model)
    prepare(model.train(), setting)
    return model


def gradients(model: nn.Module, conditioning: bool = False) -> dict[str, Tensor]:
    """Of one micro-batch; with ``conditioning`` also that of a shift of the blocks' conditioning."""
    shift = torch.zeros(32, requires_grad=True)
    if conditioning:
        model.get_submodule("time_text_embed").register_forward_hook(lambda *seen: seen[-1] + shift)
    loss_of(model, FP32(), 0).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | ({"conditioning": shift.grad} if conditioning else {})


class Counting(TorchDispatchMode):
    """Counts kernels of attention, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(
        self, op: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: dict | None = None
    ) -> object:
        if op.name().startswith(KERNELS):
            self.kernels["backward" if "backward" in op.name() else "forward"] += 1
        return op(*args, **(kwargs or {}))


@contextmanager
def counted_calls(model: nn.Module, end: str) -> Iterator[list[str]]:
    """The names of modules that end so, each time that they run to their end."""
    seen: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
        for name, module in model.named_modules()
        if name.endswith(end)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("keeping", slow_but([1], [0, 1, BLOCKS]))
def test_kept_attention_is_not_computed_again(keeping: int) -> None:
    model = model_with(Lora(rank=2), Setting(parts=Parts(keeping)))
    with Counting() as counting:
        gradients(model)
    assert counting.kernels == {"forward": 2 * BLOCKS - keeping, "backward": BLOCKS}


@pytest.mark.parametrize(("weights", "tile"), slow_but([("int8", 8)], [("int8", 8), ("fp32", None), ("nf4", None)]))
def test_a_feed_forward_network_alone_computes_its_second_product_once(weights: str, tile: int | None) -> None:
    """Of four blocks of image and text, the last has no text; tiles hold 8 of 32 and of 12 tokens."""
    count = {None: 2 * BLOCKS - 1, 8: 4 * BLOCKS + 2 * (BLOCKS - 1)}[tile]
    with_block = model_with(Lora(rank=2), Setting(), weights)
    with counted_calls(with_block, "ff.net.2") as seen:
        gradients(with_block)
    assert Counter(seen) == {f"transformer_blocks.{index}.ff.net.2": 2 for index in ALL}
    alone = model_with(Lora(rank=2), Setting(parts=Parts(0, "checkpointed", tile, last=True)), weights)
    for end, times in (("net.0.proj", 2), ("net.2", 1)):
        with counted_calls(alone, end) as seen:
            gradients(alone)
        assert len(seen) == times * count, end


MODULATION = Lora(rank=2, targets=["attn.to_q", "norm1.linear"])


@pytest.mark.parametrize(("adapter", "conditioning"), [(MODULATION, False), (Full(), False), (Lora(rank=2), True)])
def test_a_network_is_computed_again_where_the_modulations_gradient_needs_it(
    adapter: TrainingMethod, conditioning: bool
) -> None:
    plain = gradients(model_with(adapter, Setting(checkpointed=0)), conditioning)
    model = model_with(adapter, Setting(parts=ALONE))
    with counted_calls(model, "ff.net.2") as seen:
        found = gradients(model, conditioning)
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    assert len(seen) > BLOCKS and any("norm1" in name or name == "conditioning" for name in found)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dora", "loha", "lokr", "oft", "partial"])
def test_any_adapter_gets_the_same_gradients(method: str) -> None:
    """With trained weights inside of feed-forward networks and attention, where the method has any there."""
    targets = {"partial": {"layers": ["*.ff.net.2.*", "*.norm1.linear.bias"]}}
    option: TrainingMethod = TypeAdapter(Adapter).validate_python(
        {"method": method, **targets.get(method, {"targets": "all_linear"})}
    )
    plain = gradients(model_with(option, Setting(checkpointed=0)))
    found = gradients(model_with(option, Setting(parts=BOTH)))
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    assert len(found) > BLOCKS


@pytest.mark.slow
def test_an_output_that_is_needed_but_omitted_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would see it."""
    monkeypatch.setattr(feed_forward, "_trains_modulation", lambda *_: False)
    plain = gradients(model_with(MODULATION, Setting(checkpointed=0)))
    found = gradients(model_with(MODULATION, Setting(parts=ALONE)))
    assert any(not torch.equal(found[name], gradient) for name, gradient in plain.items() if "norm1" in name)


def test_a_tile_of_tokens_changes_the_last_bits_at_most() -> None:
    """Tiles hold every token once and are about equal."""
    plain = gradients(model_with(Lora(rank=2, targets="all_linear"), Setting(checkpointed=0)))
    setting = Setting(parts=Parts(0, "checkpointed", 8, last=True))
    found = gradients(model_with(Lora(rank=2, targets="all_linear"), setting))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-7)
    x = torch.arange(36.0).view(2, 6, 3)
    for rows, sizes in ((None, [(2, 6, 3)]), (12, [(2, 6, 3)]), (11, [(1, 6, 3)] * 2), (5, [(1, 4, 3)] * 3)):
        cut = tiles(x, rows)
        assert [tuple(part.shape) for part in cut] == sizes
        assert torch.equal(torch.cat([part.reshape(-1, 3) for part in cut]), x.reshape(-1, 3))


def bytes_kept(parts: Parts, checkpointed: int = BLOCKS) -> int:
    """Measured: bytes of activations when the forward pass has ended."""
    model = model_with(Lora(rank=2), Setting(checkpointed=checkpointed, parts=parts))
    with Accounting() as counting:
        before = counting.current.bytes
        loss = loss_of(model, FP32(), 0)
        kept = counting.current.bytes - before
        loss.backward()
    return kept


@pytest.mark.slow
def test_what_is_kept_is_its_arithmetic() -> None:
    """Two samples of 16 and 6 tokens; two heads of 16; fp32: attention's output, and one sum a row and head."""
    output, sums = round_to_block(4 * 2 * 22 * 32), round_to_block(4 * 2 * 2 * 22)
    none = bytes_kept(Parts())
    for keeping in (1, BLOCKS):
        assert bytes_kept(Parts(keeping)) - none == keeping * (output + sums)
    assert bytes_kept(ALONE) == none
    hidden = sum(round_to_block(4 * 2 * rows * 4 * 32) for rows in (16, 6))  # of a block's networks, before GELU
    assert bytes_kept(Parts(), 0) - bytes_kept(Parts(0, "all"), 0) > (BLOCKS - 2) * hidden


class Twice(nn.Module):
    """Two attentions, as SD3.5 Medium's first blocks have, the first of fewer tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = (Attention(8, heads=2, dim_head=4, processor=JointAttnProcessor2_0()) for _ in "12")

    def forward(self, x: Tensor) -> Tensor:  # [b, n, 8]
        """The sum of both."""
        return self.first(x) + self.second(x.flip(1)[:, :3]).sum()


def test_two_attentions_of_a_block_get_their_own_outputs() -> None:
    found = []
    for parts in (Parts(), Parts(1)):
        block = Twice()
        set_passes([block], 1, parts=parts)
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
        block(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in block.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_an_output_comes_back_from_the_host_with_its_layout() -> None:
    """As flash attention lays it out, [b, n, h, d] in memory; figures with few dimensions stay."""
    inputs = CheckpointInputOffload(torch.device("cpu"))
    laid_out = torch.randn(2, 5, 3, 4).transpose(1, 2)
    output = KernelOutput.of(
        torch.ops.aten.add.Tensor, [laid_out, torch.randn(2, 3, 5).permute(1, 2, 0), torch.ones(2), 7]
    )
    before = list(output.values)
    with inputs.offloading():
        output.offload(inputs)
    assert [type(value) for value in output.values] == [OffloadedInput, OffloadedInput, Tensor, int]
    output.restore(inputs)
    for value, was in zip(output.values[:3], before, strict=False):
        assert isinstance(value, Tensor) and isinstance(was, Tensor)
        assert value.stride() == was.stride() and torch.equal(value, was)


def test_an_output_that_is_overwritten_and_a_second_backward_pass_are_errors() -> None:
    block = Twice()
    set_passes([block], 1, parts=Parts(1))

    def overwrite(module: nn.Module, args: tuple[Tensor]) -> None:
        args[0].detach().mul_(2)

    block.first.to_out[0].register_forward_pre_hook(overwrite)
    with pytest.raises(RuntimeError, match="overwritten before its recomputation"):
        block(torch.ones(1, 2, 8, requires_grad=True)).sum().backward()
    attention = Twice().first
    _, again = SavedAttention(attention).contexts()
    with again, pytest.raises(RuntimeError, match="second backward pass"):
        attention(torch.ones(1, 2, 8))


REFUSED = {
    "keep, nothing checkpointed": ({"memory": {"checkpointing": "none", "keep_attention": "all"}}, "needs checkpoint"),
    "keep more": ({"memory": {"checkpointing": 1, "keep_attention": 2}}, "2 is more than the 1 block that"),
    "keep beyond": ({"memory": {"checkpointing": "all", "keep_attention": 99}}, "99 is more than the model's"),
    "keep some of auto": ({"memory": {"checkpointing": "auto", "keep_attention": 1}}, "Use auto, all or none"),
    "keep with math": (
        {"memory": {"checkpointing": "all", "keep_attention": "all"}, "speed": {"attention": "math"}},
        "speed.attention math has none",
    ),
    "keep compiled": (
        {"memory": {"checkpointing": "all", "keep_attention": 1}, "speed": {"compile": True}},
        "a compiled block does not show its attention",
    ),
    "nothing to be alone": ({"memory": {"checkpointing": "none", "feed_forward": "alone"}}, "recomputes nothing"),
    "alone compiled": (
        {"memory": {"checkpointing": "all", "feed_forward": 64}, "speed": {"compile": True}},
        "64 with speed.compile.*Use feed_forward block",
    ),
    "alone in fp16": (
        {"memory": {"checkpointing": "feed_forward"}, "precision": {"weights": "int8", "compute": "fp16"}},
        "products in fp16.*Use checkpointing all",
    ),
    "with the block, alone": (
        {"memory": {"checkpointing": "feed_forward", "feed_forward": "block"}}, "Use auto or alone"
    ),
    "streamed": ({"memory": {"checkpointing": "feed_forward", "resident_blocks": 0}}, "Use checkpointing all"),
    "inputs": (
        {"memory": {"checkpointing": "feed_forward", "offload_checkpoint_inputs": True}}, "needs checkpointed blocks"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(case: str, tiny_config: dict) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        validate(tiny_config | changes, "refused")


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"feed_forward": "alone"}, "memory.feed_forward: alone .*Use feed_forward block"),
        ({"feed_forward": 64}, "memory.feed_forward: 64 .*Use feed_forward block"),
        ({"checkpointing": "feed_forward"}, "memory.checkpointing: feed_forward .*Use checkpointing all"),
    ],
)
def test_a_lever_that_finds_no_feed_forward_network_says_so(memory: dict[str, Any], message: str) -> None:
    """A unit without one beside units with one, as FLUX.2 has, is no mistake."""
    lever, other = Memory.model_validate(memory), nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UserError, match=message):
        lever.attach([other, copy.deepcopy(other)], torch.device("cpu"))
    lever.attach([other, FeedForward(4)], torch.device("cpu"))


def flux2() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = Flux2Transformer2DModel(
        patch_size=1, in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
    )  # fmt: skip
    x, text = torch.randn(2, 40, 8), torch.randn(2, 5, 24)
    image, words = torch.zeros(40, 4), torch.zeros(5, 4)
    image[:, 1] = torch.arange(40)
    return model, lambda model: model(x, text, torch.tensor([0.2, 0.7]), image, words, return_dict=False)[0]


def qwen_image() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=8, out_channels=2, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    x, text, mask = torch.randn(2, 40, 8), torch.randn(2, 5, 24), torch.ones(2, 5, dtype=torch.bool)
    return model, lambda model: model(
        x, text, mask, torch.tensor([0.2, 0.7]), img_shapes=[[(1, 5, 8)]] * 2, return_dict=False
    )[0]


def z_image() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    model = ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=24,
        axes_dims=[4, 6, 6], axes_lens=[64, 16, 16],
    )  # fmt: skip
    x, text = [torch.randn(4, 1, 6, 8) for _ in range(2)], [torch.randn(length, 24) for length in (5, 7)]
    return model, lambda model: torch.stack(model(x, torch.tensor([0.2, 0.7]), text, return_dict=False)[0])


OTHERS = {"FLUX.2": (flux2, True), "Qwen-Image": (qwen_image, True), "Z-Image": (z_image, False)}
"""How to build a tiny transformer, and whether only sums and products with modulations follow its networks."""
LEVERS: dict[str, dict[str, Any]] = {
    "networks": {"checkpointing": "feed_forward"},
    "alone": {"checkpointing": "all", "feed_forward": "alone"},
    "alone, attention kept": {"checkpointing": "all", "feed_forward": "alone", "keep_attention": "all"},
    "tiles": {"checkpointing": "all", "feed_forward": 64},
}


def test_the_known_classes_are_diffusers() -> None:
    for name in feed_forward.FEED_FORWARDS:
        module, _, cls = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), cls), nn.Module)


@pytest.mark.parametrize("trained", [r"\.to_[qv]\.", r"linear_out|net\.2|w2|to_out"], ids=["attention", "networks"])
@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("model", OTHERS)
def test_other_transformers_networks_are_recomputed_to_the_bit(model: str, lever: str, trained: str) -> None:
    """Tiles change the last bits; whatever trains, less is alive after the forward pass where networks are alone."""
    build, last = OTHERS[model]
    torch.manual_seed(0)
    plain, call = build()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(bool(re.search(trained, name)))
        nn.init.normal_(parameter, std=0.1)
    levered = copy.deepcopy(plain)
    lists = ("transformer_blocks", "single_transformer_blocks", "noise_refiner", "context_refiner", "layers")
    blocks = [block for name in lists for block in getattr(levered, name, ())]
    networks = [network for block in blocks for network in feed_forward.feed_forwards(block)]
    assert len(networks) == 4, model
    Memory.model_validate(LEVERS[lever]).attach(blocks, torch.device("cpu"), last=last)
    found, live = [], []
    for each in (plain, levered):
        with Accounting() as accounting:
            y = call(each)
            live.append(accounting.current.bytes)
        y.square().mean().backward()
        gradients = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
        found.append(gradients | {"": y.detach()})
    exact = {} if lever == "tiles" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found[1], found[0], **exact)
    assert len(found[0]) > 4 and live[1] < live[0]
    assert len({id(module) for block in blocks for module in attentions(block)}) == len(blocks)
