"""The count of operations against torch's own counter, which sees every product as it happens."""

from __future__ import annotations

import copy
from itertools import product
from typing import ClassVar

import pytest
import torch
from blocks import load
from slow_cases import slow_but
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from simpletune.adapters.methods.dora import Dora
from simpletune.adapters.methods.full import Full
from simpletune.adapters.methods.loha import Loha
from simpletune.adapters.methods.lokr import Lokr
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.oft import Oft
from simpletune.adapters.methods.partial import Partial
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory import Memory
from simpletune.engine.quant.precision import BF16, Int8
from simpletune.engine.tensors import trained_parameters
from simpletune.models.sd3.sd3_files import SD3Files
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.shared.family_files import FamilyFiles
from simpletune.models.shared.flops import Flops, trained_of
from simpletune.stages.step.synthetic import CPU, SingleProcess, SyntheticBatches
from simpletune.stages.step.train_step import TrainStep, assemble

# torch's counter knows only products that make a new tensor.
IN_PLACE = {
    torch.ops.aten.addmm_: lambda y, a, b, **more: 2 * a[0] * a[1] * b[1],
    torch.ops.aten.baddbmm_: lambda y, a, b, **more: 2 * a[0] * a[1] * a[2] * b[2],
}
CASES: dict[str, dict] = {
    "lora": {"adapter": Lora(rank=2)},
    "lora-image": {"adapter": Lora(rank=2, targets="attention_image")},
    "lora-last-block": {"adapter": Lora(rank=2, targets=["transformer_blocks.1.ff.net.2"])},
    "lora-int8": {"adapter": Lora(rank=3), "precision": Int8()},
    "lokr": {"adapter": Lokr(factor=4, rank=2, targets="attention_mlp")},
    "lokr-whole": {"adapter": Lokr(factor=3, rank=None, targets="attention_mlp"), "precision": Int8()},
    "loha": {"adapter": Loha(rank=2)},
    "dora": {"adapter": Dora(rank=2, targets="attention_mlp")},
    "oft": {"adapter": Oft(block_size=8)},
    "full": {"adapter": Full(), "precision": BF16()},
    "partial": {
        "adapter": Partial(layers=["transformer_blocks.1.attn.to_k.*", "transformer_blocks.0.norm1.linear.bias"])
    },
}


def config_of(tiny_config: dict, **changes: object) -> TrainConfig:
    config = validate(copy.deepcopy(tiny_config) | {"train": {"steps": 1, "batch_size": 2}}, "test")
    return config.model_copy(update=changes)


def sd3(config: TrainConfig, **changes: object) -> dict:
    return config.model.files.known_config() | {"num_layers": 2} | changes


def build(config: TrainConfig, shapes: dict) -> TrainStep:
    model = load(shapes, SD3().architecture.random_tensors(shapes, 1), config.precision, CPU)
    return assemble(config, model, SingleProcess(CPU))


def counted(config: TrainConfig, core: TrainStep, step: bool = True) -> int:
    """What torch sees; attention in single products, because its counter knows no fused one of the CPU."""
    batches = SyntheticBatches(config, core, (32, 64)).step(0)
    with (
        FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter,
        sdpa_kernel(SDPBackend.MATH),
        torch.set_grad_enabled(step),
    ):
        core.step(batches) if step else core.loss(core.model, batches[0])
    return counter.get_total_flops()


def ours(core: TrainStep, shapes: dict, checkpointed: int = 0) -> Flops:
    parameters = {name: tuple(p.shape) for name, p in trained_parameters(core.model).items()}
    return of_parameters(parameters, shapes, checkpointed)


def of_parameters(trained: dict, shapes: dict, checkpointed: int = 0) -> Flops:
    class SizedFiles(SD3Files):
        def known_config(self) -> dict:
            return shapes

    class Sized(SD3):
        files_class: ClassVar[type[FamilyFiles]] = SizedFiles

    return Sized(t5_length=8).flops(trained_of(trained), (32, 64), 2, checkpointed)


FAST = [("sd3.5", case) for case in CASES] + [("sd3", case) for case in ("lora", "full")]


@pytest.mark.parametrize(("version", "case"), slow_but(FAST, product(("sd3", "sd3.5"), CASES)))
def test_forward_and_backward_are_what_torch_counts(version: str, case: str, tiny_config: dict) -> None:
    """SD3.5's first block has a second attention, and its second block is as SD3's."""
    config, dual = config_of(tiny_config, **CASES[case]), version == "sd3.5"
    shapes = sd3(config, dual_attention_layers=(0,) if dual else (), qk_norm="rms_norm" if dual else None)
    core = build(config, shapes)
    expected = ours(core, shapes)
    assert counted(config, core, step=False) == expected.forward
    assert counted(config, core) == expected.model + expected.recomputed


def test_recomputation_is_counted_apart(tiny_config: dict) -> None:
    config = config_of(tiny_config, memory=Memory(checkpointing=1))
    shapes = sd3(config, num_layers=3)
    core = build(config, shapes)
    expected = ours(core, shapes, checkpointed=1)
    assert counted(config, core) == expected.model + expected.recomputed
    assert 0 < expected.recomputed < expected.forward
    assert ours(core, shapes).model == expected.model
    assert of_parameters({"proj_out.bias": (64,)}, shapes, 1).recomputed == 0, "the backward pass ends before it"


def test_a_count_changes_no_random_numbers_and_no_kernel(tiny_config: dict) -> None:
    """It runs between two steps of a training."""
    before, shapes = torch.get_rng_state(), sd3(config_of(tiny_config))
    assert of_parameters({"proj_out.bias": (64,)}, shapes).backward == 0, "a bias takes no product"
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.backends.cuda.flash_sdp_enabled() and torch.zeros(1).device.type == "cpu"


def test_sd3_medium_by_hand() -> None:
    """The products of the blocks at 1024 px dominate: 2 operations a weight and token, and attention."""
    flops = SD3().flops(trained_of({}), (1024, 1024), 1)
    image, text, width = 4096, 333, 1536
    blocks = (24 * 12 * (image + text) - 9 * text) * width**2  # the last one ends its text early
    attention = 24 * 2 * (image + text) ** 2 * width
    assert flops.forward == pytest.approx(2 * (blocks + attention), rel=0.01)
    assert flops.backward == 0
