"""Stable Diffusion XL's text: states against diffusers' pipeline, the end of a text, the cache, what trains there."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import original_sdxl
import pytest
import tiny_sdxl
import torch
from diffusers import StableDiffusionXLPipeline
from safetensors.torch import load_file
from tiny_runs import resumed_from
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from benchmarks.tiny_models import networks, tiny_sd3
from simpletune.adapters.text.embedding_files import EmbeddingFile
from simpletune.adapters.text.encoding import TextEncoding
from simpletune.adapters.text.side import TextSide
from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sdxl.sdxl_config import SDXL_NAME
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.shared import family_files
from simpletune.models.text.encoder import TextEncoder
from simpletune.models.text.prompts import Prompts
from simpletune.runs import checkpoint
from simpletune.stages.text_cache import Parts, PromptEntries
from simpletune.system.options import UserError
from simpletune.training.train import train

CPU = torch.device("cpu")
LONG = "circle " * 90
PROMPTS = ["a red circle", "", "a blue square above a green circle!", LONG]
WORD = "<dots>"


@pytest.fixture(scope="module")
def folder(unet_pipeline: Callable[..., Path]) -> Path:
    return unet_pipeline("sdxl")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> StableDiffusionXLPipeline:
    return text_pipeline(folder)


def text_pipeline(folder: Path) -> StableDiffusionXLPipeline:
    return StableDiffusionXLPipeline.from_pretrained(folder, local_files_only=True, unet=None, vae=None)


def encoded(prompts: Prompts, texts: list[str]) -> list[tuple[Tensor, Tensor]]:
    outputs = [[{each.name: parts} for parts in prompts.encode(each, texts, CPU)] for each in prompts.encoders]
    found = [prompts.assemble({**first, **second}) for first, second in zip(*outputs, strict=True)]
    return [(each.embeds, each.pooled) for each in found]  # type: ignore[misc]


def require_diffusers_states(family: SDXL, pipeline: StableDiffusionXLPipeline, texts: list[str]) -> None:
    *found, (empty, pooled_empty) = encoded(Prompts(family.text, torch.float32), [*texts, ""])
    for text, (embeds, pooled) in zip(texts, found, strict=True):
        with torch.no_grad():
            theirs = pipeline.encode_prompt(text, device=CPU, negative_prompt="")
        assert torch.equal(embeds, theirs[0][0])
        assert torch.equal(empty, theirs[1][0])
        # a matrix-vector product, whose last bits depend on where its weight lies in the file that diffusers maps
        torch.testing.assert_close((pooled, pooled_empty), (theirs[2][0], theirs[3][0]), rtol=0, atol=2e-6)


def test_states_are_the_pipelines(folder: Path, pipeline: StableDiffusionXLPipeline) -> None:
    require_diffusers_states(SDXL(pretrained=str(folder)), pipeline, PROMPTS)


def test_none_is_zeros_unless_the_folder_says_the_empty_text(folder: Path, tmp_path: Path) -> None:
    """As in diffusers' pipeline, whose own default is that of a folder without the setting, and of single files."""
    index = json.loads((folder / "model_index.json").read_text())
    assert SDXL(pretrained=str(folder)).text.steered_from(None) is None and index["force_zeros_for_empty_prompt"]
    for setting in (False, None):
        (tmp_path / "model_index.json").write_text(json.dumps(index | {"force_zeros_for_empty_prompt": setting}))
        assert SDXL(pretrained=str(tmp_path)).text.steered_from(None) == ""
    del index["force_zeros_for_empty_prompt"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "bare").mkdir()
    for name in (str(tmp_path), str(tmp_path / "bare"), "illustrious.safetensors", SDXL_NAME):
        assert SDXL(pretrained=name).text.steered_from(None) is None
        assert [SDXL(pretrained=name).text.steered_from(each) for each in ("", "blurry")] == ["", "blurry"]
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(UserError, match="model_index.json cannot be read"):
        SDXL(pretrained=str(tmp_path)).text.steered_from(None)


def test_a_name_on_the_hub_is_asked_for_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model_index.json").write_text('{"force_zeros_for_empty_prompt": false}')
    asked: list[tuple[object, ...]] = []
    found: list[Path | None] = [tmp_path, None]  # None: it has no such file, or cannot be reached
    monkeypatch.setattr(family_files, "files_folder", lambda *given: asked.append(given) or found.pop(0))
    family = SDXL(pretrained="owner/tuned", revision="v2")
    assert [family.text.steered_from(None) for _ in range(2)] == ["", None]
    assert asked == [("owner/tuned", ("model_index.json",), "v2")] * 2


@pytest.mark.parametrize(("family", "default"), [("sd3", ""), ("sd15", ""), ("sdxl", None)])
def test_a_configuration_without_a_negative_prompt_has_that_of_its_family(family: str, default: str | None) -> None:
    data = {"name": "x", "data": {"path": "demo:pictures"}, "model": {"family": family}}
    found = validate(data, "x", needs_data=False, needs_model=False)
    assert found.validation.negative_prompt == default and found.model.text.steered_from("") == ""
    said = validate(data | {"validation": {"negative_prompt": ""}}, "x", needs_data=False, needs_model=False)
    assert said.validation.negative_prompt == ""


@pytest.mark.data
def test_real_tokenizers_pad_as_their_encoders_were_trained(real_data: Path, folder: Path, tmp_path: Path) -> None:
    """With encoders of the real vocabulary, whose configurations name 2 as the end of a text, as the published do."""
    for number, width in (("", tiny_sdxl.CLIP_L), ("_2", tiny_sdxl.CLIP_G)):
        source = real_data / "sdxl_config" / f"tokenizer{number}"
        with tiny_sd3.seeded(0, 0):
            clip: Any = networks.clip(source, width, "gelu")
        model = clip if number else clip.text_model
        model.save_pretrained(tmp_path / f"text_encoder{number}")
        rewrite(tmp_path / f"text_encoder{number}" / "config.json", eos_token_id=2, bos_token_id=0, pad_token_id=1)
        (tmp_path / f"tokenizer{number}").symlink_to(source)
    for part in ("unet", "vae", "scheduler", "model_index.json"):
        (tmp_path / part).symlink_to(folder / part)
    family = SDXL(pretrained=str(tmp_path))
    prompts = Prompts(family.text, torch.float32)
    first, second = (prompts.tokens(each, ["a photo of a dog"]).ids[0].tolist() for each in prompts.encoders)
    assert first[:7] == second[:7] and first[6] == 49407, "start, five tokens, end"
    assert set(first[7:]) == {49407} and set(second[7:]) == {0}
    theirs = text_pipeline(tmp_path)
    require_diffusers_states(family, theirs, ["a photo of a dog!", LONG])


def rewrite(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def with_new_token(folder: Path, target: Path, number: str, vector: Tensor, config_end: int | None) -> Any:
    """An encoder and its tokenizer with a token whose id is larger than the end's, as textual inversion saves them."""
    tokenizer = CLIPTokenizer.from_pretrained(folder / f"tokenizer{number}")
    tokenizer.add_tokens(WORD)
    tokenizer.save_pretrained(target / f"tokenizer{number}")
    kind = CLIPTextModelWithProjection if number else CLIPTextModel
    model = kind.from_pretrained(folder / f"text_encoder{number}")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.get_input_embeddings().weight.data[-1] = vector
    model.config.eos_token_id = tokenizer.eos_token_id if config_end is None else config_end
    model.save_pretrained(target / f"text_encoder{number}")
    return kind.from_pretrained(target / f"text_encoder{number}").eval()


def test_the_end_of_a_text_is_not_moved_by_a_token_of_a_larger_id(folder: Path, tmp_path: Path) -> None:
    """With ``eos_token_id`` 2, transformers itself takes the pooled output at the largest id: at the new token."""
    vector = torch.randn(tiny_sdxl.CLIP_G, generator=torch.Generator().manual_seed(3))
    for number, own in (("", vector[: tiny_sdxl.CLIP_L]), ("_2", vector)):
        published = with_new_token(folder, tmp_path, number, own, 2)
    for part in ("unet", "vae", "scheduler", "model_index.json"):
        (tmp_path / part).symlink_to(folder / part)
    prompts, text = Prompts(SDXL(pretrained=str(tmp_path)).text, torch.float32), f"a {WORD} red circle"
    ids = prompts.tokens(prompts.encoders[1], [text]).ids
    end = ids[0].tolist().index(prompts.tokenizer(prompts.encoders[1]).eos_token_id)
    assert int(ids.argmax()) == 2 < end == 5
    with torch.no_grad():
        output = published(ids)
        wanted = published.text_projection(output.last_hidden_state[0, end])
    ((_, pooled),) = encoded(prompts, [text])
    torch.testing.assert_close(pooled, wanted, rtol=0, atol=1e-6)
    assert (output.text_embeds[0] - pooled).abs().max() > 0.1


def test_embeddings_in_both_encoders_keep_the_end_in_its_place(folder: Path, tmp_path: Path) -> None:
    """Our words in place of a token give what encoders give whose tables have grown by it, with the end by a mask."""
    generator, text = torch.Generator().manual_seed(4), f"a {WORD} red circle"
    vectors = {"clip_l": torch.randn(1, tiny_sdxl.CLIP_L, generator=generator)}
    vectors["clip_g"] = torch.randn(1, tiny_sdxl.CLIP_G, generator=generator)
    family = SDXL(pretrained=str(folder))
    side = TextSide(embeddings=(EmbeddingFile(WORD, "input", vectors, ("blue",), {}),))
    encoding = TextEncoding(family, torch.float32, side)
    for encoder, number in zip(family.text.encoders, ("", "_2"), strict=True):
        grown = with_new_token(folder, tmp_path, number, vectors[encoder.name][0], None)
        tokenizer = CLIPTokenizer.from_pretrained(tmp_path / f"tokenizer{number}")
        ids = tokenizer(text, padding="max_length", max_length=77, return_tensors="pt").input_ids
        with torch.no_grad():
            output = grown(ids, output_hidden_states=True)
        (ours,) = encoding.encode(encoder, [text], CPU)
        torch.testing.assert_close(ours["hidden"], output.hidden_states[-2][0], rtol=0, atol=1e-6)
        if encoder.projected:
            torch.testing.assert_close(ours["pooled"], output.text_embeds[0], rtol=0, atol=1e-6)


def test_states_that_sd3_has_are_found_again_and_never_without_a_pooled_output(
    tiny_pipeline: Path, tmp_path: Path
) -> None:
    """Both read the same files; SD3 also needs CLIP-L's pooled output, which SDXL's entries do not have."""
    sd3 = SD3(pretrained=str(tiny_pipeline), t5=False)
    source = {"sd3": Prompts(sd3.text, torch.float32), "sdxl": Prompts(SDXL().text, torch.float32)}
    source["sdxl"].part = sd3.files.part  # type: ignore[method-assign]
    encoded = list[str]()

    def fill(name: str, place: Path) -> dict[str, Parts]:
        prompts = source[name]

        def outputs(encoder: TextEncoder, texts: list[str]) -> Iterator[Parts]:
            encoded.extend(f"{name}: {encoder.name}" for _ in texts)
            return prompts.encode(encoder, texts, CPU)

        entries = PromptEntries(place, prompts, prompts.encoders)
        entries.fill({"a red circle": "a red circle"}, outputs, "prompt", CPU)
        return entries.load("a red circle")

    for first, second, again in (("sd3", "sdxl", []), ("sdxl", "sd3", ["sd3: clip_l"])):
        encoded.clear()
        for name in (first, second):
            found = source[name].assemble(fill(name, tmp_path / first))
            assert found.embeds.isfinite().all() and len(found.pooled) == {"sd3": 32, "sdxl": 16}[name]
        assert encoded == [f"{first}: clip_l", f"{first}: clip_g", *again]
    a, b = (source["sdxl"].assemble(fill("sdxl", tmp_path / first)) for first in ("sd3", "sdxl"))
    torch.testing.assert_close(a.tensors(), b.tensors(), rtol=0, atol=0)


def test_both_encoders_train(folder: Path, tiny_config: dict) -> None:
    """All but CLIP-L's last layer, whose output the model does not read."""
    text = {"lora": {"rank": 2}, "embeddings": {"token": WORD, "initial": "circle", "place": "input"}}
    data = copy.deepcopy(tiny_config) | {"model": {"family": "sdxl", "pretrained": str(folder)}, "text": text}
    data["data"] |= {"resolution": 64, "prompt": f"a {WORD} circle", "max_upscale": None, "caption_dropout": 0.1}
    data["train"] |= {"steps": 1}
    data["checkpoint"] |= {"every": 1}
    run = train(validate(data, "text"))
    weights = load_file(checkpoint.checkpoint_folder(run, 1) / checkpoint.TRAINABLE)
    vectors = load_file(next(run.glob("*dots*.safetensors")))
    assert {name: tensor.shape for name, tensor in vectors.items()} == {"clip_l": (1, 32), "clip_g": (1, 48)}
    factors = {name: bool(tensor.any()) for name, tensor in weights.items() if "clip_" in name and "lora_B" in name}
    assert len(factors) == 2 * 2 * 4
    assert {name for name, moved in factors.items() if not moved} == {
        name for name in factors if "clip_l" in name and "layers.1." in name
    }


@pytest.mark.slow
def test_a_lora_of_the_second_encoder_alone_is_trained_resumed_exported_and_merged(
    folder: Path, tiny_config: dict, tmp_path: Path
) -> None:
    """adapter.method none and text.lora.encoders clip_g: nothing of the UNet or of CLIP-L is in any file."""
    text = {"lora": {"rank": 2, "encoders": ["clip_g"], "learning_rate": 0.01}}
    data = tiny_config | {"model": {"family": "sdxl", "pretrained": str(folder)}, "text": text}
    data |= {"adapter": {"method": "none"}, "data": data["data"] | {"resolution": 64, "max_upscale": None}}
    data |= {"train": {"steps": 2}, "checkpoint": {"every": 1, "keep_last": "all"}, "name": "whole"}
    whole = train(validate(data, "whole"))
    layers = tiny_sdxl_layers(folder)

    result = load_file(whole / "pytorch_lora_weights.safetensors")
    assert {name.split(".", 1)[0] for name in result} == {f"lora_te2_{name.replace('.', '_')}" for name in layers}
    assert all(tensor.any() for tensor in result.values())  # lora_up, too, which starts at zero

    resumed = resumed_from(whole, data, 1)
    require_equal_tensors(load_file(resumed / "pytorch_lora_weights.safetensors"), result)

    exported = tmp_path / "exported.safetensors"
    assert main(["export", str(whole), "--format", "diffusers", "--out", str(exported)]) == 0
    assert {name.split(".lora", 1)[0] for name in load_file(exported)} == {f"text_encoder_2.{name}" for name in layers}

    theirs = StableDiffusionXLPipeline.from_pretrained(folder, local_files_only=True)
    base = original_sdxl.write(folder, tmp_path / "base.safetensors")
    theirs.load_lora_weights(str(whole), weight_name="pytorch_lora_weights.safetensors")
    theirs.fuse_lora(components=["text_encoder_2"])
    theirs.unload_lora_weights()
    fused = Path(shutil.copytree(folder, tmp_path / "fused"))
    theirs.text_encoder_2.save_pretrained(fused / "text_encoder_2")
    before, wanted = load_file(base), load_file(original_sdxl.write(fused, tmp_path / "wanted.safetensors"))
    for number, source in enumerate((whole, exported)):
        merged = tmp_path / f"merged-{number}.safetensors"
        assert main(["merge", str(source), "--base", str(base), "--out", str(merged)]) == 0
        found = load_file(merged)
        changed = {name for name in found if not torch.equal(found[name], before[name])}
        assert changed and changed == {name for name in wanted if not torch.equal(wanted[name], before[name])}
        assert all(name.startswith("conditioner.embedders.1.") for name in changed)
        torch.testing.assert_close(found, wanted)


def tiny_sdxl_layers(folder: Path) -> set[str]:
    """The names of CLIP-G's attention layers."""
    model = CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2")
    wanted = ("q_proj", "k_proj", "v_proj", "out_proj")
    return {name for name, _ in model.named_modules() if name.rpartition(".")[2] in wanted}


def require_equal_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
