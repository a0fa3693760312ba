"""Options of LoRA: rsLoRA's scale, dropout of ranks and modules, the limit of norms, LoRA+'s learning rates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from blocks import BLOCKS, Setting, loss_of, prepare, shake_updates, transformer
from safetensors.torch import load_file
from tiny_runs import TrainOnce, cut_back
from torch import Tensor, nn

from simpletune.adapters.methods.dora import Dora
from simpletune.adapters.methods.layers import ADAPTER
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.lora_layers import UpdateDropout, limit_norm, lora_layers, product_norm, row_norms
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.optim.in_backward import step_in_backward
from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.engine.quant.precision import FP32
from simpletune.runs import checkpoint
from simpletune.system.options import ConfigError, union_of
from simpletune.training.train import train

OPTIMIZERS = union_of(TrainConfig.model_fields["optimizer"]).members


@pytest.mark.parametrize(
    ("fields", "scale"),
    [({}, 1), ({"alpha": 8.0}, 0.5), ({"rank_stabilized": True}, 4), ({"alpha": 8.0, "rank_stabilized": True}, 2)],
)
def test_scales_by_hand(fields: dict, scale: float) -> None:
    adapter = Lora(rank=16, **fields)
    model = transformer(FP32())
    adapter.attach(model, 1)
    assert adapter.scale_of("") == scale
    assert {layer.scaling[ADAPTER] for _, layer in lora_layers(model)} == {scale}


def test_dropped_ranks_keep_the_expected_update() -> None:
    b = torch.arange(1.0, 13).view(3, 4)
    dropout = UpdateDropout(0.4, 0.0)
    torch.manual_seed(0)
    drawn = dropout(b.repeat(1, 4000)).unflatten(1, (4000, 4)).transpose(0, 1)
    kept = drawn[:, 0] != 0
    torch.testing.assert_close(drawn, kept[:, None] * b / 0.6)  # whole columns
    torch.testing.assert_close(drawn.mean(0), b, rtol=0.05, atol=0)
    assert (kept.sum(1) == 2).any() and (kept.sum(1) == 3).any()
    whole = torch.stack([UpdateDropout(0.0, 0.3)(b) for _ in range(4000)])
    applied = whole[:, 0, 0] != 0
    torch.testing.assert_close(whole, applied[:, None, None] * b)  # all or nothing, not scaled
    assert applied.float().mean().item() == pytest.approx(0.7, abs=0.03)
    torch.testing.assert_close(dropout.eval()(b), b, rtol=0, atol=0)


def gradients(setting: Setting, adapter: Lora) -> tuple[list[float], dict[str, Tensor]]:
    model = transformer(FP32())
    adapter.attach(model, 7)
    shake_updates(model)
    prepare(model.train(), setting)
    torch.manual_seed(0)
    losses = [loss_of(model, FP32(), micro) for micro in range(2)]
    sum(losses).backward()  # type: ignore[union-attr]
    return [loss.item() for loss in losses], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_a_recomputed_block_drops_the_same_ranks() -> None:
    adapter = Lora(rank=4, rank_dropout=0.5, module_dropout=0.3)
    plain = gradients(Setting(checkpointed=0), adapter)
    torch.testing.assert_close(gradients(Setting(checkpointed=BLOCKS), adapter), plain, rtol=0, atol=0)
    assert plain[0] != gradients(Setting(checkpointed=0), Lora(rank=4))[0]


def test_norms_in_closed_form() -> None:
    torch.manual_seed(0)
    w, a, b = torch.randn(9, 7), torch.randn(3, 7), torch.randn(9, 3)
    torch.testing.assert_close(product_norm(a, b), (b @ a).norm())
    expected = (w + 0.6 * b @ a).norm(dim=1)
    torch.testing.assert_close(row_norms(w.square().sum(1), w @ a.T, a, b, 0.6), expected)


@pytest.mark.parametrize("kind", [Lora, Dora])
def test_updates_beyond_the_limit_are_scaled_to_it(kind: type[Lora]) -> None:
    adapter = kind(rank=3, alpha=6.0, max_norm=0.5)
    model = transformer(FP32())
    adapter.attach(model, 1)
    shake_updates(model)
    before = {a: (a.detach().clone(), b.detach().clone()) for _, a, b in adapter.factors(model)}
    first = next(iter(before))
    first.data *= 1e-3  # below the limit
    adapter.constrain(model)
    norms = [2 * (b @ a).norm() for _, a, b in adapter.factors(model)]
    assert 0 < norms[0] < 0.1
    torch.testing.assert_close(torch.stack(norms[1:]), torch.full((len(norms) - 1,), 0.5))
    for _, a, b in list(adapter.factors(model))[1:]:
        ratio = a / before[a][0]
        torch.testing.assert_close(ratio, (b / before[a][1]).flatten()[0].expand_as(ratio))


def test_a_zero_update_stays_zero() -> None:
    a, b = torch.ones(2, 3), torch.zeros(4, 2)
    limit_norm(a, b, 1.0, 0.1)
    assert a.eq(1).all() and b.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_each_parameter_s_ratio(name: str, in_backward: bool, dtype: torch.dtype) -> None:
    """Three parameters with one gradient: the third moves four times as far, at any later learning rate too."""
    option: Any = OPTIMIZERS[name](lr=2e-2)
    if not option.steps_in_backward:
        pytest.skip("refused by a rule")
    torch.manual_seed(0)
    start = torch.rand(64, 96).sub(0.5).to(dtype)
    parameters = [nn.Parameter(start.clone()) for _ in range(3)]
    optimizer = option.build(parameters, in_backward, [1.0, 1.0, 4.0])
    if in_backward:
        assert isinstance(optimizer, RoundedOptimizer)
        step_in_backward(optimizer, clip_norm=None)
    slope = torch.linspace(-1, 1, 96, dtype=dtype)
    for lr in (2e-2, 1e-2):
        optimizer.param_groups[0]["lr"] = lr
        before = [parameter.detach().float().clone() for parameter in parameters]
        for parameter in parameters:
            (parameter * slope).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        downhill = [(was - p.detach().float()) * slope.sign() for p, was in zip(parameters, before, strict=True)]
        one, two, four = (float(moved.mean()) for moved in downhill)
        assert one == pytest.approx(two, rel=0.05) and four == pytest.approx(4 * one, rel=0.05)


def test_lora_plus_runs_resume_exactly(tiny_config: dict, train_once: TrainOnce, copy_run: TrainOnce) -> None:
    """Two steps and two more are four, with all options at once."""
    data = copy.deepcopy(tiny_config)
    data["adapter"] = {"method": "lora", "rank": 2, "rank_stabilized": True, "rank_dropout": 0.3, "module_dropout": 0.2,
                       "max_norm": 0.02, "b_lr_ratio": 8.0}  # fmt: skip
    data["checkpoint"] = {"every": 2}
    whole, halves = train_once(data), copy_run(data)
    for step in (2, 4):
        state = load_file(checkpoint.checkpoint_folder(whole, step) / checkpoint.TRAINABLE)
        norms = [2**0.5 * (b @ state[k.replace("lora_B", "lora_A")]).norm() for k, b in state.items() if "lora_B" in k]
        assert max(norms) == pytest.approx(0.02, rel=1e-5)
    cut_back(halves, 2)
    train(validate(data, "halves"), resume="latest")
    ends = [load_file(checkpoint.checkpoint_folder(run, 4) / checkpoint.TRAINABLE) for run in (whole, halves)]
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_an_unlimited_run_moves_b_by_the_ratio(tiny_config: dict) -> None:
    ends = []
    for ratio in (1.0, 8.0):
        data = copy.deepcopy(tiny_config) | {"name": f"ratio-{ratio:g}"}
        data["adapter"] = {"method": "lora", "rank": 2, "b_lr_ratio": ratio}
        data["train"]["steps"] = 1
        ends.append(load_file(train(validate(data, "ratio")) / "pytorch_lora_weights.safetensors"))
    for key, plain in ends[0].items():
        if "lora_B" in key and plain.any():
            torch.testing.assert_close(ends[1][key], 8 * plain)
        elif "lora_A" in key:
            torch.testing.assert_close(ends[1][key], plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": {"method": "lora", "rank_dropout": 1.0}}, "adapter.rank_dropout"),
        ({"adapter": {"method": "lora", "module_dropout": -0.1}}, "adapter.module_dropout"),
        ({"adapter": {"method": "lora", "max_norm": 0.0}}, "adapter.max_norm"),
        ({"adapter": {"method": "lora", "b_lr_ratio": 0.0}}, "adapter.b_lr_ratio"),
        (
            {"adapter": {"method": "lora", "max_norm": 1.0}, "optimizer": {"name": "adamw_schedule_free"}},
            "adapter.max_norm: optimizer.name adamw_schedule_free averages .*Use max_norm",
        ),
    ],
)
def test_options_have_bounds(changes: dict, message: str, tiny_config: dict) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(tiny_config | changes, "bounds")


def test_one_learning_rate_of_all_gradients_is_refused_with_a_ratio(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tiny_config | {"adapter": {"method": "lora", "b_lr_ratio": 16.0}, "optimizer": {"name": "adafactor"}}
    validate(data, "fits")
    monkeypatch.setattr(OPTIMIZERS["adafactor"], "steps_in_backward", False)
    with pytest.raises(ConfigError, match="adapter.b_lr_ratio: optimizer.name adafactor .*Use b_lr_ratio 1"):
        validate(data, "refused")


@pytest.mark.parametrize("adapter", [{"method": "dora", "rank": 2}, {"method": "oft", "block_size": 8}])
def test_the_disk_that_a_result_needs_is_what_it_takes(adapter: dict, tiny_config: dict) -> None:
    config = validate(copy.deepcopy(tiny_config) | {"adapter": adapter}, "disk")
    file = train(config) / "pytorch_lora_weights.safetensors"
    shapes = {key: tensor.shape for key, tensor in load_file(file).items()}
    assert sum(shape.numel() for shape in shapes.values()) == config.adapter.exported(
        config.model.architecture.known_shapes()
    )


def test_norms_of_a_high_rank_take_no_square_of_the_rank() -> None:
    """A file of rank 100,000 would take 40 GB."""
    a, b = torch.randn(9, 3, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    w = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(product_norm(a, b).double(), (b @ a).norm(), rtol=1e-6, atol=0)
    found = row_norms(w.square().sum(1).float(), w @ a.T, a, b, 0.6).double()
    torch.testing.assert_close(found, (w + 0.6 * b @ a).norm(dim=1), rtol=1e-5, atol=0)
    many = torch.zeros(1, 1).expand(200_000, 2), torch.zeros(1, 1).expand(3, 200_000)
    assert product_norm(*many) == 0 and not row_norms(torch.zeros(3), many[1], *many, 1.0).any()
