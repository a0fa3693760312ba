"""Files of LoKr and LoHa: what a run writes and what others do, against ComfyUI's and Forge's rules by hand."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import lora_readers
import lycoris
import original_layout
import pytest
import torch
import unet_lora_readers
from blocks import DENOISERS, copy_model, predict_velocity, untouched
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from simpletune.adapters.files.attach import fold_lora, load_loras, wrapping_layer
from simpletune.adapters.files.describe import describe, format_description
from simpletune.adapters.files.factors import resize_update
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import LohaUpdate, LokrUpdate, LoraUpdate
from simpletune.adapters.files.write import write_lora
from simpletune.adapters.methods import Adapter
from simpletune.adapters.methods.layers import ADAPTER, all_layers, move_updates, rescale
from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.engine.quant.precision import FP32
from simpletune.models.families import Model
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_shapes import parameter_shapes
from simpletune.models.shared.fused import stacked
from simpletune.runs import checkpoint
from simpletune.stages.step.train_step import attach
from simpletune.system.options import UserError

METHODS: dict[str, dict] = {
    "lokr": {"method": "lokr", "factor": 4, "rank": 1, "targets": "all_linear"},
    "lokr, whole": {"method": "lokr", "factor": 4, "rank": None, "targets": "all_linear"},
    "loha": {"method": "loha", "rank": 2, "targets": "all_linear"},
}
OTHER_UNETS = (("lokr", "sd2"), ("loha", "sd15"), ("lokr, whole", "sd15"))
CPU = torch.device("cpu")
FILE = "pytorch_lora_weights.safetensors"


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def close(actual: Tensor, expected: Tensor) -> None:
    """fp32, 1e-5 of the largest value."""
    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=1e-5 * expected.abs().max().item())


@torch.no_grad()
def velocity(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return predict_velocity(
        model,
        torch.randn(2, 16, 4, 4, generator=generator),
        torch.tensor([0.3, 0.8]),
        torch.randn(2, 9, model.config["joint_attention_dim"], generator=generator),
        torch.randn(2, model.config["pooled_projection_dim"], generator=generator),
        dtype=torch.float32,
    )


def config_of(tiny_config: dict, method: str) -> dict:
    data = copy.deepcopy(tiny_config) | {"adapter": METHODS[method], "checkpoint": {"every": 4}}
    return data | {"optimizer": {"lr": 0.1}}


@functools.cache
def denoiser(option: str) -> nn.Module:
    loaded: nn.Module = TypeAdapter(Model).validate_json(option).load_denoiser(FP32(), CPU)
    return loaded


def base(data: dict) -> nn.Module:
    return copy_model(denoiser(json.dumps({"family": "sd3"} | data["model"])))


def restored(data: dict, run: Path) -> nn.Module:
    """The model as training left it."""
    config, model = resolve_folders(validate(data, "x")), base(data)
    checkpoint.restore(checkpoint.find_checkpoint("latest", run), model, attach(config, model), config.optimizer)
    return model


def with_file(data: dict, *files: tuple[Path, float]) -> Tensor:
    model = base(data)
    load_loras(model, files)
    return velocity(model)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_s_file_and_its_exports_do_what_was_trained_here_and_in_comfyui(
    method: str, tiny_config: dict, train_once, tmp_path: Path, capsys
) -> None:
    """As exported by the run, in the same layout by the command, and as a LoRA of enough rank in every other."""
    data = config_of(tiny_config, method)
    folder = train_once(data)
    trained = restored(data, folder)
    expected = velocity(trained)
    assert (expected - velocity(base(data))).abs().max() > 0.01 * expected.abs().max()
    close(with_file(data, (folder / FILE, 1.0)), expected)

    fold_lora(trained)
    layers = trained.config["num_layers"]
    original = original_layout.mmdit(dict(base(data).state_dict()), layers)
    file = load_file(folder / FILE)
    assert all(key.startswith("lycoris_transformer_blocks_") for key in file)
    patched, lost = lycoris.comfyui(original, file, layers)
    assert lost == []
    for name, tensor in original_layout.mmdit(dict(trained.state_dict()), layers).items():
        close(patched[name], tensor)
    same, lost = lycoris.forge(original, file)
    assert len(lost) == len(lycoris.modules(file)) and all(torch.equal(same[name], original[name]) for name in same)

    run("export", folder, "--format", "lycoris", "--out", tmp_path / "x.safetensors")
    again = load_file(tmp_path / "x.safetensors")
    assert file.keys() == again.keys() and all(torch.equal(again[name], file[name]) for name in again)
    with safe_open(tmp_path / "x.safetensors", "pt") as handle:
        assert handle.metadata()["ss_network_module"] == "lycoris.kohya"
        assert json.loads(handle.metadata()["ss_network_args"]) == {"algo": METHODS[method]["method"]}

    capsys.readouterr()
    for layout in ("diffusers", "kohya", "comfy"):
        out = tmp_path / f"{layout}.safetensors"
        run("export", folder, "--format", layout, "--rank", 999, "--out", out)
        assert "residual 0.000% of the update" in capsys.readouterr().out
        assert all(isinstance(update, LoraUpdate) for update in read_lora(out).values())
        close(with_file(data, (out, 1.0)), expected)
    theirs, lost = lora_readers.apply(original, load_file(tmp_path / "kohya.safetensors"), layers)
    assert lost == []
    for name in patched:
        close(theirs[name], patched[name])


class SD3Transformer2DModel(nn.ModuleDict):
    """A model of one layer, whose class tells its family."""


@pytest.mark.parametrize(
    ("adapter", "alpha"), [({"method": "lokr", "factor": 4, "rank": 3}, 3), ({"method": "loha", "rank": 5}, 5),
                           ({"method": "lokr", "factor": 4, "rank": None}, 1)]
)  # fmt: skip
def test_a_file_s_alpha_is_the_rank(adapter: dict, alpha: int, tmp_path: Path) -> None:
    """Every reader then applies scale 1, whether it divides by a rank or ignores alpha."""
    method = TypeAdapter(Adapter).validate_python(adapter)
    model = SD3Transformer2DModel({"transformer_blocks": nn.ModuleList([nn.ModuleDict({"attn": nn.Module()})])})
    model.transformer_blocks[0]["attn"].to_q = nn.Linear(96, 64)
    method.attach(model, seed=0)
    file = load_file(method.export(model, tmp_path, {}))
    assert {k.rpartition(".")[2] for k in file} == {*method.factor_shapes(64, 96), "alpha"}
    assert [value.item() for key, value in file.items() if key.endswith(".alpha")] == [alpha]
    (parts,) = lycoris.modules(file).values()
    assert lycoris.scale({k: v for k, v in parts.items() if k != "alpha"}, alpha) == 1


def test_the_residual_printed_is_that_of_the_best_lora(tiny_config: dict, train_once, tmp_path: Path, capsys) -> None:
    folder = train_once(config_of(tiny_config, "lokr, whole"))
    out = tmp_path / "two.safetensors"
    run("export", folder, "--format", "kohya", "--rank", 2, "--out", out)
    lost = whole = 0.0
    for update in read_lora(folder / FILE).values():
        s = torch.linalg.svdvals(update.delta().double())
        lost, whole = lost + float(s[2:].square().sum()), whole + float(s.square().sum())
    assert f"LoRA of rank 2 for LoKr: residual {(lost / whole) ** 0.5:.3%} of the update" in capsys.readouterr().out
    assert 0.01 < (lost / whole) ** 0.5 < 1
    found = {layer: update.delta() for layer, update in read_lora(out).items()}
    error = sum(float((found[layer] - u.delta()).square().sum()) for layer, u in read_lora(folder / FILE).items())
    assert (error / whole) ** 0.5 == pytest.approx((lost / whole) ** 0.5, rel=1e-3)


SD3_STATE = {"sample_size": 8, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 2,
             "attention_head_dim": 12, "num_attention_heads": 2, "joint_attention_dim": 24,
             "caption_projection_dim": 24, "pooled_projection_dim": 14, "pos_embed_max_size": 5}  # fmt: skip


def drawn(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) / 3 for name, shape in shapes.items()}


def keyed(module: str, factors: dict[str, Tensor], alpha: float | None = None) -> dict[str, Tensor]:
    found = {f"{module}.{name}": factor for name, factor in factors.items()}
    return found if alpha is None else found | {f"{module}.alpha": torch.tensor(alpha)}


QKV, LAST = "lora_unet_joint_blocks_0_x_block_attn_qkv", "lora_unet_joint_blocks_1_context_block_adaLN_modulation_1"
# Module, shapes of factors, alpha; 24 wide: the fused q, k, v is [72, 24], the last block's modulation of the text
# stream [48, 24].
OTHERS: dict[str, tuple[str, dict[str, tuple[int, int]], float | None]] = {
    "fused, rows of W1 divide": (QKV, {"lokr_w1": (6, 4), "lokr_w2_a": (12, 2), "lokr_w2_b": (2, 6)}, 1.0),
    "fused, rows of W1 do not divide": (QKV, {"lokr_w1": (8, 4), "lokr_w2_a": (9, 2), "lokr_w2_b": (2, 6)}, 3.0),
    "fused, both whole": (QKV, {"lokr_w1": (4, 2), "lokr_w2": (18, 12)}, 1e10),
    "fused, the smaller factor last": (QKV, {"lokr_w1": (18, 12), "lokr_w2": (4, 2)}, None),
    "both decomposed": (
        "lora_transformer_transformer_blocks_0_attn_to_q",
        {"lokr_w1_a": (4, 1), "lokr_w1_b": (1, 3), "lokr_w2_a": (6, 2), "lokr_w2_b": (2, 8)}, 3.0,
    ),
    "only the first decomposed": (
        "lycoris_transformer_blocks_1_ff_net_2", {"lokr_w1_a": (4, 2), "lokr_w1_b": (2, 8), "lokr_w2": (6, 12)}, 5.0,
    ),
    "halves exchanged": (LAST, {"lokr_w1": (6, 4), "lokr_w2": (8, 6)}, None),
    "halves exchanged within a row of W1": (LAST, {"lokr_w1": (3, 4), "lokr_w2": (16, 6)}, None),
    "halves exchanged under diffusers' names": (
        "lycoris_transformer_blocks_1_norm1_context_linear", {"lokr_w1": (6, 4), "lokr_w2": (8, 6)}, None,
    ),
    "loha, fused": (
        QKV, {"hada_w1_a": (72, 2), "hada_w1_b": (2, 24), "hada_w2_a": (72, 2), "hada_w2_b": (2, 24)}, 1.0,
    ),
    "loha, halves exchanged": (
        LAST, {"hada_w1_a": (48, 2), "hada_w1_b": (2, 24), "hada_w2_a": (48, 2), "hada_w2_b": (2, 24)}, None,
    ),
    "loha without alpha": (
        "diffusion_model.joint_blocks.0.x_block.mlp.fc1",
        {"hada_w1_a": (96, 3), "hada_w1_b": (3, 24), "hada_w2_a": (96, 3), "hada_w2_b": (3, 24)}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_files_of_other_tools_are_applied_as_comfyui_does(case: str, tmp_path: Path) -> None:
    module, shapes, alpha = OTHERS[case]
    tensors, file = keyed(module, drawn(shapes), alpha), tmp_path / "x.safetensors"
    save_file(tensors, file)
    state = drawn({**parameter_shapes(SD3_STATE), "pos_embed.pos_embed": (1, 25, 24)})
    expected, lost = lycoris.comfyui(original_layout.mmdit(state, 2), tensors, 2)
    assert lost == []
    for updates in (read_lora(file), {layer: update.as_lora() for layer, update in read_lora(file).items()}):
        merged = state | {f"{k}.weight": state[f"{k}.weight"] + update.delta() for k, update in updates.items()}
        for name, tensor in original_layout.mmdit(merged, 2).items():
            close(tensor, expected[name])
    for layer, update in read_lora(file).items():
        assert isinstance(update, LoraUpdate | LokrUpdate | LohaUpdate)
        if isinstance(update, LoraUpdate):
            continue
        linear = nn.Linear(update.shape[1], update.shape[0], bias=False)
        wrapped = wrapping_layer(update, linear, ADAPTER)
        x = torch.randn(3, update.shape[1])
        close(wrapped(x), linear(x) + x @ update.delta().t())
        close(wrapped.merge(linear.weight.data), linear.weight.data + update.delta())
        assert torch.linalg.matrix_rank(update.delta().double(), rtol=1e-5) <= update.rank == update.as_lora().rank, (
            layer
        )


def test_alpha_of_whole_factors_and_of_peft(tmp_path: Path) -> None:
    factors = drawn({"lokr_w1": (4, 4), "lokr_w2": (6, 6)})
    file = tmp_path / "x.safetensors"
    save_file(keyed("base_model.model.transformer_blocks.0.attn.to_q", factors), file)
    layer = "transformer_blocks.0.attn.to_q"
    assert read_lora(file)[layer].scale == 1
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LOKR", "r": 8, "alpha": 4}))
    update = read_lora(file)[layer]
    assert update.scale == 0.5  # PEFT multiplies by alpha / r whatever the factors are
    assert "applies it at scale 1 instead of 0.5" in format_description(describe(file))
    written = write_lora({layer: update}, tmp_path / "y.safetensors", "lycoris")
    (difference,) = (lycoris.difference(parts) for parts in lycoris.modules(load_file(written)).values())
    close(difference.float(), update.delta())


def test_inspect_says_what_it_is_and_who_reads_it(tiny_config: dict, train_once) -> None:
    lokr, loha = (describe(train_once(config_of(tiny_config, name)) / FILE) for name in ("lokr", "loha"))
    assert lokr["method"] == "LoKr" and loha["method"] == "LoHa"
    assert lokr["family"] == "Stable Diffusion 3 of the unpublished width 64"
    text = format_description(lokr)
    for line in ("what       LoKr, LyCORIS (lycoris_*)", "diffusers  refuses; reads no LoKr: export to diffusers with",
                 "ComfyUI    yes", "Forge      silently nothing", "export to kohya with --rank", "simpletune yes",
                 "rank       1 (4x4 and 16x16) (7 modules)", "scale      1"):  # fmt: skip
        assert line in text, text
    assert lokr["parameters"] == sum(t.numel() for k, t in load_file(lokr["file"]).items() if "alpha" not in k)
    card = Path(lokr["file"]).with_name("README.md").read_text()
    assert "LoKr for" in card and "diffusers does not load LoKr" in card and "load_lora_weights" not in card


def test_what_files_of_lokr_cannot_be(tmp_path: Path) -> None:
    factors = drawn({"lokr_w1": (4, 4), "lokr_w2_a": (6, 2), "lokr_w2_b": (2, 6)})
    module = "lycoris_transformer_blocks_0_attn_to_q"
    for changes, message in (
        ({"lokr_w2_b": None}, "to_q lacks one of its factors"),
        ({"hada_w1_a": torch.ones(2, 2)}, "to_q lacks one of its factors"),
        ({"lokr_w2": torch.ones(6, 6)}, "to_q lacks one of its factors"),
        ({"lokr_w2_b": torch.ones(3, 6)}, "which do not match"),
        ({"lokr_w2_b": torch.ones(2, 6, 3, 3)}, "updates a 3x3 convolution"),
        ({"lokr_w2_b": torch.ones(2)}, "which do not match"),
        ({"lokr_w1": torch.full((4, 4), torch.nan)}, "NaN or infinite"),
        ({"lokr_t2": torch.ones(2, 2, 3, 3)}, "updates a 3x3 convolution"),
        ({"lokr_t2": torch.ones(2, 2)}, "which do not match"),
    ):
        changed = {name: factor for name, factor in (factors | changes).items() if factor is not None}
        save_file(keyed(module, changed), tmp_path / "x.safetensors")
        with pytest.raises(UserError, match=message):
            read_lora(tmp_path / "x.safetensors")
        assert "x.safetensors" in format_description(describe(tmp_path / "x.safetensors"))
    update = {"transformer_blocks.0.attn.to_q": LokrUpdate(factors, 24)}
    with pytest.raises(UserError, match="to_q is LoKr, which equals a LoRA of rank 8. Give --rank 8,.*format lycoris"):
        write_lora(update, tmp_path / "y.safetensors", "kohya")
    with pytest.raises(UserError, match="to_q is LoRA; lycoris files hold LoKr or LoHa"):
        write_lora({layer: u.as_lora() for layer, u in update.items()}, tmp_path / "y.safetensors", "lycoris")
    part = update["transformer_blocks.0.attn.to_q"].split(stacked(*[1] * 8))[1]  # 3 of the 6 rows of W2
    with pytest.raises(UserError, match="only some rows of a fused layer's LoKr"):
        write_lora({"transformer_blocks.0.attn.to_q": part}, tmp_path / "y.safetensors", "lycoris")


def test_with_a_lora_at_strengths_on_one_model(tiny_config: dict, train_once, tmp_path: Path) -> None:
    """Files of three methods together, at strengths, give the sum of their differences, live and merged."""
    data = config_of(tiny_config, "lokr")
    files = [train_once(config_of(tiny_config, name)) / FILE for name in ("lokr", "loha")]
    run("export", files[1].parent, "--format", "diffusers", "--rank", 3, "--out", tmp_path / "lora.safetensors")
    chosen = [(files[0], 0.5), (tmp_path / "lora.safetensors", -1.0), (files[1], 2.0)]
    model = base(data)
    for file, strength in chosen:
        for layer, update in read_lora(file).items():
            weight = model.get_parameter(f"{layer}.weight")
            weight.data += strength * update.delta().view_as(weight)
    expected = velocity(model)
    live = base(data)
    names = load_loras(live, chosen)
    close(velocity(live), expected)
    for strengths, velocities in (((0.0,) * 3, velocity(base(data))), ([s for _, s in chosen], expected)):
        for _, layer in all_layers(live):
            layer.scaling.update({n: s for n, s in zip(names, strengths, strict=True) if n in layer.scaling})
        close(velocity(live), velocities)
    rescale(live, 0.0), move_updates(live, CPU)
    assert not torch.equal(velocity(live), expected)
    rescale(live, 0.5)
    fold_lora(live)
    close(velocity(live), expected)
    assert live.state_dict().keys() == base(data).state_dict().keys()
    words = [f"{file}:{strength}" for file, strength in chosen]
    run("merge", *words, "--base", data["model"]["pretrained"], "--out", tmp_path / "merged")
    merged = SD3().model_copy(update={"transformer": str(tmp_path / "merged")})
    close(velocity(merged.load_denoiser(FP32(), CPU)), expected)
    summed = [pair for pair in chosen if pair[1] > 0]
    run("mix", *[f"{file}:{strength}" for file, strength in summed], "--out", tmp_path / "mix.safetensors")
    close(with_file(data, (tmp_path / "mix.safetensors", 1.0)), with_file(data, *summed))


@pytest.mark.parametrize(
    ("method", "version"),
    [("lokr", "sd15"), ("loha", "sd2"), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_UNETS)],
)
def test_of_a_u_net_comfyui_s_and_kohya_s_names(method: str, version: str, tmp_path: Path) -> None:
    trained, state = DENOISERS[version].build(FP32(), "cpu"), untouched(version, FP32()).state_dict()
    adapter = TypeAdapter(Adapter).validate_python(METHODS[method])
    adapter.attach(trained, 0)
    generator = torch.Generator().manual_seed(1)
    for parameter in trained.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3, generator=generator)
    path = adapter.export(trained, tmp_path, {})
    file, names = load_file(path), unet_lora_readers.comfy_names(state)
    fold_lora(trained)
    expected = trained.state_dict()
    found = dict(state)
    for module, parts in lycoris.modules(file).items():
        found[names[module]] = state[names[module]] + lycoris.difference(parts).reshape(state[names[module]].shape)
    for name, tensor in expected.items():
        close(found[name].float(), tensor)
    assert set(lycoris.modules(file)) <= set(unet_lora_readers.kohya_names(state))
    run("export", path, "--format", "kohya", "--rank", 99, "--out", tmp_path / "lora.safetensors")
    model = DENOISERS[version].build(FP32(), "cpu")
    load_loras(model, [(tmp_path / "lora.safetensors", 1.0)])
    fold_lora(model)
    for name, tensor in model.state_dict().items():
        close(tensor, expected[name])


def test_a_served_lokr_is_switched_and_scaled(tiny_config: dict, train_once) -> None:
    from simpletune.apps.serve.models import Adapters

    data = config_of(tiny_config, "lokr")
    file = train_once(data) / FILE
    model = base(data)
    served = Adapters(model, {"style": file, "half": file}, CPU)
    plainly = velocity(model)
    served.use("style", 1.0)
    close(velocity(model), with_file(data, (file, 1.0)))
    served.use("style", 0.25)
    close(velocity(model), with_file(data, (file, 0.25)))
    served.use("base", 1.0)
    assert torch.equal(velocity(model), plainly)
    assert torch.equal(plainly, velocity(base(data)))


@pytest.mark.parametrize("scale", [1.0, -0.5])
def test_the_svd_of_a_lokr_is_that_of_its_factors(scale: float) -> None:
    update = LokrUpdate(drawn({"lokr_w1": (4, 3), "lokr_w2_a": (6, 2), "lokr_w2_b": (2, 8)}), 24, scale)
    for rank in (1, 3, 6):
        found, error = resize_update(update, rank, None)
        s = torch.linalg.svdvals(update.delta().double())
        assert error == pytest.approx(float(s[rank:].square().sum()), rel=1e-5, abs=1e-9)
        assert float((found.delta() - update.delta()).square().sum()) == pytest.approx(error, rel=1e-3, abs=1e-6)


def test_an_update_of_more_than_full_rank_becomes_a_lora_of_full_rank() -> None:
    """Its matrix times an identity, in either order of sides."""
    wide = LokrUpdate(drawn({"lokr_w1": (2, 2), "lokr_w2": (3, 8)}), 6, 0.5)
    tall = LohaUpdate(drawn({"hada_w1_a": (9, 3), "hada_w1_b": (3, 5), "hada_w2_a": (9, 3), "hada_w2_b": (3, 5)}), 2.0)
    for update in (wide, tall):
        plain = update.as_lora()
        assert plain.rank == min(update.shape) < 9
        torch.testing.assert_close(plain.delta(), update.delta(), rtol=0, atol=0)
