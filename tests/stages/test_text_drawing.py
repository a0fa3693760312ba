"""Draw with embeddings and with LoRAs on text encoders: against plain encoders of transformers, and as users run it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import original_layout
import pytest
import torch
from drawn_text import CLIP, CPU, T5_LAYER, comfy_state, encoded, family, of_denoiser, text_updates, update, with_lora
from PIL import Image
from reference import text, text_readers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.write import write_lora
from simpletune.adapters.text.embedding_files import EmbeddingFile, read_embeddings, write_embeddings
from simpletune.adapters.text.encoding import TextEncoding, encode_prompts
from simpletune.adapters.text.side import AppliedText, TextSide
from simpletune.apps.cli.main import main, parse
from simpletune.apps.serve import server
from simpletune.apps.serve.requests import ServedImage
from simpletune.commands.generate.compare import drop_duplicates
from simpletune.models.text_layers import split_text
from simpletune.runs.push import files_of
from simpletune.runs.report.run_data import read_run
from simpletune.runs.report.single_run import single_run_report
from simpletune.runs.text_side import embedding_of, text_side_of, with_embeddings
from simpletune.runs.weights import BASE, Weights, find_weights, lora_weights
from simpletune.runs.weights_names import CheckpointRef, find_named
from simpletune.stages.png import generation_parameters
from simpletune.stages.sample import ImageRequest
from simpletune.stages.text_cache import PromptStore, TextCache
from simpletune.system.options import UserError

PROMPT = "a <dots> picture of a red circle, <dots>"
WIDTHS = {"clip_l": 16, "clip_g": 16, "t5": 32}


def vectors(widths: dict[str, int], count: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(count, width, generator=generator) for name, width in widths.items()}


@torch.no_grad()
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_inputs_equal_a_tokenizer_and_a_table_with_new_tokens(count: int, tiny_pipeline: Path) -> None:
    """Every CLIP and T5 with rows added to its table, run by transformers; the file has no words of its own."""
    found = vectors(WIDTHS, count)
    embeds, pooled = encoded(tiny_pipeline, "sd3", PROMPT, embeddings=(EmbeddingFile("<dots>", "input", found, "sd3"),))
    hidden, pools = [], []
    for number, name in (("", "clip_l"), ("_2", "clip_g")):
        tokenizer = CLIPTokenizer.from_pretrained(tiny_pipeline / f"tokenizer{number}")
        encoder = CLIPTextModelWithProjection.from_pretrained(tiny_pipeline / f"text_encoder{number}")
        ids = text.tokenise(tokenizer, [PROMPT.replace("<dots>", "a" + " a" * (count - 1))], tokenizer.model_max_length)
        plain = text.tokenise(tokenizer, ["a picture of a red circle ,"], tokenizer.model_max_length)[0].tolist()
        new = text_readers.with_rows(encoder, found[name])
        where = [1 + 1, 1 + 1 + count + plain[1:].index(plain[-1]) - 1]  # after "a", and at the end
        for place in where:
            ids[0, place : place + count] = torch.tensor(new)
        output = encoder.eval()(ids, output_hidden_states=True)
        hidden.append(output.hidden_states[-2][0])
        pools.append(output.text_embeds[0])
    clip = torch.cat(hidden, dim=1)
    torch.testing.assert_close(embeds[: len(clip), : clip.shape[1]], clip, rtol=0, atol=1e-5)
    torch.testing.assert_close(pooled, torch.cat(pools), rtol=0, atol=1e-5)
    tokenizer_3 = T5TokenizerFast.from_pretrained(tiny_pipeline / "tokenizer_3")
    t5 = T5EncoderModel.from_pretrained(tiny_pipeline / "text_encoder_3")
    side = TextSide((EmbeddingFile("<dots>", "input", found, "sd3"),))
    encoding = TextEncoding(family(tiny_pipeline, "sd3"), torch.float32, side)
    encoder_3 = encoding.prompts.encoders[2]
    ids = text.tokenise(tokenizer_3, [encoding.expanded(encoder_3, PROMPT)], 256)
    new = text_readers.with_rows(t5, found["t5"])
    places = encoding.rows(encoder_3, PROMPT, side.embeddings[0])
    assert len(places) == 2 * count and [number for _, number in places] == [*range(count), *range(count)]
    for row, number in places:
        ids[0, row] = new[number]
    theirs = t5.eval()(ids).last_hidden_state[0]
    torch.testing.assert_close(embeds[len(clip) :], theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_outputs_stand_at_the_words_places_and_nothing_else_changes(tiny_pipeline: Path) -> None:
    found = vectors(WIDTHS, 2)
    embedding = EmbeddingFile("<dots>", "output", found, "sd3", ("red", "blue"))
    words = PROMPT.replace("<dots>", "red blue")
    (base, base_pooled), (got, pooled) = (
        encoded(tiny_pipeline, "sd3", words),
        encoded(tiny_pipeline, "sd3", PROMPT, embeddings=(embedding,)),
    )
    assert torch.equal(pooled, base_pooled)
    tokenizer = CLIPTokenizer.from_pretrained(tiny_pipeline / "tokenizer")
    ids = text.tokenise(tokenizer, [words], tokenizer.model_max_length)[0].tolist()
    red, blue = (tokenizer(word, add_special_tokens=False).input_ids[0] for word in ("red", "blue"))
    at = [row for row, one in enumerate(ids[:-1]) if (one, ids[row + 1]) == (red, blue)]
    assert len(at) == 2
    changed = sorted({int(row) for row in (got != base).any(dim=1).nonzero()})
    assert changed[:4] == [at[0], at[0] + 1, at[1], at[1] + 1]
    for place in at:
        both = torch.cat([found["clip_l"], found["clip_g"]], dim=1)
        torch.testing.assert_close(got[place : place + 2, : both.shape[1]], both)
    t5 = [row for row in changed if row >= len(ids)]
    torch.testing.assert_close(got[t5], found["t5"].repeat(2, 1))


@torch.no_grad()
def test_t5s_updates_equal_the_merged_encoder(tiny_pipeline: Path, tmp_path: Path) -> None:
    file = write_lora(text_updates(tiny_pipeline, t5=True), tmp_path / "a.safetensors", "kohya")
    embeds, _ = encoded(tiny_pipeline, "sd3", "a red circle", with_lora(file, 0.5))
    merged, _ = text_readers.apply(comfy_state(tiny_pipeline), load_file(file), 0.5)
    t5 = T5EncoderModel.from_pretrained(tiny_pipeline / "text_encoder_3").eval()
    state = {k.removeprefix("t5xxl.transformer."): v for k, v in merged.items() if k.startswith("t5xxl.")}
    t5.load_state_dict(state, strict=False)
    tokenizer = T5TokenizerFast.from_pretrained(tiny_pipeline / "tokenizer_3")
    theirs = t5(text.tokenise(tokenizer, ["a red circle"], 256)).last_hidden_state[0]
    torch.testing.assert_close(embeds[-256:], theirs, rtol=0, atol=1e-5)


def test_two_tokens_and_words_of_other_models(tiny_pipeline: Path) -> None:
    def named(token: str, word: str, widths: dict[str, int], *rest: int) -> EmbeddingFile:
        return EmbeddingFile(token, "input", vectors(widths, *rest), words=(word,))

    one, two = named("<a>", "red", {"clip_l": 16}, 1), named("<b>", "blue", {"clip_g": 16, "t5": 32}, 2, 1)
    both = encoded(tiny_pipeline, "sd3", "a <a> and <b>", embeddings=(one, two))[0]
    assert torch.equal(both, encoded(tiny_pipeline, "sd3", "a <a> and <b>", embeddings=(two, one))[0])
    with pytest.raises(UserError, match="two embeddings are called <a>. Give one of them another name"):
        TextSide((one, one))
    for odd, message in (
        ({"clip_l": 17}, "the vectors of <a> for clip_l have width 17, and the encoders of .* have clip_l 16"),
        ({"clip": 99}, "the vectors of <a> for clip have width 99"),
    ):
        with pytest.raises(UserError, match=message):
            encoded(tiny_pipeline, "sd3", "x", embeddings=(named("<a>", "red", odd, 1),))
    no_t5 = family(tiny_pipeline, "sd3").model_copy(update={"t5": False})
    with pytest.raises(UserError, match="<a> has vectors only for encoders that are not in use"):
        TextEncoding(no_t5, torch.float32, TextSide((named("<a>", "red", {"t5": 32}, 1),)))


def test_a_changed_embedding_or_strength_never_finds_an_old_encoding(
    unet_pipeline: Callable[..., Path], tmp_path: Path
) -> None:
    model, width = family(unet_pipeline("sd15"), "sd15"), {"clip": 32}
    updates = {"text_encoder." + CLIP.format(0, "self_attn.v_proj"): update((32, 32), 3)}
    kinds: dict[str, Callable[[int], TextSide]] = {
        "input": lambda n: TextSide((EmbeddingFile("<dots>", "input", vectors(width, 1, n), words=("red",)),)),
        "output": lambda n: TextSide((EmbeddingFile("<dots>", "output", vectors(width, 1, n), words=("red",)),)),
        "strength": lambda n: TextSide((), (AppliedText("a", updates, 0.5 + n, "same"),)),
        "file": lambda n: TextSide((), (AppliedText("a", updates, 1.0, f"digest {n}"),)),
        "place": lambda n: TextSide((EmbeddingFile("<dots>", "input", vectors(width, 1), words=("red",)),)),
    }
    for name, make in kinds.items():
        prompts = ["a red <dots>", "a <dots> red"] if name == "place" else [PROMPT, PROMPT]
        stores = [PromptStore(model, torch.float32, tmp_path / name, make(n)) for n in (0, 1)]
        counts = [store.fill([prompt], CPU) for store, prompt in zip(stores, prompts, strict=True)]
        found = [store.load(prompt).embeds for store, prompt in zip(stores, prompts, strict=True)]
        expected = encode_prompts(model, [prompts[1]], CPU, torch.float32, stores[1].encoding.side)[prompts[1]].embeds
        assert torch.equal(found[1], expected), name
        if name != "file":
            assert not torch.equal(found[0], found[1]), name
        assert counts == ([1, 0] if name == "output" else [1, 1]), name
        assert stores[1].fill([prompts[1]], CPU) == 0, name


def test_prompts_that_nothing_changes_share_training_s_files(tiny_pipeline: Path, tmp_path: Path) -> None:
    model = family(tiny_pipeline, "sd3").model_copy(update={"t5_length": 16})
    TextCache(model, torch.float32, tmp_path).fill(["a red circle"], CPU)
    side = TextSide((EmbeddingFile("<dots>", "input", vectors(WIDTHS, 1)),))
    assert PromptStore(model, torch.float32, tmp_path, side).fill(["a red circle"], CPU) == 0


@pytest.fixture
def text_config(tiny_config: dict, tmp_path: Path) -> dict:
    """A LoRA, a LoRA on CLIP and a token of two vectors, all trained in a few steps."""
    images = Path(shutil.copytree(tiny_config["data"]["path"], tmp_path / "pictures"))
    for caption in images.glob("*.txt"):
        caption.write_text(f"{caption.read_text().strip()} <dots>")
    embeddings = {"token": "<dots>", "initial": "red", "vectors": 2, "place": "input", "learning_rate": 0.1}
    return tiny_config | {
        "name": "run", "data": {"path": str(images), "resolution": 32}, "train": {"steps": 2},
        "text": {"embeddings": embeddings, "lora": {"rank": 2, "learning_rate": 0.05}},
        "checkpoint": {"every": 1}, "validation": {"prompts": ["a red circle <dots>"], "loss_samples": 0, "steps": 2},
    }  # fmt: skip


def generated(file: Path, *words: object) -> bytes:
    given = ["--prompt", "a red circle <dots>", "--seed", "0", "--steps", "2", "--out", str(file), "--overwrite"]
    assert main(["generate", *given, *map(str, words)]) == 0
    return Image.open(file).convert("RGB").tobytes()


@pytest.mark.slow
def test_a_run_s_embeddings_and_text_lora_are_drawn_with(
    text_config: dict, train_once: Callable[[dict], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_once(text_config)
    (last,) = sorted((run / "samples" / "step-000002").glob("*.png"))
    (first,) = sorted((run / "samples" / "base").glob("*.png"))
    ours = generated(tmp_path / "a.png", "--run", run)
    assert ours == Image.open(last).convert("RGB").tobytes(), "as training's own validation drew it"
    assert generation_parameters(tmp_path / "a.png")["embeddings"] == [["run_dots", "<dots>"]]
    base = generated(tmp_path / "b.png", "--run", run, "--base")
    assert base == Image.open(first).convert("RGB").tobytes() != ours, "the base reads the initial words"
    token = run / "run_dots.safetensors"
    alone = generated(tmp_path / "c.png", "--run", run, "--base", "--embedding", token)
    assert alone not in (ours, base)
    renamed = ["--run", run, "--base", "--embedding", f"{token}:<x>", "--prompt", "a red circle <x>"]
    assert main(["generate", *map(str, renamed), "--seed", "0", "--steps", "2", "--out", str(tmp_path / "d.png")]) == 0
    assert Image.open(tmp_path / "d.png").convert("RGB").tobytes() == alone
    denoiser, _ = split_text(read_lora(run / "pytorch_lora_weights.safetensors"))
    without = write_lora(denoiser, tmp_path / "denoiser.safetensors")
    half = generated(tmp_path / "e.png", "--run", run, "--lora", without, "--embedding", token)
    assert half not in (ours, base, alone)
    assert generated(tmp_path / "f.png", "--run", run, "--lora", f"{run}:0") == alone, "it scales the text encoders too"
    assert main(["compare", str(run), f"{run}@1", f"{run}@2", "--out", str(tmp_path / "compare"), "--steps", "2",
                 "--prompt", "a red circle <dots>", "--scale", "1"]) == 0  # fmt: skip
    figures = json.loads((tmp_path / "compare" / "compare.json").read_text())["models"]
    assert len(figures) == 3 and figures[1]["difference_from_base"] != figures[2]["difference_from_base"]
    assert "have the same weights" in capsys.readouterr().out


def test_a_lora_with_text_keys_draws_like_the_model_with_merged_weights(
    tiny_pipeline: Path, tmp_path: Path, text_config: dict
) -> None:
    updates = {**of_denoiser(tiny_pipeline, "sd3"), **text_updates(tiny_pipeline)}
    both = write_lora(updates, tmp_path / "both.safetensors", "kohya")
    denoiser = write_lora(split_text(updates)[0], tmp_path / "denoiser.safetensors")
    merged = Path(shutil.copytree(tiny_pipeline, tmp_path / "merged"))
    state, _ = text_readers.apply(comfy_state(tiny_pipeline), load_file(both))
    for part, name in (("text_encoder", "clip_l"), ("text_encoder_2", "clip_g")):
        own = {k.removeprefix(f"{name}.transformer."): v for k, v in state.items() if k.startswith(f"{name}.")}
        save_file(own, merged / part / "model.safetensors", {"format": "pt"})
    common = ["--size", "32x32", "--precision", "fp32", "--device", "cpu"]
    ours = generated(tmp_path / "a.png", "--model", tiny_pipeline, "--lora", both, *common)
    theirs = generated(tmp_path / "b.png", "--model", merged, "--lora", denoiser, *common)
    plain = generated(tmp_path / "c.png", "--model", tiny_pipeline, "--lora", denoiser, *common)
    assert plain != ours
    one, other = (torch.frombuffer(bytearray(each), dtype=torch.uint8).int() for each in (ours, theirs))
    assert (one - other).abs().max() <= 1


@pytest.mark.slow
def test_the_server_keys_prompts_by_the_text_side(
    text_config: dict, train_once: Callable[[dict], Path], tmp_path: Path
) -> None:
    run = train_once(text_config)
    service = server.build(parse(["serve", "--run", str(run), "--port", "0", "--device", "cpu"]))
    service.socket.close()
    generator = service.worker._load()
    request = ImageRequest("a red circle <dots>", 0, "", 32, 32, 2, 4.5)
    drawn = {}
    for name, scale in (("run", 1.0), ("run", 0.5), ("base", 1.0), ("run", 1.0)):
        image = ServedImage(request, name, scale)
        generator.encode([image])
        file = tmp_path / f"{name}-{scale}.png"
        file.write_bytes(generator.generate(image, lambda: None))
        pixels = Image.open(file).convert("RGB").tobytes()
        assert drawn.setdefault((name, scale), pixels) == pixels
    assert len(set(drawn.values())) == 3
    for key, words in {("run", 0.5): ["--scale", "0.5"], ("base", 1.0): ["--base"]}.items():
        more = ["--size", "32x32", "--guidance", "4.5"]
        assert generated(tmp_path / "x.png", "--run", run, *words, *more) == drawn[key], key


def test_a_run_of_embeddings_alone_is_a_result(
    text_config: dict, train_once: Callable[[dict], Path], tmp_path: Path
) -> None:
    embeddings = text_config["text"]["embeddings"] | {"place": "output"}
    run = train_once(text_config | {"adapter": {"method": "none"}, "text": {"embeddings": embeddings}})
    (file,) = find_named(str(run)).embeddings
    assert file.name == "run_dots.safetensors" and find_named(f"{run}@1").is_text_alone
    assert main(["inspect", str(run)]) == 0 and main(["inspect", f"{run}@1"]) == 0
    ours = generated(tmp_path / "a.png", "--run", run)
    (last,) = sorted((run / "samples" / "step-000002").glob("*.png"))
    assert ours == Image.open(last).convert("RGB").tobytes()
    assert generated(tmp_path / "b.png", "--run", f"{run}@1") != ours
    with pytest.raises(UserError, match="has embeddings but no LoRA. Use --embedding"):
        lora_weights(str(run))
    assert main(["export", str(run), "--format", "kohya"]) != 0
    kept = drop_duplicates([BASE, find_weights(find_named(f"{run}@1")), find_weights(find_named(f"{run}@2")),
                          find_weights(find_named(str(run)))])  # fmt: skip
    assert [weights.title for weights in kept] == ["base", "run step 1", "run"]
    card = (run / "README.md").read_text()
    assert "Embeddings of `<dots>`" in card and "which only simpletune reads" in card
    assert "load_lora_weights" not in card and "from_pretrained" not in card
    files = files_of(CheckpointRef(run), "me/dots")
    assert "run_dots.safetensors" in files and "pytorch_lora_weights.safetensors" not in files
    assert "run_dots.safetensors" in files_of(CheckpointRef(run, 1), "me/dots")


def test_card_and_report_name_token_and_files(text_config: dict, train_once: Callable[[dict], Path]) -> None:
    run = train_once(text_config)
    card = (run / "README.md").read_text()
    assert "write `embedding:run_dots` for `<dots>`" in card and "- simpletune: write <dots> into the prompt" in card
    assert "LoRA and LoRA of the text encoders and Embeddings of `<dots>`" in card and "load_lora_weights" in card
    report = single_run_report(read_run(run), None)
    (section,) = [section for section in report.sections if section.name == "text-side"]
    rows = {row[0]: row for table in section.tables for row in table.rows}
    assert set(rows) == {"clip_l", "clip_g", "t5", "CLIP-L", "CLIP-G"}
    (read,) = read_embeddings(run / "run_dots.safetensors")
    norms = [float(norm) for norm in rows["clip_l"][3].split(", ")]
    torch.testing.assert_close(torch.tensor(norms), read.vectors["clip_l"].norm(dim=1), rtol=1e-2, atol=0)
    state = original_layout.state_of(Path(text_config["model"]["pretrained"]) / "text_encoder")
    tokenizer = CLIPTokenizer.from_pretrained(Path(text_config["model"]["pretrained"]) / "tokenizer")
    red = state["text_model.embeddings.token_embedding.weight"][tokenizer("red").input_ids[1]]
    cosines = torch.nn.functional.cosine_similarity(read.vectors["clip_l"], red[None].float())
    said = torch.tensor([float(cosine) for cosine in rows["clip_l"][4].split(", ")])
    torch.testing.assert_close(said, cosines, rtol=0, atol=1.1e-3)
    assert (said < 0.999).all()
    assert any("embedding:run_dots" in note for note in section.notes)


def test_what_embedding_names(tmp_path: Path) -> None:
    file = write_embeddings(tmp_path / "a.safetensors", EmbeddingFile("<a>", "input", {"clip": torch.ones(1, 4)}))
    assert embedding_of(str(file)) == (file, None) and embedding_of(f"{file}:<b>") == (file, "<b>")
    assert embedding_of(str(tmp_path)) == (file, None)
    other = write_embeddings(tmp_path / "b.safetensors", EmbeddingFile("<a>", "input", {"clip": torch.zeros(1, 4)}))
    mine = Weights("x", embeddings=((file, None),))
    assert with_embeddings(mine, [(other, None)]).embeddings == ((other, None),), "what is given wins over the run's"
    assert with_embeddings(mine, [(other, "<b>")]).embeddings == ((file, None), (other, "<b>"))
    lora = write_lora({"transformer_blocks.0.attn.to_q": update((8, 8), 1)}, tmp_path / "c" / "lora.safetensors")
    for name, message in {
        f"{file}:": "names no token after the colon",
        str(tmp_path): "has 2 files of embeddings. Name a .safetensors file",
        str(lora): "is not an embedding file",
        str(tmp_path / "none.safetensors"): "--embedding: .*none.safetensors does not exist",
    }.items():
        with pytest.raises(UserError, match=message):
            embedding_of(name)


def test_a_text_lora_for_another_model_is_refused(
    tiny_pipeline: Path, unet_pipeline: Callable[..., Path], tmp_path: Path
) -> None:
    def refused(folder: Path, kind: str, updates: dict, message: str) -> None:
        file = write_lora(updates, tmp_path / "wrong.safetensors", "kohya")
        with pytest.raises(UserError, match=message):
            encoded(folder, kind, "a red circle", text_side_of(Weights("x", lora=file)))

    fc1, layer = ("text_encoder." + CLIP.format(*place) for place in ((0, "mlp.fc1"), (40, "mlp.fc1")))
    refused(tiny_pipeline, "sd3", {fc1: update((64, 99), 1)}, "has 99 inputs and 64 outputs")
    refused(tiny_pipeline, "sd3", {layer: update((64, 16), 1)}, "clip_l has no layer text_model")
    t5 = T5_LAYER.replace("block.0", "block.9")
    refused(tiny_pipeline, "sd3", {t5: update((32, 32), 1)}, "T5 has no layer encoder.block.9")
    sd15 = unet_pipeline("sd15")
    message = "text_encoder_2.*: SD 1.5/2 has no such text encoder"
    refused(sd15, "sd15", text_updates(tiny_pipeline), message)
