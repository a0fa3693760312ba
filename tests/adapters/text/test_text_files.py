"""Files of embeddings and keys of text encoders: what this package writes, what other tools read of it, and theirs."""

from __future__ import annotations

import pickle
from pathlib import Path

import drawn_text
import original_layout
import pytest
import tiny_sd15
import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline
from drawn_text import CLIP, comfy_state, encoded, of_denoiser, text_updates, update, with_lora
from reference import text_readers
from safetensors.torch import load_file, save_file
from torch import Tensor

from simpletune.adapters.files.describe import describe, format_description
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import LokrUpdate, LoraUpdate, OftUpdate
from simpletune.adapters.files.write import text_tensors_of, write_lora
from simpletune.adapters.text.embedding_files import EmbeddingFile, embeddings_in, read_embeddings, write_embeddings
from simpletune.apps.cli.main import main
from simpletune.models import text_layers
from simpletune.models.shared.lora_encoders import LoraEncoder
from simpletune.models.text_layers import text_layer
from simpletune.system.options import UserError

pipeline = drawn_text.pipeline


@pytest.fixture(scope="module")
def sd15(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd15.build(tmp_path_factory.mktemp("sd15") / "pipeline")


@pytest.mark.parametrize("layout", ["diffusers", "kohya", "comfy"])
def test_comfyui_applies_every_layout_to_sd3s_encoders(layout: str, pipeline: Path, tmp_path: Path) -> None:
    updates = text_updates(pipeline, t5=layout != "diffusers")
    file = write_lora({**of_denoiser(pipeline, "sd3"), **updates}, tmp_path / "a.safetensors", layout)
    state = comfy_state(pipeline)
    patched, unread = text_readers.apply(state, load_file(file), 0.7)
    changed = {name for name in state if not torch.equal(patched[name], state[name])}
    assert len(changed) == len(updates) and not [key for key in unread if "te" in key.partition("_unet")[0]][2:]
    for layer, one in updates.items():
        encoder, _, name = layer.partition(".")
        comfy = {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5xxl"}[encoder]
        weight = f"{comfy}.transformer.{name}.weight"
        torch.testing.assert_close(patched[weight] - state[weight], 0.7 * one.delta(), rtol=0, atol=1e-5)
    again = read_lora(file)
    assert set(again) == {*updates, *of_denoiser(pipeline, "sd3")}
    for layer, one in updates.items():
        torch.testing.assert_close(again[layer].delta_for(torch.empty(0)), one.delta(), rtol=0, atol=1e-6)


def test_sd15s_only_encoder_has_kohyas_unnumbered_keys(sd15: Path, tmp_path: Path) -> None:
    updates = {**of_denoiser(sd15, "sd15"), **text_updates(sd15)}
    file = write_lora(updates, tmp_path / "a.safetensors", "kohya")
    text = [key for key in load_file(file) if not key.startswith("lora_unet_")]
    assert len(text) == 9 and all(key.startswith("lora_te_text_model_encoder_layers_1_") for key in text)
    _, unread = text_readers.apply(comfy_state(sd15), load_file(file))
    assert all(key.startswith("lora_unet_") for key in unread)
    version = {"ss_base_model_version": "sd_v1"}
    alone = write_lora(text_updates(sd15), tmp_path / "b.safetensors", "kohya", None, version)
    assert set(load_file(alone)) == set(text)


@pytest.mark.parametrize("first", ["diffusers", "kohya", "comfy"])
@pytest.mark.parametrize("other", ["diffusers", "kohya", "comfy"])
def test_conversions_there_and_back_give_the_same_bytes(first: str, other: str, pipeline: Path, tmp_path: Path) -> None:
    updates = {**of_denoiser(pipeline, "sd3"), **text_updates(pipeline)}
    if other == "diffusers":  # which folds the scale
        updates = {layer: one.folded() for layer, one in updates.items()}
    start = write_lora(updates, tmp_path / "a.safetensors", first)
    there, back = tmp_path / "b.safetensors", tmp_path / "c.safetensors"
    assert main(["export", str(start), "--format", other, "--out", str(there)]) == 0
    assert main(["export", str(there), "--format", first, "--out", str(back)]) == 0
    one, two = load_file(start), load_file(back)
    assert set(one) == set(two) and len(one) > 8
    assert all(torch.equal(two[key], one[key]) for key in one)


CLIP_L, CLIP_G, T5 = f"text_encoder.{CLIP}", f"text_encoder_2.{CLIP}", "text_encoder_3.encoder.block"


@pytest.mark.parametrize(
    ("module", "layer"),
    {
        "text_encoder.text_model.encoder.layers.3.self_attn.to_q": CLIP_L.format(3, "self_attn.q_proj"),
        "text_encoder_2.encoder.layers.3.mlp.fc2": CLIP_G.format(3, "mlp.fc2"),
        "lora_te_text_model_encoder_layers_11_self_attn_out_proj": CLIP_L.format(11, "self_attn.out_proj"),
        "lora_te2_text_projection": "text_encoder_2.text_projection",
        "lora_te3_encoder_block_23_layer_1_DenseReluDense_wi_0": f"{T5}.23.layer.1.DenseReluDense.wi_0",
        "clip_g.transformer.text_model.encoder.layers.0.mlp.fc1": CLIP_G.format(0, "mlp.fc1"),
        "text_encoders.t5xxl.transformer.encoder.block.1.layer.0.SelfAttention.o": f"{T5}.1.layer.0.SelfAttention.o",
        "lora_te1_text_model_encoder_layers_0_mlp_q_proj": None,
        "lora_te1_text_model_encoder_layers_0_self_attn_fc1": None,
        "lora_te3_text_model_encoder_layers_0_mlp_fc1": None,
        "text_encoder.encoder.block.0.layer.0.SelfAttention.q": None,
        "transformer_blocks.0.attn.to_q": None,
    }.items(),
)
def test_every_spelling_of_a_layer(module: str, layer: str | None) -> None:
    assert text_layer(module) == layer


def test_a_key_of_a_text_encoder_that_matches_no_layer_is_refused(pipeline: Path, tmp_path: Path) -> None:
    file = write_lora(text_updates(pipeline), tmp_path / "a.safetensors", "kohya")
    state = load_file(file)
    state |= {key.replace("mlp_fc1", "mlp_fc9"): tensor.clone() for key, tensor in state.items() if "mlp_fc1" in key}
    for tensors, words in (
        (state, "6 of 24 keys match no layer of a text encoder: lora_te1.*mlp_fc9"),
        ({"text_encoder_3.x.lora_A.weight": V["t5"]}, "match no layer of a text encoder"),
    ):
        save_file(tensors, file)
        with pytest.raises(UserError, match=words):
            read_lora(file)


def outputs(pipe: object, prompt: str) -> list[Tensor]:
    """What a pipeline of diffusers makes of a prompt with its text encoders."""
    found = pipe.encode_prompt(prompt, prompt_2=prompt, prompt_3=prompt, do_classifier_free_guidance=False)  # type: ignore[attr-defined]
    return [found[0], found[2]]


@torch.no_grad()
def test_diffusers_sd3_pipeline_encodes_with_the_file_as_we_do(pipeline: Path, tmp_path: Path) -> None:
    updates = {**of_denoiser(pipeline, "sd3"), **text_updates(pipeline)}
    updates |= {"text_encoder." + CLIP.format(0, "self_attn.v_proj"): update((16, 16), 30, rank=4)}  # another rank
    file = write_lora(updates, tmp_path / "a.safetensors", "diffusers")
    pipe = StableDiffusion3Pipeline.from_pretrained(pipeline, local_files_only=True)
    base = outputs(pipe, "a red circle")
    pipe.load_lora_weights(str(file))
    theirs = outputs(pipe, "a red circle")
    ours = encoded(pipeline, "sd3", "a red circle", with_lora(file))
    for one, other, plain in zip(ours, theirs, base, strict=True):
        torch.testing.assert_close(one, other[0, : len(one)] if one.ndim > 1 else other[0], rtol=0, atol=1e-5)
        assert (other - plain).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("layout", ["kohya", pytest.param("diffusers", marks=pytest.mark.slow)])
def test_diffusers_sd15_pipeline_encodes_with_the_file_as_we_do(layout: str, sd15: Path, tmp_path: Path) -> None:
    updates = {**of_denoiser(sd15, "sd15"), **text_updates(sd15)}
    file = write_lora(updates, tmp_path / "a.safetensors", layout)
    pipe = StableDiffusionPipeline.from_pretrained(sd15, local_files_only=True, safety_checker=None)
    (base, _) = pipe.encode_prompt("a red circle", "cpu", 1, False)
    pipe.load_lora_weights(str(file))
    (theirs, _) = pipe.encode_prompt("a red circle", "cpu", 1, False)
    (ours, _) = encoded(sd15, "sd15", "a red circle", with_lora(file))
    torch.testing.assert_close(ours, theirs[0], rtol=0, atol=1e-5)
    assert (theirs - base).abs().max() > 1e-2


@torch.no_grad()
def test_diffusers_sd15_pipeline_reads_the_embedding_as_we_do(sd15: Path, tmp_path: Path) -> None:
    vectors = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    embedding = EmbeddingFile("<dots>", "input", {"clip": vectors}, "sd15", ("red", "circle"))
    file = write_embeddings(tmp_path / "a_dots.safetensors", embedding)
    assert torch.equal(text_readers.embedding(load_file(file), "clip_l", 32), vectors)
    pipe = StableDiffusionPipeline.from_pretrained(sd15, local_files_only=True, safety_checker=None)
    pipe.load_textual_inversion(str(file))
    (theirs, _) = pipe.encode_prompt("a <dots> picture", "cpu", 1, False)
    (read,) = read_embeddings(file)
    (ours, _) = encoded(sd15, "sd15", "a <dots> picture", embeddings=(read,))
    torch.testing.assert_close(ours, theirs[0], rtol=0, atol=1e-5)


V = {"clip_l": torch.randn(2, 16), "clip_g": torch.randn(2, 32), "t5": torch.randn(3, 64)}
LAYOUTS = {
    "ComfyUI": ({"clip_l": V["clip_l"], "clip_g": V["clip_g"], "t5xxl": V["t5"]}, "input", V),
    "OneTrainer": ({"clip_l": V["clip_l"], "clip_g": V["clip_g"], "t5": V["t5"]}, "input", V),
    "kohya": ({"emb_params": V["clip_l"]}, "input", {"clip": V["clip_l"]}),
    "OneTrainer, SD 1.5": ({"emp_params": V["clip_l"]}, "input", {"clip": V["clip_l"]}),
    "A1111": ({"string_to_param.*": V["clip_l"]}, "input", {"clip": V["clip_l"]}),
    "diffusers": ({"<cat>": V["clip_l"].half()}, "input", {"clip": V["clip_l"].half().float()}),
    "one vector": ({"<cat>": V["clip_l"][0]}, "input", {"clip": V["clip_l"][:1]}),
    "outputs": ({"clip_l_out": V["clip_l"], "t5_out": V["t5"]}, "output", {"clip_l": V["clip_l"], "t5": V["t5"]}),
    "bundled": ({"bundle_emb.<cat>.clip_l": V["clip_l"]}, "input", {"clip_l": V["clip_l"]}),
    "bundled, A1111": ({"bundle_emb.my.cat.string_to_param.*": V["clip_l"]}, "input", {"clip": V["clip_l"]}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_embeddings_is_read(layout: str, tmp_path: Path) -> None:
    tensors, place, expected = LAYOUTS[layout]
    file = tmp_path / "cat.safetensors"
    save_file(tensors, file)
    (found,) = read_embeddings(file)
    token = {"one vector": "<cat>", "diffusers": "<cat>", "bundled": "<cat>", "bundled, A1111": "my.cat"}.get(layout)
    assert (found.token, found.place) == (token or "cat", place)
    assert set(found.vectors) == set(expected)
    assert all(torch.equal(found.vectors[name], expected[name]) for name in expected)
    (renamed,) = read_embeddings(file, "<other>")
    assert renamed.token == "<other>"
    about = describe(file)
    (one,) = about["embeddings"]
    norms = {name: each["norms"] for name, each in one["encoders"].items()}
    for name, each in expected.items():
        torch.testing.assert_close(torch.tensor(norms[name]), each.norm(dim=1), rtol=1e-5, atol=0)
    assert one["token"] in format_description(about) and "simpletune" in format_description(about)


@pytest.mark.parametrize("place", ["input", "output"])
def test_what_is_written_is_read_again_and_is_the_same_file(place: str, tmp_path: Path) -> None:
    embedding = EmbeddingFile("<dots>", place, V, "sd3", ("red", "dots"), {"simpletune_step": "4"})  # type: ignore[arg-type]
    file = write_embeddings(tmp_path / "run_dots.safetensors", embedding)
    (read,) = read_embeddings(file)
    assert (read.token, read.place, read.family, read.words) == ("<dots>", place, "sd3", ("red", "dots"))
    assert read.metadata["simpletune_step"] == "4" and "<dots>" in read.metadata["modelspec.usage_hint"]
    again = write_embeddings(tmp_path / "again" / "run_dots.safetensors", read)
    assert again.read_bytes() == file.read_bytes()
    assert embeddings_in(tmp_path) == [file]
    state = load_file(file)
    for name, key in (("clip_l", "clip_l"), ("clip_g", "clip_g"), ("t5", "t5xxl")):
        theirs = text_readers.embedding(state, key, V[name].shape[1])
        if place == "input":
            assert torch.equal(theirs, V[name]), "ComfyUI finds it under its key, T5's under t5xxl alone"
        else:
            assert key not in state, "ComfyUI must not take outputs for inputs of this encoder by their key"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"clip_l": V["clip_l"], "odd": V["clip_g"]}, "keys of no known embedding: odd"),
        ({"clip_l": V["clip_l"], "clip_l_out": V["clip_l"] + 1}, "for the inputs and for the outputs"),
        ({"clip_l": torch.zeros(2, 3, 16)}, r"clip_l is F32 \[2, 3, 16\]; vectors must be"),
        ({"clip_l": torch.zeros(2, 16, dtype=torch.int32)}, "clip_l is I32"),
        ({"clip_l": torch.full((1, 16), torch.nan)}, "clip_l contains NaN or infinite values"),
        ({"bundle_emb.a.clip_q": V["clip_l"]}, "keys of no known embedding: bundle_emb.a.clip_q"),
    ],
)
def test_damaged_and_strange_embeddings_are_refused(tensors: dict, message: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=message):
        read_embeddings(tmp_path / "a.safetensors")


def test_a_header_whose_length_begins_like_a_pickle_is_read(tmp_path: Path) -> None:
    """1152 bytes are 80 04 00 ... in the file, which is how a pickle of protocol 4 begins."""
    begun = set()
    for filler in range(900, 1100, 8):
        save_file({"clip_l": V["clip_l"]}, tmp_path / "a.safetensors", {"filler": "x" * filler})
        begun.add((tmp_path / "a.safetensors").read_bytes()[:2])
        assert len(read_embeddings(tmp_path / "a.safetensors")) == 1
    assert b"\x80\x04" in begun


@pytest.mark.parametrize("name", ["a.pt", "a.bin", "a.safetensors"])
def test_pickles_are_never_opened(name: str, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "opened",)  # type: ignore[return-value]

    (tmp_path / name).write_bytes(pickle.dumps({"string_to_param": {"*": Trap()}}))
    for read in (read_embeddings, describe):
        with pytest.raises(UserError, match="is a pickle file .*never opened because.*Get the .safetensors version"):
            read(tmp_path / name)
    assert not (tmp_path / "opened").exists()


def test_a_lora_with_bundled_embeddings_is_still_a_lora(pipeline: Path, tmp_path: Path) -> None:
    file = write_lora(of_denoiser(pipeline, "sd3"), tmp_path / "a.safetensors")
    save_file({**load_file(file), "bundle_emb.one.clip_l": V["clip_l"], "bundle_emb.two.clip_g": V["clip_g"]}, file)
    assert set(read_lora(file)) == set(of_denoiser(pipeline, "sd3"))
    assert [each.token for each in read_embeddings(file)] == ["one", "two"]
    with pytest.raises(UserError, match="holds 2 embeddings .one, two., which cannot all be <x>"):
        read_embeddings(file, "<x>")
    assert [each["token"] for each in describe(file)["bundled"]] == ["one", "two"]
    assert "token      one" in format_description(describe(file))


def test_inspect_says_which_tools_drop_text_layers(pipeline: Path, sd15: Path, tmp_path: Path) -> None:
    def tools(updates: dict[str, LoraUpdate], layout: str, **metadata: str) -> dict[str, str]:
        about = describe(write_lora(updates, tmp_path / "a.safetensors", layout, None, metadata))
        return {tool["tool"]: tool["loads"] for tool in about["tools"]} | about["text_encoders"]

    text, both = text_updates(pipeline), {**of_denoiser(pipeline, "sd3"), **text_updates(pipeline)}
    counts = {"CLIP-L": 3, "CLIP-G": 3}
    every = {"diffusers": "yes", "ComfyUI": "yes", "Forge": "yes", "simpletune": "yes"}
    nothing = "silently nothing"
    assert tools(both, "diffusers") == {**every, **counts, "Forge": nothing}
    assert tools(both, "kohya") == {**every, **counts, "diffusers": nothing}
    assert tools(text, "diffusers") == {**every, **counts}
    assert tools(text, "kohya") == {**every, **counts, "diffusers": nothing}
    assert tools(text, "comfy") == {**every, **counts, "diffusers": nothing, "Forge": nothing}
    both = {**of_denoiser(sd15, "sd15"), **text_updates(sd15)}
    assert tools(both, "kohya") == {**every, "CLIP-L": 3}
    without = {layer: one for layer, one in both.items() if "out_proj" not in layer}
    assert tools(without, "kohya") == {**every, "diffusers": "partly", "CLIP-L": 2}
    with pytest.raises(UserError, match="T5, whose LoRA diffusers does not load. Use --format kohya"):
        write_lora(text_updates(pipeline, t5=True), tmp_path / "c.safetensors", "diffusers")


def test_mix_and_resize_take_text_encoders_along(pipeline: Path, tmp_path: Path) -> None:
    updates = {**of_denoiser(pipeline, "sd3"), **text_updates(pipeline)}
    one = write_lora(updates, tmp_path / "a.safetensors")
    other = write_lora(text_updates(pipeline, rank=3), tmp_path / "b.safetensors", "kohya")
    out = tmp_path / "mixed.safetensors"
    assert main(["mix", f"{one}:0.5", f"{other}:2", "--out", str(out)]) == 0
    found, second = read_lora(out), text_updates(pipeline, rank=3)
    assert set(found) == set(updates)
    for layer, each in found.items():
        expected = 0.5 * updates[layer].delta() + (2 * second[layer].delta() if layer in second else 0)
        torch.testing.assert_close(each.delta_for(torch.empty(0)), expected, rtol=0, atol=1e-5)
    assert main(["resize", str(out), "--rank", "5", "--out", str(tmp_path / "c.safetensors")]) == 0
    for layer, each in read_lora(tmp_path / "c.safetensors").items():
        assert each.rank == 5
        expected = found[layer].delta_for(torch.empty(0))
        torch.testing.assert_close(each.delta_for(torch.empty(0)), expected, rtol=0, atol=1e-5)


def test_merge_changes_the_encoders_of_a_single_file(pipeline: Path, tmp_path: Path) -> None:
    single = original_layout.write(pipeline, tmp_path / "single.safetensors")
    updates = {**of_denoiser(pipeline, "sd3"), **text_updates(pipeline, t5=True)}
    file = write_lora(updates, tmp_path / "a.safetensors", "kohya")
    out = tmp_path / "merged.safetensors"
    assert main(["merge", f"{file}:0.5", "--base", str(single), "--out", str(out)]) == 0
    before, after = load_file(single), load_file(out)
    state = {name.removeprefix("text_encoders."): t for name, t in before.items() if name.startswith("text_encoders.")}
    patched, _ = text_readers.apply(state, load_file(file), 0.5)
    for name, tensor in patched.items():
        torch.testing.assert_close(after[f"text_encoders.{name}"], tensor, rtol=0, atol=1e-6)
    assert sum(not torch.equal(after[name], before[name]) for name in before) == len(updates)
    words = ["merge", str(file), "--base", str(pipeline), "--out", str(tmp_path / "folder")]
    assert main(words) != 0, "the folder holds only the denoiser"
    assert main([*words, "--denoiser-only"]) == 0
    bare = original_layout.write(pipeline, tmp_path / "bare.safetensors", "transformer vae")
    assert main(["merge", str(file), "--base", str(bare), "--out", str(tmp_path / "no.safetensors")]) != 0


def test_a_text_layers_encoder_is_the_familys_or_one_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two language models and CLIP-L in folders of one name; the language models' layers have the same names."""

    def inside(rest: str) -> str | None:
        return rest if rest.startswith("model.layers.") else None

    readers = {tool: ("comfy",) for tool in ("diffusers", "ComfyUI")}
    qwen3, qwen2 = (
        LoraEncoder("text_encoder", title, "", (name,), inside, readers)
        for title, name in (("Qwen3", "qwen3_4b"), ("Qwen2.5-VL", "qwen25_7b"))
    )
    language = "text_encoder.model.layers.3.self_attn.q_proj"
    clip, t5 = (
        "text_encoder.text_model.encoder.layers.0.mlp.fc1",
        "text_encoder_3.encoder.block.0.layer.1.DenseReluDense.wo",
    )
    monkeypatch.setattr(text_layers, "ENCODERS", (*text_layers.ENCODERS, qwen3, qwen2))
    assert text_layers.encoders_in([language, t5], [qwen2]) == "Qwen2.5-VL and T5"
    assert text_layers.encoders_in([t5, language, clip]) == "CLIP-L and T5 and Qwen3"
    assert text_layers.layers_by_title([language, clip, clip], [qwen3]) == {"Qwen3": 1, "CLIP-L": 2}
    for encoder in (qwen3, qwen2):
        module = f"text_encoders.{encoder.comfy[0]}.transformer.model.layers.3.self_attn.q_proj"
        key = text_layers.text_key(language, "down", "comfy", single=True, encoders=[encoder])
        assert key == f"{module}.lora_A.weight"
        update = LoraUpdate(torch.ones(2, 8), torch.ones(8, 2), 1.0)
        assert f"{module}.lora_A.weight" in text_tensors_of({language: update}, "comfy", True, encoders=[encoder])
        assert text_layer(module) == language
    assert text_layers.text_key(clip, "down", "kohya", single=True).startswith("lora_te_text_model_")
    assert text_layers.text_key(clip, "down", "kohya").startswith("lora_te1_text_model_")


def test_updates_of_text_layers_that_no_tool_reads_are_refused_with_a_remedy() -> None:
    layer = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    oft = OftUpdate(torch.zeros(2, 4, 4), None)
    with pytest.raises(UserError, match=rf"{layer} is {oft.kind}, which is written for the denoiser only. Merge it"):
        text_tensors_of({layer: oft}, "lycoris")
    factors = {"lokr_w1": torch.ones(2, 2), "lokr_w2_a": torch.ones(3, 1), "lokr_w2_b": torch.ones(1, 2)}
    lokr = LokrUpdate(factors, 6, 0.25)
    remedy = f"rank {lokr.rank}. Give --rank {lokr.rank}, or a smaller one.*--format lycoris"
    for layout in ("kohya", "diffusers", "comfy"):
        with pytest.raises(UserError, match=remedy):
            text_tensors_of({layer: lokr}, layout)
    found = text_tensors_of({layer: lokr}, "lycoris", dtype=torch.bfloat16)
    saved, alpha = lokr.file_factors()
    assert {key.rpartition(".")[2] for key in found} == {*saved, "alpha"}
    assert len({key.rpartition(".")[0] for key in found}) == 1
    for key, tensor in found.items():
        name = key.rpartition(".")[2]
        assert tensor.dtype == (torch.float32 if name == "alpha" else torch.bfloat16)
        torch.testing.assert_close(tensor.float(), torch.tensor(alpha).float() if name == "alpha" else saved[name])
