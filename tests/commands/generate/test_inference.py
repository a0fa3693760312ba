"""Drawing: batches, starting pictures, LoRAs that take turns on one base, the levers, the comparison's page."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import parsed
from PIL import Image
from safetensors.torch import save_file
from tiny_encoders import write_clip

from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.lora_layers import lora_layers
from simpletune.apps.cli.generate import compare_arguments, generate_arguments
from simpletune.apps.cli.main import parse
from simpletune.apps.serve.server import _served_models
from simpletune.commands.generate import session as session_module
from simpletune.commands.generate.compare import compare, latent_distance
from simpletune.commands.generate.generate import build_requests, choose_weights, generate
from simpletune.commands.generate.session import GenerationSession, GenerationSpeed, SharedBase, open_session
from simpletune.config.schema import TrainConfig
from simpletune.data.sources.folder import Folder
from simpletune.engine.compile import compile_blocks
from simpletune.engine.memory import Memory
from simpletune.engine.quant.precision import FP32, Int8, Nf4
from simpletune.estimate import job_estimate
from simpletune.models.families import FAMILIES
from simpletune.models.objectives.flow import Flow
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.shared.autoencoder import Autoencoder
from simpletune.runs.weights import BASE, Weights, combine, load_weights
from simpletune.runs.weights_names import split_scale
from simpletune.stages.png import generation_parameters
from simpletune.stages.sample import ImageRequest, Sampler, batches, encode_inputs, noises
from simpletune.stages.text_cache import TextCache
from simpletune.system.gpus import Card
from simpletune.system.options import UserError
from simpletune.system.stage_timer import StageTimer

CPU = torch.device("cpu")
PROMPTS = ("a red disc", "a blue star", "")
SIZE = (32, 32)
flow_sampler = partial(Sampler, objective=Flow())


@pytest.fixture(scope="module")
def model(tiny_pipeline: Path) -> SD3:
    return SD3(pretrained=str(tiny_pipeline), t5_length=8)


@pytest.fixture(scope="module")
def text(model: SD3, shared_cache: Path) -> TextCache:
    cache = TextCache(model, torch.float32, shared_cache)
    cache.fill([*PROMPTS, "blurry"], CPU)
    return cache


@pytest.fixture(scope="module")
def config(model: SD3, shared_cache: Path) -> TrainConfig:
    output = {"runs": str(shared_cache / "runs"), "profiles": str(shared_cache / "p"), "cache": str(shared_cache)}
    whole = TrainConfig(name="x", device="cpu", data=Folder(path="."), precision=FP32(), model=model)
    return whole.model_copy(update={"output": whole.output.model_copy(update=output)})


@pytest.fixture(scope="module")
def loras(model: SD3, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three LoRAs with values: on attention, another there, and one on the modulation too."""
    made = {}
    for seed, (name, targets) in enumerate({"a": "attention", "b": "attention", "all": "all_linear"}.items()):
        transformer = model.load_denoiser(FP32(), CPU)
        adapter = Lora(rank=2, targets=targets)
        adapter.attach(transformer, seed)
        torch.manual_seed(seed)
        for parameter in transformer.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.2)
        folder = tmp_path_factory.mktemp("loras") / name
        folder.mkdir()
        made[name] = adapter.export(transformer, folder, {})
    return made


def requests(count: int = 3, **changes: object) -> list[ImageRequest]:
    made = [ImageRequest(PROMPTS[n % 2], n, "blurry", *SIZE, 4, 3.0) for n in range(count)]
    return [replace(request, **changes) for request in made]


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_picture_does_not_depend_on_its_batch(guidance: float, config, text) -> None:
    transformer, _ = load_weights(config, BASE, CPU, {SIZE, (64, 32)})
    some = requests(5, guidance=guidance)
    some[2] = replace(some[2], width=64)  # another size: it goes alone
    assert batches(some, 3) == [[0, 1, 3], [4], [2]]
    samplers = (flow_sampler(transformer, config.model, FP32(), batch_size=size) for size in (1, 3))
    alone, batched = (sampler.latents(some, text.load) for sampler in samplers)
    assert batched[2].shape == (1, 16, 4, 8)
    for a, b in zip(alone, batched, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    assert latent_distance(alone[0], alone[1]) > 0.1


def test_a_starting_picture_gives_what_diffusers_gives(config, text, tiny_pipeline: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusion3Img2ImgPipeline

    values = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    Image.fromarray(values).resize((48, 32)).save(tmp_path / "start.png")
    pipeline = StableDiffusion3Img2ImgPipeline.from_pretrained(tiny_pipeline, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    transformer, _ = load_weights(config, BASE, CPU, {(48, 32)})
    for strength in (0.3, 0.75, 1.0):
        request = ImageRequest(PROMPTS[0], 5, "blurry", 48, 32, 6, 3.0, tmp_path / "start.png", strength)
        start = encode_inputs(pipeline.vae, config.model, [request])[0].z_0
        sampler = flow_sampler(transformer, config.model, FP32())
        ours = sampler.denoise([request], [text.load(PROMPTS[0])], [text.load("blurry")], start)
        theirs = pipeline(
            prompt=PROMPTS[0], negative_prompt="blurry", image=Image.open(tmp_path / "start.png"), strength=strength,
            width=48, height=32, num_inference_steps=6, guidance_scale=3.0, max_sequence_length=8,
            generator=torch.Generator("cpu").manual_seed(5), output_type="latent",
        ).images  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_one_guidance_difference_for_all_steps_saves_passes_and_changes_little(config, text) -> None:
    transformer, _ = load_weights(config, BASE, CPU, {SIZE})
    rows: list[int] = []
    transformer.register_forward_pre_hook(lambda _, a, k: rows.append(len(k["hidden_states"])), with_kwargs=True)
    samplers = (flow_sampler(transformer, config.model, FP32(), reuse_guidance=steps) for steps in (1, 2))
    exact, lossy = (sampler.latents(requests(1), text.load)[0] for sampler in samplers)
    assert rows == [2, 2, 2, 2, 2, 1, 2, 1]
    assert 0 < latent_distance(exact, lossy) < 0.3 * float(exact.std())


@pytest.mark.parametrize(
    ("memory", "precision"),
    [
        ({}, Int8(compute="fp32")),
        pytest.param({"modulation": "plan"}, FP32(), marks=pytest.mark.slow),
        ({"resident_blocks": 0}, Nf4(compute="fp32")),
        ({"resident_blocks": 0, "modulation": "plan"}, Int8(compute="fp32")),
    ],
    ids=str,
)
def test_loras_share_one_base(memory, precision, config, text, loras, monkeypatch) -> None:
    options = Memory().model_copy(update={"cache_quantised": False, **memory})
    config = config.model_copy(update={"precision": precision, "memory": options})
    models = {
        "base": BASE, "a": Weights("a", lora=loras["a"]), "half": Weights("half", lora=loras["a"], scale=0.5),
        "b": Weights("b", lora=loras["b"]), "all": Weights("all", lora=loras["all"]),
    }  # fmt: skip
    models["both"] = combine([models["half"], models["b"]])
    shared, loads = SharedBase(config, CPU, {SIZE}), []
    monkeypatch.setattr(session_module, "load_weights", lambda *given: loads.append(given) or load_weights(*given))
    order = ["a", "half", "a", "base", "half", "both", "half", "b", "base", "all", "base"]
    expected = {}
    for name, weights in models.items():  # freshly loaded
        transformer, modulation = load_weights(config, weights, CPU, {SIZE})
        sampler = flow_sampler(transformer, config.model, precision, modulation)
        expected[name] = sampler.latents(requests(1, steps=1), text.load)[0]
    for name in order:
        transformer, modulation = shared.use(models[name])
        drawn = flow_sampler(transformer, config.model, precision, modulation).latents(requests(1, steps=1), text.load)[
            0
        ]
        torch.testing.assert_close(drawn, expected[name], rtol=0, atol=0 if name == "base" else 1e-6)
        assert name == "base" or latent_distance(drawn, expected["base"]) > 1e-3
        assert any(lora_layers(transformer)) == (name not in ("base",)) or modulation is not None
    assert min(latent_distance(expected["both"], expected[name]) for name in ("a", "half", "b")) > 1e-3
    planned = memory.get("modulation") == "plan"
    assert len(loads) == (3 if planned else 1)  # a LoRA on what the plan took out is loaded with its base


def test_a_lora_of_another_family_is_refused_before_anything_is_loaded(config, loras, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(session_module, "PromptStore", None)  # what would be loaded first
    key = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    other = tmp_path / "xl.safetensors"
    save_file({f"{key}.lora_down.weight": torch.ones(2, 640), f"{key}.lora_up.weight": torch.ones(640, 2)}, other)
    drawing = GenerationSession(config, None, CPU, "cpu", StageTimer(cuda=False))
    wrong = combine([Weights("a", lora=loras["a"]), Weights("xl", lora=other)])
    with pytest.raises(
        UserError, match="xl.safetensors is for .*XL.*, and the base is Stable Diffusion 3. Give a LoRA"
    ):
        drawing.generate_all([BASE, wrong], requests())
    with pytest.raises(UserError, match="--lora: .*xl.safetensors is for .*XL.*, and the base is Stable Diffusion 3"):
        _served_models(drawing, [f"other={other}"], [])
    assert set(_served_models(drawing, [f"mine={loras['a']}"], []).loras) == {"mine"}


def test_models_on_one_base_are_drawn_one_after_another(config, loras) -> None:
    a, half = Weights("a", lora=loras["a"]), Weights("half", lora=loras["a"], scale=0.5)
    full, fused = Weights("full", denoiser=Path("t")), Weights("fused", lora=loras["a"], merged=True)
    assert SharedBase(config, CPU, {SIZE}).group_by_base([BASE, full, a, fused, half]) == [BASE, a, half, full, fused]


def test_a_comparison_never_holds_transformer_and_autoencoder_together(config, loras, monkeypatch, text) -> None:
    import gc
    import weakref

    alive: list[weakref.ref] = []
    uses, loads = SharedBase.use, Autoencoder.load

    def use(self: SharedBase, weights: Weights):
        transformer, modulation = uses(self, weights)
        alive.append(weakref.ref(transformer))
        return transformer, modulation

    def load_vae(self: Autoencoder, *args):
        gc.collect()
        assert alive and all(each() is None for each in alive)
        return loads(self, *args)

    monkeypatch.setattr(SharedBase, "use", use)
    monkeypatch.setattr(Autoencoder, "load", load_vae)
    session = GenerationSession(config, None, CPU, "cpu", StageTimer(cuda=False), GenerationSpeed(batch_size=2))
    models = [BASE, Weights("a", lora=loras["a"]), Weights("fused", lora=loras["a"], merged=True)]
    base, live, fused = session.generate_all(models, requests())
    assert [len(drawn.images) for drawn in (base, live, fused)] == [3, 3, 3]
    assert latent_distance(live.latents[0], fused.latents[0]) < 1e-5 < latent_distance(live.latents[0], base.latents[0])
    assert session.generate_all([BASE], requests())[0].images == base.images


def test_several_models_start_from_a_picture_that_is_encoded_once(config, loras, monkeypatch, text, tmp_path) -> None:
    Image.new("RGB", SIZE, "red").save(tmp_path / "red.png")
    given = requests(2, image=tmp_path / "red.png", strength=0.5)
    encoded = []
    monkeypatch.setattr(session_module, "encode_inputs", lambda *rest: encoded.append(rest[2]) or encode_inputs(*rest))
    session = GenerationSession(config, None, CPU, "cpu", StageTimer(cuda=False))
    base, lora = session.generate_all([BASE, Weights("a", lora=loras["a"])], given)
    assert encoded == [given] and latent_distance(base.latents[0], lora.latents[0]) > 1e-5


def test_compiled_blocks_draw_the_same(config, text, capsys, monkeypatch) -> None:
    transformer, _ = load_weights(config, BASE, CPU, {SIZE})
    expected = flow_sampler(transformer, config.model, FP32()).latents(requests(1), text.load)[0]

    def broken(*args: object, **kwargs: object):
        raise RuntimeError("no C compiler\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", broken)
        assert not compile_blocks(transformer, CPU)
    assert "eager mode: no C compiler (torch.compile needs" in capsys.readouterr().out
    eager = partial(torch.compile, backend="eager")  # the compiler's front half; inductor takes half a minute
    monkeypatch.setattr(torch, "compile", eager)
    assert compile_blocks(transformer, CPU)
    assert all(block._compiled_call_impl is not None for block in transformer.transformer_blocks)
    drawn = flow_sampler(transformer, config.model, FP32()).latents(requests(1), text.load)[0]
    torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-6)


def small(add, *words: object) -> argparse.Namespace:
    return parsed(add, *words, "--runs", "/nowhere", "--size", "32x32", "--steps", "2")


@pytest.fixture
def here(tmp_path: Path, shared_cache: Path, monkeypatch) -> Path:
    """The current folder, with the session's cache in it."""
    (tmp_path / ".cache").symlink_to(shared_cache)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_compare_writes_a_page_that_stands_alone(tiny_pipeline: Path, loras, here: Path) -> None:
    nasty = '<script>alert("x")</script> & "quotes"'
    words = ["--model", tiny_pipeline, "--precision", "fp32", "--prompt", nasty]
    words += ["--clip", write_clip(here / "clip")]
    sheet = compare(small(compare_arguments, f"{loras['a']}:0", loras["b"], *words))
    page, figures = (sheet.parent / "compare.html").read_text(), json.loads((sheet.parent / "compare.json").read_text())
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert not re.search(r"(?:src|href)=\"(?!data:)|https?://|url\(", page)
    assert page.count('src="data:image/png;base64,') == 3 and 'type="range"' in page
    base, off, on = figures["models"]
    assert off["difference_from_base"] == off["latent_distance_from_base"] == [0]
    assert on["difference_from_base"][0] > 0 and on["latent_distance_from_base"][0] > 0
    assert base["clip_base"] == pytest.approx([1.0]) and on["clip_base"][0] < 1
    assert base["clip_prompt"] == off["clip_prompt"] and -1 <= on["clip_prompt"][0] <= 1
    assert set(figures["stages"]) >= {"text", "load", "denoise", "decode", "clip"}
    assert {"peak_memory", "device", "precision", "pictures"} <= set(figures)
    images = sorted(sheet.parent.glob("*/000.png"))
    assert len(images) == 3 and all(generation_parameters(file)["prompt"] == nasty for file in images)


def test_generate_draws_every_prompt_and_seed_in_batches(tiny_pipeline: Path, loras, here: Path, capsys) -> None:
    words = ["--model", tiny_pipeline, "--precision", "fp32", "--prompt", "a red disc", "--prompt", "a blue star"]
    words += ["--seeds", "2", "--lora", f"{loras['a']}:0.5"]
    first = generate(small(generate_arguments, *words, "--batch-size", "4", "--fuse", "--reuse-guidance", "2"))
    files = sorted(first.parent.glob("*.png"))
    assert [file.name for file in files] == [f"{n + 1:04d}-lora-seed{n % 2}.png" for n in range(4)]
    assert first == files[0]
    told = generation_parameters(files[3])
    assert (told["prompt"], told["seed"]) == ("a blue star", 1)
    assert told["weights"].endswith("x 0.5, fused") and told["lossy"] == "guidance difference reused for 2 steps"
    assert "lossy: guidance difference reused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--base --strength 0.5", "--strength: 0.5 needs an initial picture. Give one: --image FILE"),
        ("--base --image x.png", "--image: x.png cannot be read .* Give a PNG"),
        ("--base --resident-blocks 9", "--resident-blocks: 9 leaves none of the model's 1 block to stream. Use 0 to 0"),
        ("--base --resident-blocks 0 --precision int8", "--resident-blocks: int8 weights cannot be offloaded"),
        ("--base --resident-blocks 0 --compile", "--compile: compiled blocks need their weights in one place"),
        ("--lora {a} --fuse --precision int8", "--fuse: .* int8 weights: .* --precision bf16"),
    ],
)
def test_what_cannot_be_drawn_is_said(words: str, message, tiny_pipeline: Path, loras, here: Path, monkeypatch) -> None:
    monkeypatch.setattr(Int8, "can_offload", False)  # as a precision might be that keeps pointers of its own
    given = ["--model", tiny_pipeline, "--prompt", "a red disc", *words.format(**loras).split()]
    with pytest.raises(UserError, match=message):
        generate(small(generate_arguments, *given))


def test_the_demo_model_draws_at_its_own_size_and_refuses_one_without_positions(here: Path) -> None:
    words = ["--model", "demo:tiny-sd3", "--base", "--prompt", "a red disc", "--steps", "1"]
    assert Image.open(generate(parsed(generate_arguments, *words))).size == (64, 64)
    with pytest.raises(UserError, match="--size: 64x1024, but the model has positions for at most 512 px a side"):
        generate(parsed(generate_arguments, *words, "--size", "64x1024"))
    with pytest.raises(SystemExit):
        parsed(generate_arguments, "--size", f"64x{'9' * 5000}")


def test_several_loras_are_drawn_with_at_once(tiny_pipeline: Path, loras, here: Path) -> None:
    words = ["--model", tiny_pipeline, "--precision", "fp32", "--prompt", "a red disc", "--lora", f"{loras['a']}:0.5"]
    both = [*words, "--lora", loras["b"]]
    session = open_session(args := small(generate_arguments, *words))
    given = (small(generate_arguments, *more) for more in (both, [*both, "--fuse"], words))
    models = [choose_weights(session, each)[1] for each in given]
    drawn = session.generate_all(models, build_requests(session, args))
    live, fused, one = (np.asarray(each.images[0], int) for each in drawn)
    assert abs(live - fused).max() <= 1 and abs(live - one).max() > 1
    assert models[0].label.count(" + ") == 1


def test_a_run_is_found_in_the_folder_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there/demo").mkdir(parents=True)
    find = session_module._resolve_run_name
    assert find(Path("there"), "demo") == "there/demo" and find(Path("there"), "demo@100") == "there/demo@100"
    assert find(Path("there"), "other") == "other" and find(None, "demo") == "demo"
    with pytest.raises(UserError, match="--run: there/demo is not a run's folder"):
        generate(parsed(generate_arguments, "--runs", "there", "--run", "demo"))
    (tmp_path / "demo").mkdir()
    assert find(Path("there"), "demo") == "demo", "a path is what it says"


def test_the_seed_after_the_largest_is_the_first(model: SD3) -> None:
    first, last = (ImageRequest("", seed, width=64, height=64) for seed in (0, 2**64))
    assert torch.equal(noises(first, model).start, noises(last, model).start)
    assert noises(replace(first, seed=2**64 - 1), model).start.isfinite().all()


def test_a_strength_after_a_colon(tmp_path: Path) -> None:
    assert split_scale("a/b.safetensors:0.5") == ("a/b.safetensors", 0.5)
    assert split_scale("C:here.safetensors") == ("C:here.safetensors", None)
    odd = tmp_path / "x:2"
    odd.touch()
    assert split_scale(str(odd)) == (str(odd), None)


def test_a_stage_of_drawing_that_does_not_fit_is_refused_before_it_is_loaded(monkeypatch, capsys) -> None:
    from simpletune.commands.generate import compare as module

    mib, card, held = 2**20, Card("Test", 4.0, (8, 9), found=1.0), 100 * 2**20
    drawn: list[tuple[int, str, int]] = []

    def drawing_bytes(config: object, largest: ImageRequest, precision: SimpleNamespace, batch: int) -> int:
        drawn.append((largest.width, precision.weights, batch))
        return {"bf16": 2000, "int8": 1000}[precision.weights] * mib

    monkeypatch.setattr(module, "card_at_hand", lambda device: (card, held))
    monkeypatch.setattr(module, "simulate_stage", lambda *_: SimpleNamespace(bytes=500 * mib))
    monkeypatch.setattr(module, "generation_bytes", drawing_bytes)
    monkeypatch.setattr(module, "decoding_bytes", lambda config, request: request.width * mib)
    monkeypatch.setattr(module, "precision_of", lambda config, weights: SimpleNamespace(weights=weights))
    monkeypatch.setattr(job_estimate, "needed_bytes", lambda size: size)
    asked = [SimpleNamespace(width=side, height=side, guidance=4.0) for side in (64, 3996, 32)]

    def require(kind: str) -> None:
        session = SimpleNamespace(config=None, device=torch.device(kind), speed=SimpleNamespace(batch_size=8))
        module.require_memory(session, ["int8", "bf16", "int8"], asked)  # type: ignore[arg-type]

    require("cuda")  # 3,996 MiB beside 100 in use fill the card's 4,096 to the byte
    assert sorted(drawn) == [(3996, "bf16", 3), (3996, "int8", 3)], "the largest picture, in each precision once"
    said = capsys.readouterr().out.splitlines()
    assert said == ["predict text: 500 MiB", "predict draw: 2,000 MiB", "predict decode: 3,996 MiB"]
    asked[1].width = 3997
    beside_others = r"needs 3,997 MiB \(predicted\) and Test has 4,096, 100 of them in use by other programs"
    with pytest.raises(UserError, match=f"decode {beside_others}. Draw smaller"):
        require("cuda")
    require("cpu")  # refuses nothing


def test_the_help_of_no_t5_names_the_families_that_can_do_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    titles = [family.words.title for family in FAMILIES if "model.t5=false" in family.text.optional.values()]
    with pytest.raises(SystemExit):
        parse(["generate", "--help-all"])
    assert f"only {' and '.join(titles)} has one" in " ".join(capsys.readouterr().out.split())
