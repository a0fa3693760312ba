"""The modulation plan on diffusers' models of families to come: the facts of each, outputs and gradients, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from diffusers import Flux2Transformer2DModel, QwenImageTransformer2DModel, ZImageTransformer2DModel
from torch import Tensor, nn

from simpletune.data.samples import PlannedSample
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.nf4_linear import Nf4Linear
from simpletune.engine.quant.precision import BF16, FP32, Nf4, WeightPrecision
from simpletune.models.objectives.flow import FlowProcess
from simpletune.models.shared.modulation import Modulation
from simpletune.models.shared.weights import MadeTensors, fill_model
from simpletune.stages.modulation_plan import ModulationPlan, detach_modulation, replay
from simpletune.stages.step.synthetic import SAMPLE
from simpletune.system.options import UserError

CPU = torch.device("cpu")
TEXT, SIDE, TOKENS = 12, 4, 3


class Case(NamedTuple):
    """A family to come: its fact, a small model, and its pass on [b] timesteps, 1000 sigma."""

    fact: Modulation
    build: Callable[[], nn.Module]
    units: tuple[str, ...]
    predict: Callable[[Any, Tensor, Tensor, Tensor, torch.dtype], Tensor]
    width: int
    """m, the sum of the layers' outputs."""


def _shared(model: Any, x: Tensor, prompts: Tensor, time: Tensor, dtype: torch.dtype) -> Tensor:
    """FLUX.2: 8 channels a token."""
    tokens = x.flatten(2).transpose(1, 2).to(dtype)
    ids = [torch.zeros(count, 4, dtype=torch.long) for count in (tokens.shape[1], TOKENS)]
    ids[0][:, 1] = torch.arange(tokens.shape[1])
    named = {"hidden_states": tokens, "encoder_hidden_states": prompts.to(dtype), "timestep": time / 1000}
    out: Tensor = model(**named, img_ids=ids[0], txt_ids=ids[1], return_dict=False)[0]
    return out


def _qwen(model: Any, x: Tensor, prompts: Tensor, time: Tensor, dtype: torch.dtype) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2).to(dtype)
    shapes = [[(1, SIDE, SIDE)]] * len(x)
    named = {"hidden_states": tokens, "encoder_hidden_states": prompts.to(dtype), "timestep": time / 1000}
    out: Tensor = model(**named, img_shapes=shapes, return_dict=False)[0]
    return out


def _z_image(model: Any, x: Tensor, prompts: Tensor, time: Tensor, dtype: torch.dtype) -> Tensor:
    images, texts = [each.to(dtype).unsqueeze(1) for each in x], [each.to(dtype) for each in prompts]
    return torch.stack(model(images, (1000 - time) / 1000, texts, return_dict=False)[0])


CASES = {
    "FLUX.2": Case(
        Modulation(
            embed="time_guidance_embed",
            layers={r"_stream_modulation(_img|_txt)?\.linear$": "act_fn", r"^norm_out\.linear$": "silu"},
            inputs=lambda time, pooled, dtype: ((time / 1000).to(dtype) * 1000, None),
            reads_pooled=False,
        ),
        lambda: Flux2Transformer2DModel(
            patch_size=1, in_channels=8, num_layers=1, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=TEXT, timestep_guidance_channels=16, mlp_ratio=2.0, axes_dims_rope=(2, 2, 2, 2),
            guidance_embeds=False,
        ),
        ("transformer_blocks.0", "single_transformer_blocks.0", "single_transformer_blocks.1"),
        _shared,
        (6 + 6 + 3 + 2) * 16,
    ),
    "Qwen-Image": Case(
        Modulation(
            embed="time_text_embed",
            layers={r"\.(img|txt)_mod\.1$": "0", r"^norm_out\.linear$": "silu"},
            inputs=lambda time, pooled, dtype: ((time / 1000).to(dtype),) * 2,
            reads_pooled=False,
        ),
        lambda: QwenImageTransformer2DModel(
            patch_size=2, in_channels=8, out_channels=2, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=TEXT, axes_dims_rope=(4, 6, 6),
        ),
        ("transformer_blocks.0", "transformer_blocks.1"),
        _qwen,
        (2 * 12 + 2) * 32,
    ),
    "Z-Image": Case(
        Modulation(
            embed="t_embedder",
            layers={r"^(noise_refiner|layers)\.\d+\.adaLN_modulation\.0$": None, r"^all_final_layer\..*\.1$": "0"},
            inputs=lambda time, pooled, dtype: ((1000 - time) / 1000 * 1000.0,),
            reads_pooled=False,
        ),
        lambda: ZImageTransformer2DModel(
            all_patch_size=(2,), all_f_patch_size=(1,), in_channels=8, dim=16, n_layers=2, n_refiner_layers=1,
            n_heads=2, n_kv_heads=2, cap_feat_dim=TEXT, axes_dims=[2, 2, 4], axes_lens=[64, 16, 16],
        ),
        ("noise_refiner.0", "context_refiner.0", "layers.0", "layers.1"),
        _z_image,
        (3 * 4 + 1) * 16,
    ),
}  # fmt: skip


def loaded(case: Case, precision: WeightPrecision) -> Any:
    """A model of the family, filled as the trainer does, with values everywhere."""
    model: Any = case.build()
    model.units, model.after_units = case.units, case.units[-1]
    model.per_sample = frozenset(name for name, _ in model.named_modules() if case.fact.has(name))
    model.unquantised = frozenset()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        return torch.randn(shape, generator=generator) * 0.3

    return fill_model(model, MadeTensors(shapes, value), precision, CPU)


@pytest.mark.parametrize("precision", [FP32(), BF16()], ids=lambda precision: precision.weights)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_plain_model_to_the_bit(name: str, precision: WeightPrecision) -> None:
    case, dtype = CASES[name], precision.compute_dtype()
    plain = loaded(case, precision)
    planned = copy.deepcopy(plain)
    modulation = detach_modulation(planned, case.fact, precision, CPU, 4)
    assert modulation.width == case.width
    generator = torch.Generator().manual_seed(1)
    x, prompts = torch.randn(2, 8, SIDE, SIDE, generator=generator), torch.randn(2, TOKENS, TEXT, generator=generator)
    time = torch.tensor([120.3, 871.9])
    found = []
    for model in (plain, planned):
        for block in map(model.get_submodule, case.units):
            for parameter in block.parameters():
                parameter.requires_grad_()
        model.train().enable_gradient_checkpointing()
        if model is planned:
            rows = modulation(time, None)
            replay(model, rows)
        out = case.predict(model, x, prompts, time, dtype)
        out.float().square().mean().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and not case.fact.serves(n)}
        found.append((out.detach(), gradients))
    (expected, theirs), (actual, ours) = found
    assert rows.shape == (2, case.width) and rows.dtype == dtype
    assert torch.equal(actual, expected) and actual.isfinite().all()
    theirs = {n: g for n, g in theirs.items() if not case.fact.serves(n.rpartition(".")[0])}
    assert set(ours) == set(theirs) and len(ours) > 10
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    later = time.flip(0)
    with torch.no_grad():
        replay(planned, modulation(later, None))
        other = case.predict(planned, x, prompts, later, dtype)
        assert torch.equal(other, case.predict(plain, x, prompts, later, dtype)) and not torch.equal(other, actual)
        with pytest.raises(RuntimeError, match="call replay before each of its passes"):
            case.predict(planned, x, prompts, later, dtype)


def test_a_record_that_is_not_the_model_s_is_refused() -> None:
    case = CASES["Qwen-Image"]
    embed, layers, inputs = case.fact.embed, case.fact.layers, case.fact.inputs
    for fact, says in (
        (Modulation("transformer_blocks.0.attn.to_q", layers, inputs, False), "attn.to_q lies inside of a unit"),
        (Modulation(embed, {r"\.img_mod\.1$": "1"}, inputs, False), "img_mod.1 is not the SiLU"),
    ):
        with pytest.raises(ValueError, match=says):
            detach_modulation(loaded(case, FP32()), fact, FP32(), CPU, 4)


def plan_of(name: str, window: int) -> ModulationPlan:
    def nobody(caption: str) -> Tensor:
        raise AssertionError("the family has no pooled prompt")

    case = CASES[name]
    passes = SimpleNamespace(batch_size=2, accumulation=3, micro_batch=lambda step, micro: draws(step, micro))
    modulation = detach_modulation(loaded(case, FP32()), case.fact, FP32(), CPU, window)
    return ModulationPlan(modulation, passes, FlowProcess().time, nobody)


def draws(step: int, micro: int) -> list[PlannedSample]:
    return [replace(SAMPLE, level=(1 + step + 3 * micro + row) / 32) for row in range(2)]


def test_a_plan_reads_no_prompts_where_modulations_follow_from_the_time_alone() -> None:
    plan = plan_of("Z-Image", 2)
    assert plan.window_prompts_steps(3) is None and plan.window_steps(3) == range(2, 4)
    rows = plan.step_modulations(3)
    assert rows.shape == (3, 2, CASES["Z-Image"].width)
    levels = torch.tensor([draw.level for draw in draws(3, 1)])
    torch.testing.assert_close(rows[1], plan.modulation(1000 * levels, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("window", "remedy"), [(8, "Use 4 or less, or"), (1, "Use memory.modulation resident")])
def test_a_window_that_does_not_fit_into_memory_is_refused(
    window: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, step = plan_of("Qwen-Image", window), 3 * 2 * 832 * 4  # passes, rows, modulations, bytes
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=step * window // 2 + step // 4))
    with pytest.raises(UserError, match=rf"memory.modulation_window: {window} computes 0 MiB .* {remedy}"):
        plan.step_modulations(0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=step * window))
    assert plan.step_modulations(0).nbytes == step


def test_a_table_has_the_levels_that_a_run_trains_on_and_others_are_computed() -> None:
    case, levels = CASES["Qwen-Image"], [1 / 32, 2 / 32, 5 / 32, 6 / 32]
    passes = SimpleNamespace(batch_size=2, accumulation=1, micro_batch=lambda step, micro: draws(4 * step, micro))
    modulation = detach_modulation(loaded(case, FP32()), case.fact, FP32(), CPU, 3, levels=levels)
    plan = ModulationPlan(modulation, passes, FlowProcess().time, lambda caption: None)
    assert plan.window == 1 and plan.window_steps(1) == range(1, 2)
    assert plan.table is not None and plan.table.rows.shape == (4, case.width)
    assert torch.equal(plan.step_modulations(0)[0], plan.table.rows[:2])
    assert torch.equal(plan.step_modulations(1)[0], plan.table.rows[2:])
    torch.testing.assert_close(plan.table.rows, modulation(1000 * torch.tensor(levels), None), rtol=1e-4, atol=1e-4)
    assert plan.table.at([1 / 32, 9 / 32]) is None
    later = modulation(1000 * torch.tensor([9 / 32, 10 / 32]), None)
    torch.testing.assert_close(plan.step_modulations(2)[0], later, rtol=1e-4, atol=1e-4)


def test_a_table_that_does_not_fit_into_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case, levels = CASES["Qwen-Image"], [number / 32 for number in range(1, 9)]
    modulation = detach_modulation(loaded(case, FP32()), case.fact, FP32(), CPU, 3, levels=levels)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * case.width * 4))
    passes = SimpleNamespace(batch_size=2, accumulation=1, micro_batch=draws)
    with pytest.raises(UserError, match="objective.levels: 8 levels have 0 MiB of modulations.* Use 5 or fewer"):
        ModulationPlan(modulation, passes, FlowProcess().time, lambda caption: None)


def test_modulation_in_blocks_is_spared_four_bits_and_the_root_has_parameters() -> None:
    model = loaded(CASES["Z-Image"], Nf4(compute="fp32", rotation="hadamard"))
    layer, other = model.layers[0].adaLN_modulation[0], model.layers[0].attention.to_q
    assert isinstance(layer, Int8Linear) and not layer.rotates_weight
    assert isinstance(other, Nf4Linear) and other.rotates_weight
    assert model.x_pad_token.isfinite().all() and not model.x_pad_token.is_meta
