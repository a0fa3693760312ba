"""``sliders``: whether a slider from prompts alone changes the size of shapes and nothing else, on the tiny SD3."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.table import Results, describe_machine, prompted
from benchmarks.tiny_models import checker
from simpletune.adapters.methods.layers import at_strength
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import demo_scenes
from simpletune.data.demo.demo_scenes import Scene
from simpletune.runs.folder import STRENGTHS
from simpletune.runs.weights import load_weights, run_result
from simpletune.stages.sample import ImageRequest, Sampler, decode
from simpletune.stages.text_cache import TextCache
from simpletune.system.console import say
from simpletune.system.options import Json
from simpletune.system.sheets import grid
from simpletune.training.train import train

CPU = torch.device("cpu")
SIDE, STEPS, GUIDANCE = 64, 12, 3.0  # pixels; of drawing
DIRECTIONS, TRAINED, BATCH = 8, 60, 8
SEEDS = (0, 1, 2)
MOST = 0.05  # share of pictures whose colour or place may change
COLUMNS = {
    "what": "", "correlation": "rank correlation of area and strength", "least": "the least of a prompt",
    **{f"area_{strength}": f"area at {strength}" for strength in STRENGTHS},
    "colour": "colour changed", "position": "place changed", "shape": "shape changed", "seconds": "seconds of training",
}  # fmt: skip
ABOUT = f"""\
A LoRA of rank 4 on the tiny SD3, trained for {TRAINED} steps of {BATCH} drawings from {DIRECTIONS} captions alone:
*large* and *small* against *medium*, of flat shapes. Then other captions of medium shapes, with the same noise at the
strengths -2 to 2, in {STEPS} steps at guidance {GUIDANCE:g}. *Area*: share of pixels that differ from the background,
mean over the prompts. *Rank correlation*: Spearman's, of a prompt's five areas with their strengths, mean over the
prompts. *Changed*: share of pictures at other strengths than 0 whose colour, place or shape the checker reads
otherwise than at 0. A slider is as wanted if the correlation is above 0.9, and at most {MOST:.0%} of colours and
places change."""


def captions(scene: Scene, template: int) -> dict[str, str]:
    """A scene's caption at each size."""
    return {size: demo_scenes.caption(replace(scene, size=size), template) for size in demo_scenes.SIZES}


def config_of(folder: Path, seed: int) -> TrainConfig:
    """The slider of a seed, which also draws the scenes of its captions."""
    of_size = [
        captions(scene, n) for n, scene in enumerate(demo_scenes.sample_scenes(DIRECTIONS, 11 + seed, style="flat"))
    ]
    directions: list[Json] = [
        {"target": each["medium"], "positive": each["large"], "negative": each["small"]} for each in of_size
    ]
    layers = ["text_embedder.linear_1", "text_embedder.linear_2", "attn.add_k_proj", "attn.add_v_proj", "norm1.linear"]
    return validate(
        {
            "name": f"slider-{seed}",
            "device": "cpu",
            "model": {"pretrained": "demo:tiny-sd3", "t5_length": 24},
            "concept": {"directions": directions, "resolutions": [SIDE], "drawing_steps": STEPS},
            "adapter": {"method": "lora", "rank": 4, "targets": layers},
            "precision": {"weights": "int8", "compute": "fp32"},
            "optimizer": {"name": "adamw", "lr": 0.004},
            "schedule": {"name": "cosine", "warmup_steps": min(5, TRAINED // 4)},
            "train": {"steps": TRAINED, "batch_size": BATCH, "seed": seed},
            "memory": {"checkpointing": "none"},
            "checkpoint": {"every": None},
            "validation": {"prompts": []},
            "profile": {"max_traces": 0},
            "tracking": {"tensorboard": False},
            "output": {
                "runs": str(folder / "runs"),
                "profiles": str(folder / "profiles"),
                "cache": str(folder / "cache"),
                "report": False,
            },
        },
        "sliders",
    )


def drawn(config: TrainConfig, run: Path, prompts: Sequence[str]) -> dict[int, list[Image.Image]]:
    """Pictures of every prompt at every strength."""
    config = resolve_folders(config)
    model, dtype = config.model, config.precision.encoder_dtype()
    denoiser, modulation = load_weights(config, run_result(run), CPU, [(SIDE, SIDE)])
    vae, text = model.autoencoder.load(CPU, dtype), TextCache(model, dtype, config.output.place)
    text.fill([*prompts, ""], CPU)
    requests = [ImageRequest(prompt, n, "", SIDE, SIDE, STEPS, GUIDANCE) for n, prompt in enumerate(prompts)]
    sampler = Sampler(
        denoiser.eval(), model, config.precision, modulation, batch_size=len(prompts), objective=config.objective
    )
    found = {}
    for strength in STRENGTHS:
        with at_strength(denoiser, strength):
            found[strength] = decode(vae, model, sampler.latents(requests, cache(text.load)))
    return found


def area(image: Image.Image) -> float:
    """The share of a picture's pixels that differ from its background, the median of its border."""
    canvas = np.asarray(image.convert("RGB"), dtype=np.float64)
    border = np.concatenate([canvas[0], canvas[-1], canvas[:, 0], canvas[:, -1]])
    return float((np.linalg.norm(canvas - np.median(border, axis=0), axis=-1) > 60).mean())


def rank_correlation(values: Sequence[float]) -> float:
    """Spearman's rank correlation of values with their places; ties have the mean of their ranks."""
    each = np.asarray(values)
    ranks = (each[:, None] > each).sum(1) + ((each[:, None] == each).sum(1) - 1) / 2
    spread = ranks.std()
    places = np.arange(len(each))
    return (
        0.0
        if spread == 0
        else float(((ranks - ranks.mean()) * (places - places.mean())).mean() / spread / places.std())
    )


def measured(images: dict[int, list[Image.Image]]) -> dict[str, float]:
    """The columns of a row."""
    areas = np.array([[area(image) for image in images[strength]] for strength in STRENGTHS])  # [s, n]
    readings = {strength: [checker.read_image(image) for image in images[strength]] for strength in STRENGTHS}
    pairs = [(own, base) for at in STRENGTHS if at for own, base in zip(readings[at], readings[0], strict=True)]
    changed = {
        name: sum(getattr(own, name) != getattr(base, name) for own, base in pairs) / len(pairs)
        for name in ("colour", "position", "shape")
    }
    found = [rank_correlation(column) for column in areas.T.tolist()]
    by_strength = {f"area_{at}": float(row.mean()) for at, row in zip(STRENGTHS, areas, strict=True)}
    return {"correlation": float(np.mean(found)), "least": min(found), **by_strength, **changed}


def run(folder: Path, count: int, minutes: float, only: str) -> Path:
    """Measure missing rows with ``count`` prompts; write their table and a sheet of strips."""
    results, sheets = Results(folder / "sliders", COLUMNS, prompted("sliders", count)), []
    with tempfile.TemporaryDirectory(prefix="simpletune-sliders-") as place:
        for name, seed in results.missing({f"seed {seed}": seed for seed in SEEDS}, minutes, only):
            config, clock = config_of(Path(place), seed), time.perf_counter()
            trained = train(config)
            seconds = round(time.perf_counter() - clock, 1)
            scenes = demo_scenes.sample_scenes(count, 500 + seed, style="flat")
            prompts = [captions(scene, n)["medium"] for n, scene in enumerate(scenes)]
            images = drawn(config, trained, prompts)
            row = measured(images)
            say(f"bench   {name}: correlation {row['correlation']:.3f}, colour {row['colour']:.3f}")
            results.add(name, {**row, "seconds": seconds, "of": count})
            strips = zip(prompts[:3], zip(*images.values(), strict=True), strict=False)
            sheets += [(f"{name}: {prompt}", list(strip)) for prompt, strip in strips]
    if sheets:
        folder.mkdir(parents=True, exist_ok=True)
        grid(sheets, [f"strength {strength}" for strength in STRENGTHS]).save(folder / "sliders.png")
    return results.write_table("A slider of size on the tiny SD3", ABOUT, describe_machine())
