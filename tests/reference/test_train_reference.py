"""The reference's training run against one made of diffusers' transformer, torch's AdamW and peft's LoRA."""

import json
import sys
from pathlib import Path

import pytest
import text
import tiny_pipeline
import torch
import train
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import LoraConfig
from PIL import Image
from plan import Settings, draw_dropped, draw_noise, draw_sigma
from safetensors.torch import save_file
from torch import Tensor

SETTINGS = {
    "seed": 3,
    "resolution": 32,
    "batch_size": 2,
    "accumulation": 2,
    "steps": 4,
    "lr": 3e-3,
    "weight_decay": 0.1,
    "clip_norm": 0.5,  # below the norms of these runs, so that clipping shows
    "sigma": "logit_normal",
    "mean": 0.2,
    "std": 0.9,
    "shift": 3.0,
    "caption_dropout": 0.3,
    "t5": True,
    "t5_length": 9,
    "lora_alpha": 6.0,
}
RANK = 3
TARGETS = ["attn.to_q", "attn.to_out.0", "attn.add_k_proj", "attn.to_add_out", "attn2.to_v", "ff.net.2", "proj_out"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_pipeline.save(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """Five pictures for two buckets, listed out of order."""
    folder = tmp_path_factory.mktemp("pictures")
    found = []
    for i, size in enumerate([(40, 40), (90, 30), (33, 37), (64, 64), (120, 39)]):
        path = folder / f"{i}.png"
        gradient = Image.linear_gradient("L").rotate(37 * i).resize(size)
        Image.merge("RGB", [gradient, gradient.rotate(90), gradient.rotate(180)]).save(path)
        path.with_suffix(".txt").write_text(f"picture number {'abcde'[i]}", encoding="utf-8")
        found.append((path, f"picture number {'abcde'[i]}"))
    return found[::-1]


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> Path:
    """Initial weights with a lora_B that is not zero, so that the first loss shows the adapter too."""
    generator = torch.Generator().manual_seed(11)
    shapes = SD3Transformer2DModel.from_pretrained(pipeline / "transformer").state_dict()
    tensors = {}
    for key, weight in shapes.items():
        module = key.removesuffix(".weight")
        if module != key and module.endswith(tuple(TARGETS)):
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator) * 0.2
            tensors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator) * 0.2
    path = tmp_path_factory.mktemp("lora") / "initial.safetensors"
    save_file(tensors, path)
    return path


def pil_to_tensor(image: Image.Image) -> Tensor:  # [3, h, w], 0..255
    return (
        torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(*image.size[::-1], 3).permute(2, 0, 1)
    )


def diffusers_transformer(pipeline: Path, lora: Path | None) -> SD3Transformer2DModel:
    transformer = SD3Transformer2DModel.from_pretrained(pipeline / "transformer").float()
    if lora is None:
        return transformer.requires_grad_(True)
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=SETTINGS["lora_alpha"], target_modules=TARGETS))
    initial = {key.replace(".weight", ".default.weight"): value for key, value in train.load_file(lora).items()}
    unexpected = transformer.load_state_dict(initial, strict=False).unexpected_keys
    assert unexpected == []
    return transformer


def diffusers_steps(
    pipeline: Path, data: train.Prepared, settings: Settings, lora: Path | None
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses and gradient norms of every step, and the gradients of the first before clipping."""
    transformer = diffusers_transformer(pipeline, lora)
    trained = {name: p for name, p in transformer.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), settings.lr, settings.betas, settings.eps, weight_decay=settings.weight_decay
    )
    steps, first = [], {}
    for batches in data.steps:
        loss = torch.cat([diffusers_losses(transformer, data, settings, batch) for batch in batches]).mean()
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in trained.items()}
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps, first


def diffusers_losses(
    transformer: SD3Transformer2DModel, data: train.Prepared, settings: Settings, batch: train.MicroBatch
) -> Tensor:
    """One forward a sample: the step's loss is the mean over its samples, of all its micro-batches."""
    losses = []
    for i, sample in enumerate(batch.samples):
        place = (batch.step, batch.micro, batch.first + i)
        z_0 = data.z_0[sample][None]
        noise = torch.from_numpy(draw_noise(settings, *place, tuple(z_0.shape[1:])))[None]
        sigma = torch.tensor([float(draw_sigma(settings, *place))])
        row = len(data.z_0) if draw_dropped(settings, *place) else sample
        velocity = transformer(
            hidden_states=torch.lerp(z_0, noise, sigma),
            timestep=sigma * 1000,
            encoder_hidden_states=data.prompt_embeds[row : row + 1],
            pooled_projections=data.pooled[row : row + 1],
        ).sample
        losses.append(torch.nn.functional.mse_loss(velocity, noise - z_0))
    return torch.stack(losses)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_losses_norms_and_gradients_equal_diffusers(method: str, pipeline: Path, images, lora: Path) -> None:
    settings = Settings(**SETTINGS)
    file = lora if method == "lora" else None
    data = train.prepare(pipeline, images, settings)
    expected, gradients = diffusers_steps(pipeline, data, settings, file)
    actual = train.run(pipeline, images, SETTINGS, method, file)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=2e-5, atol=0)
    assert min(norm for _, norm in actual) > settings.clip_norm
    losses = [loss for loss, _ in actual]
    assert len(set(losses)) == settings.steps

    model = train.mmdit.load(pipeline / "transformer")
    model, names = train.lora_method(model, lora, settings.lora_alpha) if file else train.full_method(model)
    trained = [model.weights[name].requires_grad_() for name in names]
    counts = [len(batch.samples) for batch in data.steps[0]]
    parts = [train.micro_batch_loss(model, data, settings, batch) for batch in data.steps[0]]
    total = sum(part * count for part, count in zip(parts, counts, strict=True))
    mine = dict(zip(names, torch.autograd.grad(total / sum(counts), trained), strict=True))
    theirs = {name.replace(".default.", "."): gradient for name, gradient in gradients.items()}
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        scale = max(theirs[name].abs().max().item(), 1e-3)
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: n + m)


def test_data_holds_what_the_run_needs(pipeline: Path, images) -> None:
    """Both buckets and a dropped caption occur in the run that is compared with diffusers."""
    settings = Settings(**SETTINGS)
    data = train.prepare(pipeline, images, settings)
    batches = [batch for step in data.steps for batch in step]
    assert {tuple(data.z_0[batch.samples[0]].shape) for batch in batches} == {(16, 4, 4), (16, 2, 6)}
    places = [(batch.step, batch.micro, batch.first + i) for batch in batches for i in range(len(batch.samples))]
    assert {draw_dropped(settings, *place) for place in places} == {True, False}


@pytest.mark.parametrize("clip_norm", [0.5, 100.0])
def test_clipping_equals_torch(clip_norm: float) -> None:
    """On its own, as Adam's update hardly changes when every gradient is scaled."""
    generator = torch.Generator().manual_seed(0)
    mine = [torch.randn(shape, generator=generator) for shape in [(3, 4), (5,), (2, 2, 2)]]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in mine]
    for parameter, gradient in zip(parameters, mine, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    assert train.clip(mine, clip_norm) == pytest.approx(expected.item(), rel=1e-6)
    for parameter, gradient in zip(parameters, mine, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_latents_are_the_shifted_and_scaled_mean_of_the_posterior(pipeline: Path, images) -> None:
    path = min(path for path, _ in images)  # 40 x 40
    pixels = Image.open(path).resize((32, 32), Image.Resampling.LANCZOS)
    vae = StableDiffusion3Pipeline.from_pretrained(pipeline).vae
    with torch.no_grad():
        mean = vae.encoder(pil_to_tensor(pixels)[None] / 127.5 - 1)[:, :16]
    data = train.prepare(pipeline, images, Settings(**SETTINGS))
    torch.testing.assert_close(data.z_0[0], 1.5305 * (mean[0] - 0.0609))


@pytest.mark.parametrize("t5", [True, False])
def test_prompt_embeds_equal_the_pipeline(t5: bool, pipeline: Path) -> None:
    captions = ["a cat", "", "Hello there! more words than any of the encoders has room for"]
    parts = {} if t5 else {"text_encoder_3": None, "tokenizer_3": None}
    theirs = StableDiffusion3Pipeline.from_pretrained(pipeline, **parts)
    with torch.no_grad():
        embeds, _, pooled, _ = theirs.encode_prompt(
            captions, None, None, do_classifier_free_guidance=False, max_sequence_length=9
        )
    actual_embeds, actual_pooled = text.encode(pipeline, captions, t5, 9)
    torch.testing.assert_close(actual_embeds, embeds)
    torch.testing.assert_close(actual_pooled, pooled)
    assert (actual_embeds[:, tiny_pipeline.CLIP_LENGTH :].abs().max() > 0) == t5


def test_clip_state_is_the_penultimate_layer(pipeline: Path) -> None:
    """The second-to-last state is the whole encoder without its last layer and its final norm."""
    encoder = text.CLIPTextModelWithProjection.from_pretrained(pipeline / "text_encoder")
    tokenizer = text.CLIPTokenizer.from_pretrained(pipeline / "tokenizer")
    states, _ = text.encode_clip(pipeline, "", ["a cat"])
    del encoder.text_model.encoder.layers[-1]
    encoder.text_model.final_layer_norm = torch.nn.Identity()
    with torch.no_grad():
        shorter = encoder(text.tokenise(tokenizer, ["a cat"], tokenizer.model_max_length)).last_hidden_state
    torch.testing.assert_close(states, shorter)


def test_command_line_prints_the_same_losses(
    pipeline: Path, images, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    settings = SETTINGS | {"steps": 1}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    arguments = ["train.py", pipeline, images[0][0].parent, file, "--lora", lora]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in arguments])
    train.main()
    assert json.loads(capsys.readouterr().out) == train.losses(pipeline, images, settings, "lora", lora)


def test_a_lora_file_that_does_not_fit_is_refused(pipeline: Path, tmp_path: Path) -> None:
    file = tmp_path / "wrong.safetensors"
    save_file({"transformer_blocks.9.attn.to_q.lora_A.weight": torch.zeros(2, 16)}, file)
    with pytest.raises(ValueError, match=r"transformer_blocks\.9\.attn\.to_q\.lora_B"):
        train.lora_method(train.mmdit.load(pipeline / "transformer"), file, 1.0)
