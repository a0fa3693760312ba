"""``adapter.layers``: ranks, alphas and learning rates by a pattern of layers' names."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import CONFIG, shake_updates, transformer
from diffusers import SD3Transformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_runs import TrainOnce, cut_back
from torch import nn

from simpletune.adapters.files.attach import fold_lora, load_loras
from simpletune.adapters.files.factors import resize_all
from simpletune.adapters.files.header import ADAPTER_METADATA
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.write import write_lora
from simpletune.adapters.methods.layers import ADAPTER, all_layers, outer_layers
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.lora_layers import lora_layers
from simpletune.adapters.methods.targets import TargetedMethod
from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.config.overrides import merge
from simpletune.config.schema import TrainConfig
from simpletune.engine.quant.precision import FP32
from simpletune.models.lora_registry import matches_layer
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_shapes import parameter_shapes
from simpletune.runs import checkpoint
from simpletune.runs.report.run_data import read_run
from simpletune.runs.report.single_run import summary_sentence
from simpletune.stages.step.train_step import lr_ratio
from simpletune.system.options import ConfigError, UserError, union_of
from simpletune.training.train import train

METHODS = union_of(TrainConfig.model_fields["adapter"]).members
LAYERED = [name for name, method in METHODS.items() if issubclass(method, TargetedMethod)]
RANKED = [name for name in LAYERED if "rank" in METHODS[name].model_fields]
SHAPES = parameter_shapes(CONFIG)
SOME = [
    {"pattern": "blocks.0-1", "lr_ratio": 0.5},
    {"pattern": "attn.to_out", "lr_ratio": 0},
    {"pattern": "blocks.1.attn.to_q", "lr_ratio": 2.0},
]
RANKS = [{"pattern": "blocks.0-1", "rank": 2}, {"pattern": "blocks.2.*.to_k", "rank": 0}]


def made(method: str, layers: list[dict[str, Any]], **fields: Any) -> Any:
    """An adapter with small sizes; ``fields`` that it lacks are left out."""
    known = METHODS[method].model_fields
    own = {"rank": 3, "factor": 4, "block_size": 4} | fields
    return METHODS[method](layers=layers, **{key: value for key, value in own.items() if key in known})


@pytest.mark.parametrize(
    ("pattern", "layer", "fits"),
    [
        ("blocks.0-11", "transformer_blocks.11.attn.to_q", True),
        ("blocks.0-11", "transformer_blocks.12.attn.to_q", False),
        ("blocks.0,2,5-7", "transformer_blocks.6.ff.net.2", True),
        ("blocks.0,2,5-7", "transformer_blocks.3.ff.net.2", False),
        ("blocks", "down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_q", False),
        ("transformer_blocks.0", "down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_q", True),
        ("down.0", "down_blocks.0.attentions.1.proj_in", True),
        ("down.1", "down_blocks.0.attentions.1.proj_in", False),
        ("mid", "mid_block.attentions.0.proj_in", True),
        ("blocks.2", "layers.2.attention.to_q", True),  # Z-Image's
        ("single.2", "single_transformer_blocks.2.attn.to_out", True),
        ("blocks.2", "single_transformer_blocks.2.attn.to_out", False),
        ("attn.to_out", "transformer_blocks.3.attn.to_out.0", True),
        ("attn", "transformer_blocks.3.attn2.to_q", False),
        ("attn*.to_[qk]", "transformer_blocks.3.attn2.to_q", True),
        ("3", "transformer_blocks.13.attn.to_q", False),
        ("to_q.*", "transformer_blocks.3.attn.to_q", False),
    ],
)
def test_a_pattern_is_consecutive_words_of_a_name(pattern: str, layer: str, fits: bool) -> None:
    assert matches_layer(pattern, layer) == fits


@pytest.mark.parametrize("method", LAYERED)
def test_layers_train_as_their_entries_say(method: str, tiny_config: dict) -> None:
    """The last entry that matches counts for each field; 0 leaves a layer as it is, its weight the base's."""
    adapter, model = made(method, SOME), transformer(FP32())
    config = validate(tiny_config, "x").model_copy(update={"adapter": adapter})
    adapter.attach(model, 1)
    trained = {name for name, _ in outer_layers(model)}
    assert trained == set(adapter.modules(SHAPES)) and not any("attn.to_out" in name for name in trained)
    assert all(adapter.is_untouched(f"transformer_blocks.{block}.attn.to_out.0") for block in range(4))
    ratios = {name: lr_ratio(config, name) for name, each in model.named_parameters() if each.requires_grad}
    for name, ratio in ratios.items():
        expected = 2.0 if name.startswith("transformer_blocks.1.attn.to_q.") else 0.5 if name[19] in "01" else 1.0
        assert ratio == expected, name
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == adapter.trainable(SHAPES)
    said = f"on {len(trained)} linear layers (attention; adapter.layers leaves out 4), learning rate times 0.5 to 2 in"
    assert said in adapter.describe(SHAPES)


@pytest.mark.parametrize("method", RANKED)
def test_ranks_by_layer_are_counted_attached_and_written(method: str, tmp_path: Path) -> None:
    adapter, model = made(method, RANKS), transformer(FP32())
    adapter.attach(model, 1)
    draw = torch.Generator().manual_seed(2)
    for parameter in (each for each in model.parameters() if each.requires_grad):
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=draw)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == adapter.trainable(SHAPES)
    assert adapter.trainable(SHAPES) < made(method, []).trainable(SHAPES)
    assert "rank 2 to 3" in adapter.describe(SHAPES) and "adapter.layers leaves out 1" in adapter.describe(SHAPES)
    file = adapter.export(model, tmp_path, {})
    read = read_lora(file)
    assert set(read) == set(adapter.modules(SHAPES))
    assert {layer: update.dim for layer, update in read.items()} == {layer: adapter.rank_of(layer) for layer in read}
    again = transformer(FP32())
    load_loras(again, [(file, 1.0)])
    torch.testing.assert_close(output(again), output(model.eval()))


@torch.no_grad()
def output(model: nn.Module) -> torch.Tensor:
    draw = torch.Generator().manual_seed(4)
    z_t, text, pooled = (torch.randn(shape, generator=draw) for shape in ((1, 4, 8, 8), (1, 5, 24), (1, 16)))
    return model(z_t, text, pooled, torch.tensor([400.0])).sample


ALPHAS = [{"pattern": "blocks.0-1", "rank": 2}, {"pattern": "blocks.0", "alpha": 3.0}, {"pattern": "to_q", "rank": 8}]


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_alpha_is_the_layer_s_or_the_adapter_s_or_its_rank(method: str) -> None:
    for fields, expected in (
        ({}, {"0.attn.to_k": 3 / 2, "0.attn.to_q": 3 / 8, "1.attn.to_k": 1.0, "2.attn.to_k": 1.0, "2.attn.to_q": 1.0}),
        ({"alpha": 2.0}, {"0.attn.to_k": 3 / 2, "1.attn.to_k": 1.0, "2.attn.to_k": 2 / 3, "2.attn.to_q": 0.25}),
        ({"alpha": 2.0, "rank_stabilized": True}, {"1.attn.to_k": 2**0.5, "2.attn.to_k": 2 / 3**0.5}),
    ):
        adapter, model = made(method, ALPHAS, **fields), transformer(FP32())
        adapter.attach(model, 1)
        layers = {name.removeprefix("transformer_blocks."): layer for name, layer in all_layers(model)}
        for name, scale in expected.items():
            found = layers[name].scaling[ADAPTER] if method == "lora" else layers[name].scale
            assert found == pytest.approx(scale), name
        ranks = {len(layer.lora_A[ADAPTER].weight) for _, layer in lora_layers(model)}
        assert ranks == ({2, 3, 8} if method == "lora" else set())


def test_diffusers_applies_ranks_and_alphas_by_layer(tmp_path: Path) -> None:
    """Also versions that would take one rank as every alpha: the header has the others."""
    adapter, model = made("lora", ALPHAS), transformer(FP32())
    adapter.attach(model, 1)
    shake_updates(model)
    file = adapter.export(model, tmp_path, {})
    with safe_open(file, "pt") as handle:
        settings = json.loads(handle.metadata()[ADAPTER_METADATA])
    assert set(settings["transformer.rank_pattern"].values()) == {3, 8}
    assert settings["transformer.alpha_pattern"] == settings["transformer.rank_pattern"]
    fresh = SD3Transformer2DModel(**CONFIG)
    fresh.load_state_dict(transformer(FP32()).state_dict())
    before = output(fresh.eval())
    fresh.load_lora_adapter(str(tmp_path), weight_name=file.name, prefix="transformer")
    torch.testing.assert_close(output(fresh), output(model.eval()))
    assert not torch.equal(output(fresh), before)


@pytest.mark.parametrize("layout", ["diffusers", "kohya", "comfy"])
def test_every_layout_merges_and_resizes_what_some_layers_lack(layout: str, tmp_path: Path) -> None:
    """Also where q, k and v are one module of the original model, and have three ranks, or no q."""
    layers = [*ALPHAS, {"pattern": "blocks.2.attn.to_q", "rank": 0}]
    adapter, model = made("lora", layers, targets="all_linear"), transformer(FP32())
    adapter.attach(model, 1)
    shake_updates(model)
    file = write_lora(read_lora(adapter.export(model, tmp_path, {})), tmp_path / "x.safetensors", layout)
    again, expected = transformer(FP32()), output(model.eval())
    load_loras(again, [(file, 1.0)])
    torch.testing.assert_close(output(again), expected)
    fold_lora(again)
    torch.testing.assert_close(output(again), expected)
    resized, _ = resize_all(read_lora(file), 2, None)
    assert {update.rank for update in resized.values()} == {2}


def test_a_lora_without_layers_is_attached_as_before() -> None:
    models = [transformer(FP32()) for _ in range(2)]
    for model, layers in zip(models, ([], [{"pattern": "*", "rank": 3, "lr_ratio": 1.0}]), strict=True):
        made("lora", layers).attach(model, 1)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)


def test_the_limit_of_norms_takes_each_layer_s_scale() -> None:
    adapter, model = made("lora", ALPHAS, max_norm=0.02), transformer(FP32())
    adapter.attach(model, 1)
    shake_updates(model)
    adapter.constrain(model)
    norms = [adapter.scale_of(name) * (b @ a).norm() for name, a, b in adapter.factors(model)]
    torch.testing.assert_close(torch.stack(norms), torch.full((len(norms),), 0.02))


def settings_of(config: dict, layers: list[dict[str, Any]], **changes: Any) -> dict:
    return copy.deepcopy(config) | {"adapter": {"method": "lora", "rank": 4, "layers": layers}} | changes


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{"pattern": "blocks.24-30"}], r"adapter.layers.0.pattern: 'blocks.24-30' matches no .*are blocks\.\d"),
        (
            [{"pattern": "attn"}, {"pattern": "attn.toq"}],
            r"adapter.layers.1.pattern: .*The nearest names are attn.to_q",
        ),
        ([{"pattern": "ff.net"}], "'ff.net' matches only layers without an update. Choose them by adapter.targets"),
        ([{"pattern": "attn", "rank": 0}], r"adapter.layers: leaves out \d+ layers, all that adapter.targets chooses"),
        ([{"pattern": "attn", "rank": -1}], "adapter.layers.0.rank"),
        ([{"pattern": "attn", "lr": 2}], "adapter.layers.0.lr: unknown field"),
        ([{"rank": 2}], "adapter.layers.0.pattern: is required"),
    ],
    ids=str,
)
def test_an_entry_that_means_nothing_is_refused(layers: list[dict], message: str, tiny_config: dict) -> None:
    with pytest.raises((ConfigError, UserError), match=message):
        train(validate(settings_of(tiny_config, layers), "x"))


@pytest.mark.parametrize(("method", "field"), [("lokr", "alpha"), ("loha", "alpha"), ("oft", "rank"), ("oft", "alpha")])
def test_methods_refuse_what_they_do_not_have(method: str, field: str, tiny_config: dict) -> None:
    adapter = {"method": method, "layers": [{"pattern": "attn", field: 2}]}
    with pytest.raises(ConfigError, match=f"adapter.layers.0.{field}: unknown field"):
        validate(tiny_config | {"adapter": adapter}, "x")


def test_one_learning_rate_of_all_gradients_is_refused_with_several(
    tiny_config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizers = union_of(TrainConfig.model_fields["optimizer"]).members
    alone = [name for name, option in optimizers.items() if not option().steps_in_backward]
    for name in alone:
        with pytest.raises(ConfigError, match=f"adapter.layers.1.lr_ratio: optimizer.name {name} computes one"):
            validate(settings_of(tiny_config, SOME[1:], optimizer={"name": name}), "x")
        validate(settings_of(tiny_config, SOME[1:2], optimizer={"name": name}), "x")
    assert alone


def test_another_method_takes_the_entries_over_unless_its_layers_are_patterns(tiny_config: dict) -> None:
    data = settings_of(tiny_config, [{"pattern": "attn", "rank": 2}])
    same, notices, _ = merge(data, ["adapter.method=loha"])
    assert same["adapter"]["layers"] == data["adapter"]["layers"] and notices == []
    other, notices, _ = merge(data, ["adapter.method=partial"])
    assert "layers" not in other["adapter"] and "dropped rank, the entries of layers" in notices[0]
    whole = validate(settings_of(tiny_config, []), "x").model_dump(mode="json", by_alias=True)
    assert validate(merge(whole, ["adapter.method=partial"])[0], "x").adapter.layers == ["*.attn*"]
    changed, _, problems = merge(data, ["adapter.layers.0.rank=3"])
    assert changed["adapter"]["layers"] == [{"pattern": "attn", "rank": 3}] and problems == []


LAYERS = [{"pattern": "attn.to_v", "rank": 2, "alpha": 3.0}, {"pattern": "to_k", "lr_ratio": 0.25}]


def test_a_run_resumes_exactly_and_only_with_the_same_layers(
    tiny_config: dict, train_once: TrainOnce, copy_run: TrainOnce
) -> None:
    data = settings_of(tiny_config, LAYERS, checkpoint={"every": 2})
    config = validate(data, "x")
    whole, halves = train_once(data), copy_run(data)
    summary = json.loads((whole / "summary.json").read_text())
    saved = load_file(checkpoint.checkpoint_folder(whole, 4) / checkpoint.TRAINABLE)
    assert summary["trainable_parameters"] == sum(tensor.numel() for tensor in saved.values())
    assert summary["trainable_parameters"] == config.adapter.trainable(config.model.architecture.known_shapes())
    cut_back(halves, 2)
    others = (LAYERS[:1], "adapter.layers: "), ([LAYERS[0] | {"rank": 4}, LAYERS[1]], "adapter.layers.0.rank: 2 -> 4")
    for layers, words in others:
        with pytest.raises(UserError, match=f"made with other settings:(.|\n)*{words}"):
            train(validate(settings_of(data, layers), "x"), resume="latest")
    again = train(config, resume="latest")
    again_saved = load_file(checkpoint.checkpoint_folder(again, 4) / checkpoint.TRAINABLE)
    torch.testing.assert_close(again_saved, saved, rtol=0, atol=0)
    assert "layers attn.to_v (rank 2, alpha 3.0), to_k (lr_ratio 0.25)" in (whole / "README.md").read_text()
    assert summary_sentence(read_run(whole)).startswith("LoRA r4 (other settings in some layers) on ")


def test_a_step_moves_layers_by_their_ratio(tiny_config: dict) -> None:
    """The first step of Adam moves every number of lora_B by the learning rate."""
    ends = []
    for layers in ([], [LAYERS[1]]):
        data = settings_of(tiny_config, layers, name=f"ratio-{len(ends)}", train={"steps": 1})
        ends.append(load_file(train(validate(data, "x")) / "pytorch_lora_weights.safetensors"))
    for key, plain in ends[0].items():
        if "lora_B" in key and plain.any():
            torch.testing.assert_close(ends[1][key], plain * (0.25 if ".to_k." in key else 1))


def test_check_says_it_in_a_line(tiny_config: dict) -> None:
    said = explain(validate(settings_of(tiny_config, [*LAYERS, {"pattern": "to_out", "rank": 0}]), "x"))
    (line,) = (line for line in said.splitlines() if line.strip().startswith("trains"))
    assert "LoRA of rank 2 to 4, scale 1 to 1.5, on 6 linear layers (attention; adapter.layers leaves out 1)" in line
    assert line.endswith(", learning rate times 0.25 in 1")


def test_sd3_medium_s_parameters_are_their_arithmetic() -> None:
    shapes = parameter_shapes(SD3().files.known_config())
    lora = Lora(layers=[{"pattern": "blocks.0-11", "rank": 4}, {"pattern": "blocks.23", "rank": 0}])
    assert lora.trainable(shapes) == 3072 * 8 * (12 * 4 + 11 * 16)
