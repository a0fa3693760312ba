"""Hypernetworks: what they compute, their files, and how they are drawn with, against an independent reference."""

from __future__ import annotations

import functools
import io
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_sd15
import torch
from blocks import DENOISERS, UNETS, LateCopies, Setting, copy_model, prepare, unet, unet_loss, untouched
from command_line import SMALL, pixels_of
from diffusers import UNet2DConditionModel
from reference import hypernetwork as reference
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_runs import TrainOnce, cut_back
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from simpletune.adapters.files.attach import load_loras
from simpletune.adapters.files.describe import describe, format_description
from simpletune.adapters.methods.adapter import OUTPUT
from simpletune.adapters.methods.hypernetwork import Hypernetwork
from simpletune.adapters.methods.hypernetwork_files import read_hypernetwork, write_a1111, write_hypernetwork
from simpletune.adapters.methods.hypernetwork_layer import networks_of
from simpletune.adapters.methods.layers import all_layers
from simpletune.adapters.methods.lora import Lora
from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.engine.quant.precision import FP32
from simpletune.engine.tensors import trained_parameters
from simpletune.models.sd15.sd15_config import bundled_configs
from simpletune.models.shared.flops import Flops, count_flops, trained_of
from simpletune.models.shared.parameter_shapes import empty_model
from simpletune.models.unet.unet_shapes import parameter_shapes, unet_units
from simpletune.runs.folder import read_metrics
from simpletune.stages.step.train_step import attach
from simpletune.system.options import ConfigError, UserError
from simpletune.training.train import train

UNITS = len(unet_units(UNETS["sd15"]))
PROMPT = "a glim picture of a large blue heart"


def shaken(model: Any, adapter: Hypernetwork, seed: int = 7) -> dict[int, tuple[dict[str, Tensor], ...]]:
    """Attach networks with values that count, and return their tensors by width, for k and v."""
    adapter.attach(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained_parameters(model).values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return {width: tuple(map(dict, (n.named_parameters() for n in pair))) for width, pair in networks_of(model).items()}


def about(adapter: Hypernetwork) -> dict[str, Any]:
    """The adapter in the web UI's words."""
    structure = {"layer_structure": adapter.layer_structure, "activation_func": adapter.activation}
    dropout = {"use_dropout": adapter.dropout > 0, "last_layer_dropout": True, "activate_output": False}
    return {**structure, **dropout, "is_layer_norm": adapter.layer_norm}


def plain_unet(networks: dict) -> Any:
    """diffusers' own U-Net, whose attention reads what the networks make of its context."""
    model = copy_model(theirs())
    model.set_attn_processor(reference.Attention(networks))
    return model


def by_reference(states: dict, strength: float, words: dict, of: Any = reference.network) -> dict:
    return {
        width: tuple(partial(of, state=state, strength=strength, about=words) for state in pair)
        for width, pair in states.items()
    }


def loss(model: Any, key: int = 0) -> Tensor:
    return unet_loss(model, FP32(), key)


def base() -> Any:
    """The small U-Net, to be read only."""
    return untouched("sd15", FP32())


@functools.cache
def theirs() -> UNet2DConditionModel:
    model = UNet2DConditionModel(**UNETS["sd15"])
    model.load_state_dict(base().state_dict())
    return model.requires_grad_(False)


CASES = {
    "default": Hypernetwork(),
    "all widths": Hypernetwork(widths="all", activation="swish", layer_structure=[1, 1.5, 2, 1]),
    "layer norm": Hypernetwork(widths=[16, 24], activation="leakyrelu", layer_norm=True),
    "linear": Hypernetwork(widths="all", activation="linear"),
    "dropout counts": Hypernetwork(activation="elu", layer_norm=True, dropout=0.5, layer_structure=[1, 2, 2, 1]),
    "no hidden layer": Hypernetwork(activation="tanh", layer_structure=[1, 1]),
    "sigmoid": Hypernetwork(activation="sigmoid"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_unet_with_networks_is_diffusers_whose_attention_reads_other_inputs(case: str) -> None:
    adapter, model = CASES[case], unet("sd15", FP32())
    states = shaken(model, adapter)
    shapes = {name: tuple(p.shape) for name, p in base().named_parameters()}
    trained = trained_parameters(model)
    assert sorted(states) == adapter.chosen(shapes) and (case != "default" or list(states) == [24])
    assert sum(p.numel() for p in trained.values()) == adapter.trainable(shapes)
    model.eval()
    for strength in (1.0, 0.3):
        for _, layer in all_layers(model):
            layer.scaling["default"] = strength
        other = plain_unet(by_reference(states, strength, about(adapter)))
        ours, theirs = loss(model), loss(other)
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
        found = torch.autograd.grad(ours, list(trained.values()))
        tensors = [tensor for pair in states.values() for state in pair for tensor in state.values()]
        assert {id(tensor) for tensor in tensors} == {id(p) for p in trained.values()}
        by_id = dict(zip(map(id, trained.values()), found, strict=True))
        for tensor, gradient in zip(tensors, torch.autograd.grad(theirs, tensors), strict=True):
            near = {"rtol": 1e-3, "atol": 1e-4 * gradient.abs().max().item() + 1e-7}  # a bias of keys has none
            torch.testing.assert_close(by_id[id(tensor)], gradient, **near)
    assert abs(loss(model) - loss(base())) > 1e-4
    with adapter.disabled(model):
        assert loss(model).item() == loss(base()).item()


def test_a_run_starts_near_its_base_with_draws_that_follow_from_the_seed() -> None:
    models = [unet("sd15", FP32()) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        Hypernetwork(layer_norm=True).attach(model, seed)
    one, same, other = (trained_parameters(model) for model in models)
    torch.testing.assert_close(one, same, rtol=0, atol=0)
    for name, parameter in one.items():
        assert parameter.eq(0).all() if name.endswith("bias") else not torch.equal(parameter, other[name])
    weights = torch.cat([p.detach().flatten() for name, p in one.items() if name.endswith("weight")])
    assert weights.std() == pytest.approx(0.01, rel=0.05) and abs(weights.mean()) < 0.001
    assert loss(models[0]).item() == pytest.approx(loss(base()).item(), rel=0.05)


def test_sizes_of_the_real_models() -> None:
    for version, width in (("sd15", 768), ("sd2", 1024)):
        shapes = parameter_shapes(bundled_configs()[version]["unet"])
        assert Hypernetwork().chosen(shapes) == [width]
        assert Hypernetwork().trainable(shapes) == 2 * (4 * width**2 + 3 * width)
        assert sorted(Hypernetwork(widths="all").chosen(shapes)) == sorted([320, 640, 1280, width])
        (problem,) = Hypernetwork(widths=[width, 123]).problems(shapes)
        assert problem.path == "adapter.widths" and "123" in problem.message and f"320, 640, {width}" in problem.message
        assert Hypernetwork().is_untouched("conv_in") and not Hypernetwork().is_untouched("a.attn2.to_k")


def learned(setting: Setting) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of two micro-batches, with dropout."""
    model = unet("sd15", FP32())
    shaken(model, Hypernetwork(widths="all", dropout=0.3))
    prepare(model.train(), setting)
    losses = []
    for micro in range(2):
        torch.manual_seed(micro)
        one = loss(model, micro)
        one.backward()
        losses.append(one.item())
    return losses, {name: p.grad for name, p in trained_parameters(model).items() if p.grad is not None}


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(), marks=pytest.mark.slow),
        pytest.param(Setting(checkpointed=6, host=True), marks=pytest.mark.slow),
        Setting(tuple(range(UNITS)), poison=True, queue=LateCopies),
        pytest.param(Setting((1, 3, 5, 12), poison=True, host=True), marks=pytest.mark.slow),
    ],
    ids=["checkpointed", "inputs on the host", "streamed", "some resident"],
)
def test_levers_give_the_same_bits_with_dropout(setting: Setting) -> None:
    losses, gradients = learned(Setting(checkpointed=0))
    assert len(gradients) == 24 and all(gradient.abs().sum() > 0 for gradient in gradients.values())
    torch.testing.assert_close(learned(setting), (losses, gradients), rtol=0, atol=0)


def test_operations_are_those_that_torch_counts() -> None:
    adapter, model = Hypernetwork(widths="all", layer_norm=True), unet("sd15", FP32())
    adapter.attach(model, 0)

    def counted(shapes: dict) -> Flops:
        empty = empty_model("UNet2DConditionModel", UNETS["sd15"])
        with torch.device("meta"):
            draws = torch.zeros(2, 4, 8, 8), torch.zeros(2), torch.zeros(2, 6, UNETS["sd15"]["cross_attention_dim"])
            return count_flops(empty, lambda: empty(*draws)[0], trained_of(shapes))

    expected = counted({name: tuple(p.shape) for name, p in trained_parameters(model).items()})
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        value = loss(model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        value.backward()
    assert (forward.get_total_flops(), backward.get_total_flops()) == (expected.forward, expected.backward)
    assert expected.forward > counted({}).forward


def test_half_precision_keeps_no_copy_of_a_weight_for_each_attention() -> None:
    adapter, model = Hypernetwork(layer_structure=[1, 16, 1]), unet("sd15", FP32()).bfloat16()
    adapter.attach(model, 0)
    weight = next(p for name, p in trained_parameters(model).items() if name.endswith("linear.2.weight"))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        draws = torch.randn(1, 4, 8, 8).bfloat16(), torch.tensor([1.0]), torch.randn(1, 6, 24).bfloat16()
        model(sample=draws[0], timestep=draws[1], encoder_hidden_states=draws[2])
    assert not [t for t in kept if t.shape == weight.shape and t.dtype == torch.bfloat16]
    assert [t for t in kept if t.data_ptr() == weight.data_ptr()]


def file_of(folder: Path, adapter: Hypernetwork, seed: int, name: str = "h") -> tuple[Path, dict]:
    """Write networks, and return their fp32 tensors too."""
    model = unet("sd15", FP32())
    states = shaken(model, adapter, seed)
    file = write_hypernetwork(networks_of(model), adapter.structure, folder / f"{name}.safetensors", {"made": "here"})
    return file, {w: tuple({n: t.detach() for n, t in s.items()} for s in pair) for w, pair in states.items()}


def test_files_draw_at_a_strength_one_after_another_and_with_a_lora(tmp_path: Path) -> None:
    first, second = Hypernetwork(widths="all", dropout=0.3), Hypernetwork(activation="swish", layer_norm=True)
    (one, states), (two, others) = file_of(tmp_path, first, 1, "one"), file_of(tmp_path, second, 2, "two")
    names = set(load_file(one))
    assert {"24.k.linear.0.weight", "32.v.linear.3.bias"} < names and len(names) == 24
    lora, tuned = unet("sd15", FP32()), unet("sd15", FP32())
    Lora(rank=2).attach(lora, 3)
    for name, parameter in trained_parameters(lora).items():
        parameter.data.normal_(std=0.2 if "lora_B" in name else 1)
    (folder := tmp_path / "lora").mkdir()
    Lora(rank=2).export(lora, folder, {})

    model = unet("sd15", FP32())
    load_loras(model, [(one, 0.7), (folder / OUTPUT, 0.5), (two, 1.2)])
    assert not trained_parameters(model)
    model.train()  # a file's dropout is for training alone
    load_loras(tuned, [(folder / OUTPUT, 0.5)])
    h_1, h_2 = by_reference(states, 0.7, about(first)), by_reference(others, 1.2, about(second))
    both = {w: tuple(lambda x, a=a, b=b: b(a(x)) for a, b in zip(h_1[w], h_2.get(w, h_1[w]), strict=True)) for w in h_1}
    tuned.set_attn_processor(reference.Attention({w: both[w] if w in h_2 else h_1[w] for w in h_1}))
    torch.testing.assert_close(loss(model), loss(tuned), rtol=1e-5, atol=1e-6)
    streamed = unet("sd15", FP32())
    load_loras(streamed, [(one, 0.7), (folder / OUTPUT, 0.5), (two, 1.2)])
    offload = prepare(streamed, Setting((1, 3, 5, 12), checkpointed=0, poison=True, queue=LateCopies))
    networks = {id(p) for name, p in streamed.named_parameters() if ".network." in name and "attn2" in name}
    assert offload is not None and networks.isdisjoint(id(t) for home in offload.homes.values() for t in home.tensors)
    with torch.no_grad():
        assert loss(streamed).item() == loss(model).item()


@pytest.mark.parametrize("case", CASES)
def test_the_form_of_other_tools_is_plain_and_draws_the_same(case: str, tmp_path: Path) -> None:
    adapter = CASES[case]
    file, states = file_of(tmp_path, adapter, 5)
    written = write_a1111(read_hypernetwork(file), tmp_path / "h.pt", "mine", 12, "a base")
    reference.require_safe(written)
    content = torch.load(written, weights_only=True)
    assert {key for key in content if type(key) is int} == set(states)
    words = {key: value for key, value in content.items() if type(key) is not int}
    asked = {**about(adapter), "step": 12, "name": "mine", "sd_checkpoint": None, "sd_checkpoint_name": "a base"}
    dropout = {"use_dropout": False, "last_layer_dropout": False, "weight_initialization": "Normal"}
    assert words == asked | dropout
    x = torch.randn(2, 5, 24)
    for side, state in enumerate(states[24]):
        ours = reference.network(x, state, 0.7, about(adapter))
        torch.testing.assert_close(reference.network(x, content[24][side], 0.7, words), ours)
        if not adapter.layer_norm:
            torch.testing.assert_close(reference.comfyui(x, content[24][side], 0.7, words), ours)


def test_the_reference_refuses_what_the_web_ui_refuses(tmp_path: Path) -> None:
    torch.save({1: 2}, tmp_path / "new.pt")
    with pytest.raises(AssertionError, match="bad file inside"):
        reference.require_safe(tmp_path / "new.pt")
    torch.save({"path": Path()}, tmp_path / "code.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(AssertionError, match="forbidden"):
        reference.require_safe(tmp_path / "code.pt")


def test_damaged_files_are_refused_with_what_is_wrong(tmp_path: Path) -> None:
    file, _ = file_of(tmp_path, Hypernetwork(), 1)
    with safe_open(file, "pt") as handle:
        header, tensors = handle.metadata(), load_file(file)
    field = "simpletune_hypernetwork"

    def refused(change: dict[str, Any], words: str, **structure: object) -> None:
        metadata = {**header, field: json.dumps({**json.loads(header[field]), **structure})}
        kept = {name: t for name, t in {**tensors, **change}.items() if t is not None}
        save_file(kept, tmp_path / "x.safetensors", metadata if structure != {"no": 1} else {})
        with pytest.raises(UserError, match=words):
            read_hypernetwork(tmp_path / "x.safetensors")

    refused({}, "without simpletune_hypernetwork in its header.*Use a file that", no=1)
    for wrong in ({"activation": "no"}, {"layer_structure": [1, 2]}, {"layer_structure": [1, 1e9, 1]}, {"dropout": 1}):
        refused({}, "simpletune_hypernetwork in its header is damaged", **wrong)
    refused({}, r"24.k.linear.0.weight is \[48, 24\], but its structure requires \[72, 24\]", layer_structure=[1, 3, 1])
    refused({"24.v.linear.2.bias": None}, "24.v.linear.2.bias is nothing")
    refused({"odd": torch.zeros(1)}, r"odd is \[1\], but its structure requires nothing")
    refused({"24.k.linear.0.bias": torch.full((48,), torch.nan)}, "24.k.linear.0.bias contains NaN")
    refused({"24.k.linear.0.bias": torch.zeros(48, dtype=torch.int32)}, "int32, which is not supported")
    model = DENOISERS["sd3"].build(FP32(), "cpu")
    with pytest.raises(UserError, match="width 24 does not fit this model: it is no U-Net"):
        load_loras(model, [(file, 1.0)])
    other, _ = file_of(tmp_path, Hypernetwork(widths=[32]), 1, "other")
    wide = UNet2DConditionModel(**UNETS["sd15"] | {"block_out_channels": [16, 16]})
    with pytest.raises(UserError, match="width 32 does not fit this model: its attention reads widths 16, 24"):
        load_loras(wide, [(other, 1.0)])


@pytest.fixture(scope="module")
def model_option(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"family": "sd15", "pretrained": str(tiny_sd15.build(tmp_path_factory.mktemp("sd15") / "pipeline"))}


@pytest.fixture
def trained(model_option: dict, tiny_config: dict) -> dict:
    """A run of two steps with dropout."""
    adapter = {"method": "hypernetwork", "widths": "all", "dropout": 0.3, "dtype": "bf16"}
    data = {"path": tiny_config["data"]["path"], "resolution": 64}
    more = {"name": "style", "model": model_option, "data": data, "adapter": adapter, "checkpoint": {"every": 1}}
    return tiny_config | more | {"train": {"steps": 2}}


def test_a_run_resumes_with_dropout_bit_for_bit(trained: dict, train_once: TrainOnce, copy_run: TrainOnce) -> None:
    whole, run = train_once(trained), cut_back(copy_run(trained), 1)
    train(validate(trained, "again"), resume="latest")
    torch.testing.assert_close(load_file(run / OUTPUT), load_file(whole / OUTPUT), rtol=0, atol=0)
    changes = {"name": "without", "train": {"steps": 1}, "adapter": trained["adapter"] | {"dropout": 0.0}}
    without = train(validate(trained | changes, "without"))
    losses, theirs, plain = ([row["loss"] for row in read_metrics(each)] for each in (run, whole, without))
    assert losses == theirs and theirs[0] != plain[0]


@pytest.mark.slow
def test_the_optimizer_in_the_backward_pass_changes_nothing(trained: dict) -> None:
    data = trained | {"train": {"steps": 2, "clip": "per_parameter"}}
    levers = {"checkpointing": "all", "resident_blocks": 4, "optimizer_in_backward": True}
    runs = [train(validate(data | {"name": f"m{n}", "memory": m}, "x")) for n, m in enumerate([{}, levers])]
    torch.testing.assert_close(*(load_file(run / OUTPUT) for run in runs), rtol=0, atol=0)


def test_a_run_is_drawn_inspected_and_exported(
    trained: dict, train_once: TrainOnce, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_once(trained)
    words = ["--prompt", PROMPT, "--size", "64x64", "--seed", "0", *SMALL]
    images = []
    for weights in (["--run", f"{run}"], ["--run", f"{run}@1"], ["--lora", f"{run / OUTPUT}:0.5"], ["--base"]):
        base = [] if weights[0] == "--run" else ["--model", trained["model"]["pretrained"]]
        assert main(["generate", *base, *weights, *words, "--out", str(tmp_path / "p.png"), "--overwrite"]) == 0
        images.append(pixels_of(io.BytesIO((tmp_path / "p.png").read_bytes())))
    capsys.readouterr()

    card = (run / "README.md").read_text()
    assert "diffusers has no hypernetworks" in card and "--format a1111" in card and "models/loras" not in card
    assert "layer_structure 1.0, 2.0, 1.0" in card

    assert main(["inspect", str(run)]) == 0
    said = capsys.readouterr().out
    for text in ("hypernetwork of structure 1, 2, 1, activation relu, dropout 0.3 in training", "of width 32, 64",
                 "A1111", "HypernetworkLoader", "no; has no hypernetworks"):  # fmt: skip
        assert text in said, text
    found = describe(run / OUTPUT)
    assert found["kind"] == "hypernetwork" and found["widths"] == [32, 64] and found["types"] == {"BF16": 16}
    bent, _ = file_of(tmp_path, Hypernetwork(layer_norm=True), 1)
    assert "wrongly, because it activates the last layer" in format_description(describe(bent))

    pt = tmp_path / "style.pt"
    assert main(["export", str(run), "--format", "a1111", "--out", str(pt)]) == 0
    content = torch.load(pt, weights_only=True)
    assert (content["step"], content["name"], content["sd_checkpoint_name"]) == (2, "style", "pipeline")
    expected = load_file(run / OUTPUT)["32.k.linear.0.weight"].float()
    torch.testing.assert_close(content[32][0]["linear.0.weight"], expected)
    capsys.readouterr()
    for command, says in (
        (["inspect", str(pt)], "is a pickle file"),
        (["generate", "--model", trained["model"]["pretrained"], "--lora", str(pt), *words], "is a pickle file"),
        (["export", str(run), "--format", "a1111", "--rank", "4"], "--rank: the web UI's form"),
        (["export", str(run), "--format", "a1111", "--out", str(tmp_path / "x.safetensors")], "does not end in .pt"),
        (["export", str(run), "--format", "kohya"], "is a hypernetwork.*cannot be merged, mixed, resized"),
        (["resize", str(run), "--rank", "2", "--out", str(tmp_path / "r.safetensors")], "is a hypernetwork"),
        (["mix", f"{run}:1", f"{run}:1", "--out", str(tmp_path / "m.safetensors")], "is a hypernetwork"),
        (["merge", str(run), "--out", str(tmp_path / "merged")], "is a hypernetwork"),
    ):
        assert main(command) == 2
        assert re.search(says, " ".join(capsys.readouterr().err.split())), command
    assert len({*images}) == 4


def test_a_lora_is_not_exported_as_one(tmp_path: Path, capsys: Any) -> None:
    model = unet("sd15", FP32())
    Lora(rank=2).attach(model, 1)
    assert main(["export", str(Lora(rank=2).export(model, tmp_path, {})), "--format", "a1111"]) == 2
    assert "writes hypernetworks" in (said := capsys.readouterr().err) and "--format kohya" in said


def test_options_that_make_no_network_are_refused(tiny_config: dict, model_option: dict) -> None:
    data = tiny_config | {"model": model_option, "data": tiny_config["data"] | {"resolution": 64}}
    for structure in ([1, 2], [2, 1], [1], [1, 0, 1], [1, 99, 1], [1.0] * 20):
        adapter = {"method": "hypernetwork", "layer_structure": structure}
        with pytest.raises(ConfigError, match=r"layer_structure.*begin and end with 1.*Use a list such as \[1, 2, 1\]"):
            validate(data | {"adapter": adapter}, "x")
    config = validate(data | {"adapter": {"method": "hypernetwork"}}, "x")
    assert attach(config, unet("sd15", FP32())).param_groups
