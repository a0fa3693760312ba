"""Stable Diffusion 1.5 and 2: loading, prediction, text and what the family tells, against diffusers' own pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_sd15
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from simpletune.engine.denoiser import Denoiser, model_units
from simpletune.engine.quant.precision import BF16, FP32
from simpletune.models.sd15.sd15_config import HUB_NAMES
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.shared.flops import trained_of
from simpletune.models.text.clip import load_text_model
from simpletune.models.text.prompts import Prompts
from simpletune.system.options import UserError

CPU = torch.device("cpu")
SIZE = (128, 64)
PROMPTS = ["a red disc", "", "a blue square above a green disc!", "disc " * 90]


@pytest.fixture(scope="module", params=["sd15", "sd2"])
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(version: str, unet_pipeline: Callable[..., Path]) -> Path:
    return unet_pipeline(version, whole=True)


@pytest.fixture(scope="module")
def family(folder: Path) -> SD15:
    return SD15(pretrained=str(folder))


@pytest.fixture(scope="module")
def small(version: str, unet_pipeline: Callable[..., Path]) -> SD15:
    """The same with two levels."""
    return SD15(pretrained=str(unet_pipeline(version)))


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> StableDiffusionPipeline:
    return StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def unet(family: SD15) -> Denoiser:
    """Shared by the module's tests: leave it without hooks."""
    return family.load_denoiser(FP32(), CPU)


def inputs(family: SD15) -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "z_t": torch.randn(2, *family.autoencoder.shape(*SIZE)),
        "time": torch.tensor([0.0, 999.0]),
        "conditioning": Conditioning(torch.randn(2, family.text.tokens, family.text.width)),
    }


def test_the_loaded_unet_predicts_what_diffusers_does(
    family: SD15, unet: Denoiser, pipeline: StableDiffusionPipeline
) -> None:
    assert not any(parameter.requires_grad for parameter in unet.parameters())
    given = inputs(family)
    with torch.no_grad():
        ours = family.predict(unet, **given, dtype=torch.float32)
        theirs = pipeline.unet(given["z_t"], torch.tensor([0, 999]), given["conditioning"].embeds).sample
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert ours.std() > 0.1


def test_times_stay_whole_numbers_in_bf16(small: SD15) -> None:
    """bf16 holds 996 and 1000, but no number between them: the embedding of the time has to be computed in fp32."""
    model, seen = small.load_denoiser(BF16(), CPU), list[torch.Tensor]()
    model.time_proj.register_forward_hook(lambda module, args, output: seen.append(output))  # type: ignore[union-attr]
    given = inputs(small) | {"time": torch.tensor([997.0, 998.0])}
    with torch.no_grad():
        assert small.predict(model, **given, dtype=torch.bfloat16).dtype == torch.bfloat16
    expected = model.time_proj(torch.tensor([997, 998]))  # type: ignore[operator]
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=0)
    assert not torch.equal(expected[0], expected[1])


def test_prompts_are_encoded_as_the_pipeline_does(family: SD15, pipeline: StableDiffusionPipeline) -> None:
    prompts = Prompts(family.text, torch.float32)
    (encoder,) = prompts.encoders
    for text, parts in zip(PROMPTS, prompts.encode(encoder, PROMPTS, CPU), strict=True):
        found = prompts.assemble({encoder.name: parts})
        theirs = pipeline.encode_prompt(text, CPU, 1, False)[0][0]
        torch.testing.assert_close(found.embeds, theirs, rtol=0, atol=1e-6)
        assert found.embeds.shape == (family.text.tokens, family.text.width) and found.pooled is None
        assert parts["tokens"] == len(pipeline.tokenizer(text).input_ids)
    assert encoder.name in prompts.fingerprint(encoder)


def test_weights_of_the_text_encoder_are_those_of_the_file(family: SD15, folder: Path) -> None:
    """Published files name the tensors with a prefix that transformers 5 no longer writes."""
    file = load_file(folder / "text_encoder" / "model.safetensors")
    expected = {name.removeprefix("text_model."): tensor for name, tensor in file.items() if "position_ids" not in name}
    ours = load_text_model(family.files.part("text_encoder"), torch.float32, projected=False).state_dict()
    torch.testing.assert_close(dict(ours), expected, rtol=0, atol=0)
    (encoder,) = family.text.encoders
    assert encoder.empty(family.files.part("text_encoder").config()).state_dict().keys() == expected.keys()


def test_latents_are_those_of_the_pipeline(family: SD15, pipeline: StableDiffusionPipeline) -> None:
    vae, pixels = family.autoencoder.load(CPU, torch.float32), torch.rand(1, 3, 64, 128) * 2 - 1
    with torch.no_grad():
        z_0 = family.autoencoder.encode(vae, pixels)
        expected = pipeline.vae.encode(pixels).latent_dist.mode() * 0.18215
        torch.testing.assert_close(z_0, expected, rtol=0, atol=1e-7)
        decoded = pipeline.vae.decode(z_0 / 0.18215).sample
    assert z_0.shape == (1, *family.autoencoder.shape(128, 64))
    shown = family.autoencoder.decode(vae, z_0).detach()
    torch.testing.assert_close(shown, (decoded / 2 + 0.5).clamp(0, 1), rtol=0, atol=1e-6)


def test_version_units_shapes_and_parameters_agree(family: SD15, version: str) -> None:
    assert family.text.width == tiny_sd15.TEXT[version]
    assert (
        family.files.scheduler_config().get("prediction_type", "epsilon")
        == ("epsilon", "v_prediction")[version == "sd2"]
    )
    assert (family.autoencoder.channels, family.architecture.multiple, family.architecture.modulation) == (4, 64, None)
    model = family.architecture.empty_model(family.files.known_config())
    assert model.units == family.architecture.units() and family.architecture.blocks() == len(model_units(model)) > 20
    shapes = family.architecture.known_shapes()
    assert shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert family.architecture.parameter_count() == sum(parameter.numel() for parameter in model.parameters())
    outside = [
        name for name in family.architecture.known_shapes() if not name.startswith(tuple(f"{u}." for u in model.units))
    ]
    assert {name.split(".")[0] for name in outside} == {"conv_in", "time_embedding", "conv_norm_out", "conv_out"}


def test_what_attentions_read(family: SD15, unet: Denoiser) -> None:
    given, shapes = inputs(family), set()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> torch.Tensor:
        shapes.add((query.shape[1], query.shape[2], key.shape[2], query.shape[3]))
        return honest(query, key, value, **more)

    honest = torch.nn.functional.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        family.predict(unet, **given, dtype=torch.float32)
    attentions = family.architecture.attentions(SIZE)
    assert {tuple(shape) for shape in attentions} == shapes and len(attentions) == len(shapes)
    assert attentions[0].queries == 16 * 8


def test_random_weights_depend_on_seed_and_name(small: SD15) -> None:
    family = SD15(pretrained=small.pretrained, init="random")
    state, block = family.load_denoiser(FP32(), CPU, seed=1).state_dict(), "down_blocks.0.resnets.0"
    drawn = [family.architecture.random_tensors(family.files.known_config(), seed, None) for seed in (1, 2)]
    names = [f"{block}.conv1.weight", f"{block}.conv2.weight"]
    first, second = (state[name] for name in names)
    assert torch.equal(first, drawn[0].get(names[0])) and not torch.equal(first, drawn[1].get(names[0]))
    assert 0.005 < second.std() / first.std() < 0.02
    assert state["conv_norm_out.weight"].eq(1).all() and state["conv_out.bias"].eq(0).all()


TRAINED = {
    "sd15": [
        "attn1.to_v",
        "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k",
        "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_q",
        "up_blocks.1.resnets.1.time_emb_proj.bias",
        "up_blocks.1.attentions.0.norm.weight",
        "time_embedding.linear_2.bias",
    ],
    "sd2": ["", "proj_in"],
}


def require_counts(family: SD15, unet: Denoiser, part: str) -> None:
    """The operations of a backward pass to the parameters with a name that contains ``part``."""
    chosen = {name: parameter for name, parameter in unet.named_parameters() if part in name}
    for parameter in chosen.values():
        parameter.requires_grad_(True)
    with sdpa_kernel(SDPBackend.MATH):
        loss = family.predict(unet, **inputs(family), dtype=torch.float32).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
    for parameter in chosen.values():
        parameter.requires_grad_(False).grad = None
    expected = family.flops(trained_of({name: tuple(p.shape) for name, p in chosen.items()}), SIZE, 2)
    assert counter.get_total_flops() == expected.backward > 0, part


def test_operations_are_those_that_torch_counts(version: str, family: SD15, unet: Denoiser, small: SD15) -> None:
    """Of all levels, forward and, for one version, backward; of what a part needs, in two levels."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        family.predict(unet, **inputs(family), dtype=torch.float32)
    assert counter.get_total_flops() == family.flops(trained_of({}), SIZE, 2).forward
    if version == "sd15":
        require_counts(family, unet, "")
    two_levels = small.load_denoiser(FP32(), CPU)
    for part in TRAINED[version]:
        require_counts(small, two_levels, part)


def test_recomputed_operations_are_those_of_the_first_units(family: SD15) -> None:
    first, units = (
        trained_of({"conv_in.bias": family.architecture.known_shapes()["conv_in.bias"]}),
        family.architecture.blocks(),
    )
    counts = [family.flops(first, SIZE, 1, checkpointed=number) for number in (0, 1, 2, units)]
    assert counts[0].recomputed == 0 and [flops.forward for flops in counts] == [counts[0].forward] * 4
    steps = [later.recomputed - first.recomputed for first, later in zip(counts, counts[1:], strict=False)]
    assert min(steps) > 0 and counts[-1].recomputed < counts[0].forward
    shapes = family.architecture.known_shapes()
    rows = 16 * 8
    convolutions = sum(
        2 * rows * 9 * shapes[f"{family.architecture.units()[0]}.conv{n}.weight"][0] ** 2 for n in (1, 2)
    )
    time = 2 * shapes["down_blocks.0.resnets.0.time_emb_proj.weight"][0] * shapes["time_embedding.linear_1.bias"][0]
    assert steps[0] == convolutions + time
    name = "down_blocks.0.attentions.0.proj_in.bias"
    later = trained_of({name: family.architecture.known_shapes()[name]})  # the backward pass ends before the first unit
    recomputed = [family.flops(later, SIZE, 1, checkpointed=number).recomputed for number in (1, 2, units)]
    assert recomputed == [0, steps[1], counts[-1].recomputed - steps[0]]


def test_known_hub_names_need_no_network() -> None:
    counts = {}
    for name, version in HUB_NAMES.items():
        family = SD15(pretrained=name)
        assert list(family.files.problems()) == []
        counts[version] = family.architecture.parameter_count(), family.text.width
        predicts = family.files.scheduler_config()["prediction_type"]
        assert predicts == ("v_prediction" if version == "sd2" else "epsilon")
        assert family.files.known_part("vae").config()["scaling_factor"] == 0.18215
        assert family.files.known_part("text_encoder").config()["hidden_size"] == family.text.width
    assert counts == {
        "sd15": (859_520_964, 768), "sd2": (865_910_724, 1024), "sd2_base": (865_910_724, 1024),
        "sd15_inpainting": (859_535_364, 768), "sd2_inpainting": (865_925_124, 1024),  # 5 x 320 x 9 more
    }  # fmt: skip
    assert SD15(pretrained="someone/finetuned").files.denoiser_config(fetch=False) is None


def test_parts_that_come_from_the_hub() -> None:
    parts = {part.part: part.weights for part in SD15().files.hub_parts()}
    with_weights = {"unet": True, "vae": True, "text_encoder": True}
    assert parts == {"scheduler": False, "tokenizer": False, **with_weights}
    assert {part.part: part.weights for part in SD15(init="random").files.hub_parts()} == {**parts, "unet": False}


def test_a_unet_of_another_family_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "unet" / "config.json").read_text())
    for changes, words in (
        ({"addition_embed_type": "text_time"}, "addition_embed_type 'text_time'.*It seems to be Stable Diffusion XL"),
        (
            {"layers_per_block": 16, "transformer_layers_per_block": [1, 64, 1, 1]},
            r"config.json: the UNet may have 8,448 transformer blocks; the limit is 4,096. Download the model again",
        ),
        ({"block_out_channels": [32, 10**9]}, r"sizes outside the allowed range .*: block_out_channels \[32, 10"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UserError, match=words):
            SD15(pretrained=str(folder), unet=str(tmp_path)).files.known_config()
