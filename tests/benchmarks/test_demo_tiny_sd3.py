"""The untrained tiny SD3 is a true diffusers pipeline folder, the same bytes every time, and trainable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from safetensors.torch import load_file

from benchmarks.tiny_models import networks, tiny_sd3, vocabulary
from simpletune.data.demo import demo_scenes

REAL_CONFIG = Path(__file__).parents[2] / "shared/data/sd3_medium_config"
PROMPTS = [
    "a flat picture of a small red circle on the left, on a mint background",
    "a flat picture of a small blue circle on the left, on a mint background",
    "large green heart, gray background, at the top, painted style",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untrained") / "model"
    tiny_sd3.build(folder)
    return folder


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> StableDiffusion3Pipeline:
    return _load(folder)


def _load(folder: Path) -> Any:
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _encode(pipeline: Any, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        prompt_embeds, _, pooled, _ = pipeline.encode_prompt(prompts, None, None, max_sequence_length=24)
    return prompt_embeds, pooled  # [b, CLIP's length + 24, text width], [b, pooled width]


def test_the_folder_has_the_layout_of_the_real_one(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    assert index.pop("_class_name") == "StableDiffusion3Pipeline" and index.pop("_diffusers_version")
    assert index == {name: list(source) for name, source in tiny_sd3.COMPONENTS.items()}
    assert {path.name for path in folder.iterdir()} == {*tiny_sd3.COMPONENTS, "model_index.json"}
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 10.6e6
    for path in folder.rglob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(path).values()} == {torch.bfloat16}, path


@pytest.mark.data
@pytest.mark.skipif(not REAL_CONFIG.is_dir(), reason=f"{REAL_CONFIG} is not there")
def test_the_index_and_real_tokenizers_are_the_real_ones(tmp_path: Path) -> None:
    real = json.loads((REAL_CONFIG / "model_index.json").read_text())
    assert {name: tuple(real[name]) for name in real if not name.startswith("_")} == tiny_sd3.COMPONENTS
    tiny_sd3.build(tmp_path / "model", tiny_sd3.MINIMAL, tokenizers=REAL_CONFIG)
    pipeline = _load(tmp_path / "model")
    prompt_embeds, pooled = _encode(pipeline, ["A photo of a dog", ""])
    assert prompt_embeds.shape == (2, 77 + 24, 32) and torch.isfinite(prompt_embeds).all()
    assert pipeline.text_encoder.config.vocab_size == 49408
    assert (pipeline.text_encoder.config.eos_token_id, pipeline.tokenizer_2.pad_token) == (49407, "!")
    assert not torch.equal(pooled[0], pooled[1])


def test_same_arguments_same_bytes_and_no_global_state(tmp_path: Path) -> None:
    built = []
    for dtype, seed in (("fp32", 3), ("fp32", 3), ("fp16", 4), ("bf16", 4)):
        state, folder = torch.get_rng_state(), tmp_path / str(len(built))
        tiny_sd3.build(folder, tiny_sd3.MINIMAL, seed=seed, dtype=dtype)  # type: ignore[arg-type]
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(7)  # another state of the global generator
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        built.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
        if seed == 4:  # as fp32, whatever is stored
            pipeline = _load(folder)
            parts = (pipeline.transformer, pipeline.vae, pipeline.text_encoder_3)
            assert {model.dtype for model in parts} == {torch.float32}
        stored = load_file(folder / "transformer/diffusion_pytorch_model.safetensors")
        assert {tensor.dtype for tensor in stored.values()} == {getattr(torch, networks.TORCH_DTYPES[dtype])}  # type: ignore[index]
    a, b, c, _ = built
    assert a == b
    weights = {name for name in a if name.endswith(".safetensors")}
    assert len(weights) == 5 and all(a[name] != c[name] for name in weights)


def test_the_pipeline_draws_offline(pipeline: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    image = np.asarray(pipeline(PROMPTS[0], num_inference_steps=2, generator=generator).images[0])
    assert image.shape == (64, 64, 3) and image.std() > 1.0


def test_prompts_differ_in_every_embedding_and_clip_pools_at_the_end_of_the_text(pipeline: Any) -> None:
    for embeds in _encode(pipeline, PROMPTS):
        one_word = (embeds[0] - embeds[1]).norm() / embeds[0].norm()
        everything = (embeds[0] - embeds[2]).norm() / embeds[0].norm()
        assert 0.04 < one_word < everything and everything > 0.3
    for number in ("", "_2"):
        encoder, tokenizer = (getattr(pipeline, f"{part}{number}") for part in ("text_encoder", "tokenizer"))
        ids = tokenizer(PROMPTS, padding="max_length", return_tensors="pt").input_ids
        assert ids.shape == (3, vocabulary.CLIP_LENGTH) and ids[0, 0] == 0
        with torch.no_grad():
            out = encoder(ids)
        end = [row.tolist().index(1) for row in ids]
        expected = encoder.text_projection(out.last_hidden_state[range(3), end])
        torch.testing.assert_close(out.text_embeds, expected)


def test_each_demo_word_is_one_token_and_no_text_fails(pipeline: Any) -> None:
    for tokenizer, extra in ((pipeline.tokenizer, 2), (pipeline.tokenizer_2, 2), (pipeline.tokenizer_3, 1)):
        assert all(len(tokenizer(word).input_ids) == 1 + extra for word in demo_scenes.words())
        printable = "".join(map(chr, range(0x20, 0x7F)))
        assert tokenizer.unk_token_id not in tokenizer(printable).input_ids[1:-1]
        assert len(tokenizer("漢字 \U0001f600 \x00 ñandú").input_ids) > 3
    assert pipeline.tokenizer.decode(pipeline.tokenizer("Ünlü stars, 42!").input_ids[1:-1]) == "ünlü stars , 4 2 !"
    assert pipeline.tokenizer_3.decode(pipeline.tokenizer_3("A Red star, 42!").input_ids[:-1]) == "A Red star, 42!"


def test_positions_lie_half_a_radian_apart_and_serve_all_buckets(pipeline: Any) -> None:
    transformer = pipeline.transformer
    table = transformer.pos_embed.pos_embed.reshape(32, 32, 192)  # [row, column, hidden], loaded from the file
    steps = torch.arange(32) * 0.5
    torch.testing.assert_close(table[5, :, 0], torch.sin(steps), atol=0.01, rtol=0)  # columns come first
    torch.testing.assert_close(table[:, 5, 96], torch.sin(steps), atol=0.01, rtol=0)
    prompt_embeds, pooled = _encode(pipeline, PROMPTS[:1])
    for height, width in ((4, 4), (8, 8), (32, 32), (16, 64), (64, 16)):
        with torch.no_grad():
            z_t = torch.randn(1, 16, height, width)
            assert transformer(z_t, prompt_embeds, pooled, torch.tensor([500.0])).sample.shape == z_t.shape


def test_lora_has_a_gradient_everywhere_it_can(folder: Path) -> None:
    pipeline = _load(folder)
    transformer = pipeline.transformer.requires_grad_(False)
    names = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    transformer.add_adapter(LoraConfig(r=2, target_modules=[f"attn.{name}" for name in names]))
    z_t = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    prompt_embeds, pooled = _encode(pipeline, PROMPTS[:2])
    velocity = transformer(z_t, prompt_embeds, pooled, torch.tensor([100.0, 900.0])).sample
    assert 0.1 < float(velocity.detach().std()) < 3.0
    velocity.square().mean().backward()
    last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}.attn.add_q_proj"
    without = {
        name.split(".lora_B")[0]
        for name, parameter in transformer.named_parameters()
        if "lora_B" in name and (parameter.grad is None or float(parameter.grad.norm()) < 1e-6)
    }
    assert without == {last}  # the last block drops its text stream, as in SD3


def test_other_tools_infer_the_sizes_and_latents_are_of_unit_size(folder: Path, pipeline: Any) -> None:
    weights = load_file(folder / "transformer/diffusion_pytorch_model.safetensors")
    hidden = weights["pos_embed.proj.weight"].shape[0]
    config = pipeline.transformer.config
    assert hidden // 64 == config.num_layers == config.num_attention_heads == 3  # ComfyUI's rule
    assert weights["pos_embed.pos_embed"].shape[1] == config.pos_embed_max_size**2
    assert pipeline.scheduler.config.shift == 1.0
    drawn = [np.asarray(demo_scenes.render(scene, seed=9)) for scene in demo_scenes.sample_scenes(16, seed=9)]
    pixels = torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2) / 127.5 - 1.0
    with torch.no_grad():
        z_0 = pipeline.vae.encode(pixels).latent_dist.mode()
    z_0 = (z_0 - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor
    assert z_0.shape == (16, 16, 8, 8)
    assert abs(float(z_0.mean())) < 0.1 and float(z_0.std()) == pytest.approx(1.0, abs=0.1)


def test_what_cannot_be_built_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for arguments, message in (
        ({"layers": 2}, "layers 2 and heads 3: ComfyUI infers both"),
        ({"vae_channels": (4, 8, 8, 8)}, "not four multiples of 8"),
        ({"clip_widths": (20, 32)}, "not multiples of 16"),
        ({"t5_width": 64}, "at least 80, the sum of clip_widths. Use 96"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_sd3.Sizes(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype 'int8' is unknown. Use one of fp32, fp16, bf16"):
        tiny_sd3.build(tmp_path / "model", dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        tiny_sd3.build(tmp_path / "model", tokenizers=tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []
