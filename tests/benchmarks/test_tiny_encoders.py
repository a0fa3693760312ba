"""The two tiny encoders: what the shipped ones tell apart, and the script that trains them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.tiny_models import tiny_encoders_data
from benchmarks.tiny_models import train_tiny_encoders as script
from simpletune.commands.evaluate import scores
from simpletune.commands.evaluate.encoders import ImageEncoder, find_encoder
from simpletune.data.demo import ENCODERS, demo_scenes
from simpletune.data.demo.demo_scenes import Scene

SHIPPED = ENCODERS["demo:tiny-dino"].parent


@pytest.fixture(scope="module")
def dino() -> ImageEncoder:
    return find_encoder("demo:tiny-dino").load(torch.device("cpu"))


@pytest.fixture(scope="module")
def clip() -> ImageEncoder:
    return find_encoder("demo:tiny-clip").load(torch.device("cpu"))


def embedded(encoder: ImageEncoder, drawn: list) -> np.ndarray:
    return encoder.embed_images(drawn).double().numpy()


def test_the_shipped_encoders_are_as_good_as_their_card_says(dino: ImageEncoder, clip: ImageEncoder) -> None:
    said = json.loads((SHIPPED / "accuracy.json").read_text())
    assert script.dino_accuracy(dino.model, 60) >= said["tiny_dino"]["figure"] - 0.1
    found = script.clip_accuracy(clip.model, clip.tokenizer, 60)  # type: ignore[attr-defined]
    assert found.keys() == said["tiny_clip"].keys()
    assert all(value >= said["tiny_clip"][name] - 0.08 for name, value in found.items()), found
    assert (SHIPPED / "README.md").read_text() == script.card(said)
    assert sum(file.stat().st_size for file in SHIPPED.rglob("*")) < 4 * 2**20


def test_a_figure_that_was_never_seen_is_known_again(dino: ImageEncoder) -> None:
    """The demo's own: its pictures are more alike than those of figures that share a part of it."""
    places = [("white", "large", "in the middle"), ("sky", "medium", "on the left"), ("peach", "large", "at the top")]
    own = embedded(dino, [demo_scenes.render_subject(*place, seed=n) for n, place in enumerate(places)])
    alike = 1 - scores.diversity(own)
    assert alike > 0.7
    for inner in (("heart", "yellow"), ("star", "green")):
        scenes = [Scene("circle", "purple", *place, "flat") for place in places]
        other = embedded(dino, [demo_scenes.render_figure(scene, inner, seed=n) for n, scene in enumerate(scenes)])
        assert scores.subject_fidelity(other, own).mean() < alike - 0.05
    plain = embedded(dino, [demo_scenes.render(Scene("square", "green", *place, "flat"), 64, 1) for place in places])
    assert scores.subject_fidelity(plain, own).mean() < 0.35


def test_prompts_fit_their_pictures_and_not_shuffled_ones(clip: ImageEncoder) -> None:
    scenes = demo_scenes.sample_scenes(24, seed=5, held_out=True)
    drawn = embedded(clip, [demo_scenes.render(scene, 64, n) for n, scene in enumerate(scenes)])
    prompts = clip.embed_prompts([demo_scenes.caption(scene, n) for n, scene in enumerate(scenes)]).double().numpy()
    fits = scores.prompt_fidelity(drawn, prompts).mean()
    assert fits > scores.prompt_fidelity(drawn, np.roll(prompts, 1, axis=0)).mean() + 0.4
    noise = embedded(clip, [Image.fromarray(np.random.default_rng(n).integers(0, 256, (64, 64, 3), np.uint8))
                            for n in range(24)])  # fmt: skip
    real = embedded(clip, [demo_scenes.render(scene, 64, 99 + n) for n, scene in enumerate(scenes)])
    assert scores.cmmd(noise, real) > 5 * scores.cmmd(drawn, real)


def test_neither_encoder_sees_the_demos_figure_or_held_out_triples(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Scene] = []
    honest = demo_scenes.render
    monkeypatch.setattr(demo_scenes, "render", lambda scene, *more: seen.append(scene) or honest(scene, *more))
    chosen = script.figures(400, 0)
    assert len(set(chosen)) == len(chosen) and sum(not figure[3] for figure in chosen) > 50
    own = (*demo_scenes.SUBJECT[:2], "flat", *demo_scenes.SUBJECT[2:])
    assert own not in script.figures(400, 16)
    with monkeypatch.context() as patch:
        patch.setattr(tiny_encoders_data, "SUBJECT", ("", "", "", ""))
        assert own in script.figures(400, 16), "this seed draws the demo's figure, too"
    for number, figure in enumerate(chosen[:100]):
        script.view(figure, number)
    _, captions, known = script.scenes_with_captions(200, 3, held_out=False)
    assert seen and not any(demo_scenes.is_held_out(each.shape, each.colour, each.background) for each in seen)
    for caption, scene in zip(captions, known, strict=True):
        for name in ("shape", "colour", "style"):
            value, told = getattr(scene, name), set(caption.replace(",", "").split())
            assert value in told if value else not set(script.TABLES[name]) & told
    assert 20 < sum(not scene.style for scene in known) < 180 and 10 < sum(not scene.shape for scene in known) < 70


def test_the_script_makes_what_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FIGURES": 12, "SCENES": 12, "BATCH": 4, "LAYERS": 1}.items():
        monkeypatch.setattr(script, name, value)
    honest = script.clip_accuracy
    monkeypatch.setattr(script, "dino_accuracy", lambda model: 0.25)
    monkeypatch.setattr(script, "clip_accuracy", lambda *encoder: honest(*encoder, 20))
    script.make(tmp_path / "made", dino_steps=4, clip_steps=4)
    expected = {file.relative_to(SHIPPED) for file in SHIPPED.rglob("*")}
    assert {file.relative_to(tmp_path / "made") for file in (tmp_path / "made").rglob("*")} == expected
    for kind in ("dino", "clip"):
        encoder = find_encoder(str(tmp_path / "made" / f"tiny_{kind}")).load(torch.device("cpu"))
        assert encoder.embed_images([demo_scenes.render_subject("white", "small", "on the left")]).isfinite().all()
        logged = [json.loads(line) for line in (tmp_path / "made" / f"tiny_{kind}_log.jsonl").read_text().splitlines()]
        assert logged[-1]["step"] == 4 and math.isfinite(logged[-1]["loss"])
    assert "| 25.0% | 0.5% |" in (tmp_path / "made" / "README.md").read_text()


def test_training_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PEAK_LR", 0.1)
    torch.manual_seed(0)
    layer, data = torch.nn.Linear(2, 1), torch.randn(64, 2)
    lost: list[float] = []

    def loss(step: int) -> torch.Tensor:
        value = (layer(data) - data.sum(1, keepdim=True)).square().mean()
        lost.append(value.item())
        return value

    script.fit(list(layer.parameters()), 100, loss, Path("/dev/null"))
    assert lost[-1] < 0.05 * lost[0]
