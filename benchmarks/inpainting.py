"""``inpainting``: whether a plain UNet learns to inpaint, on the tiny SDXL with its own checker.

Its first layer gets the channels of a mask and a masked picture, with weights of zero, and all of it is trained with
random holes. Then it paints over the shapes of other pictures: prompts name another shape and colour in the same place.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.table import Results, describe_machine, prompted
from benchmarks.tiny_models import checker
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import MODELS, TINY_SDXL, demo_scenes
from simpletune.data.sources.holes import latent_hole
from simpletune.runs.weights import BASE, Weights, load_weights, run_result
from simpletune.stages.sample import ImageRequest, Sampler, decode
from simpletune.stages.text_cache import TextCache
from simpletune.system.console import say
from simpletune.system.sheets import grid
from simpletune.training.train import train

CPU = torch.device("cpu")
SIDE, STEPS, GUIDANCE = 64, 20, 3.0  # pixels; of drawing
IMAGES, VARIANTS, TRAINED = 384, 8, 1200
SEEDS = (0, 1, 2)
COLUMNS = {
    "what": "", "outside": "outside of the hole", "autoencoder": "the autoencoder alone", "shape": "shape",
    "colour": "colour", "kept": "shape and colour of the picture below", "seconds": "seconds of training",
}  # fmt: skip
ABOUT = f"""\
The tiny SDXL, widened by zero weights, trained in full for {TRAINED} steps on
{IMAGES} of the demo's pictures with {VARIANTS} random holes each. Captions and prompts name neither background nor
style. Prompts ask for another shape and colour in a picture, and the hole covers the old shape; drawn in {STEPS} steps
at guidance {GUIDANCE:g}. *Outside of the hole*: mean difference of values from the picture (0 to 255), at least 8
pixels away from the hole, where nothing is pasted back; *the autoencoder alone*: the same if it only encodes and
decodes the picture. *Shape* and *colour*: share of pictures that the checker reads as the prompt says; *of the picture
below*: as the covered picture says."""


class Task(NamedTuple):
    """A picture to paint over: it, its hole [h, w], and what it shows and is to show."""

    image: Image.Image
    hole: np.ndarray
    shown: demo_scenes.Scene
    asked: demo_scenes.Scene


def caption(scene: demo_scenes.Scene) -> str:
    """A caption that leaves out background and style, which only the picture around the hole shows."""
    return f"a {scene.size} {scene.colour} {scene.shape} {scene.position}"


def tasks(count: int, seed: int) -> list[Task]:
    """Pictures whose shapes are covered by a square hole; shape and colour asked for differ from theirs."""
    found = []
    shown = demo_scenes.sample_scenes(count, seed=1000 + seed)
    others = demo_scenes.sample_scenes(8 * count, seed=2000 + seed)
    for number, scene in enumerate(shown):
        other = next(each for each in others[number:] if each.shape != scene.shape and each.colour != scene.colour)
        x, y = (SIDE * place for place in demo_scenes.POSITIONS[scene.position])
        reach = SIDE * (demo_scenes.SIZES["large"] + 0.06)  # covers the largest shape with its outline
        rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
        hole = (abs(columns - x) < reach) & (abs(rows - y) < reach)
        asked = replace(scene, shape=other.shape, colour=other.colour)
        found.append(Task(demo_scenes.render(scene, SIDE, seed=number), hole, scene, asked))
    return found


def write_widened(folder: Path) -> Path:
    """A copy of the tiny SDXL whose UNet reads the mask and the masked picture, too, at first without effect."""
    shutil.copytree(MODELS[TINY_SDXL], folder)
    config_file = folder / "unet" / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    channels = config["out_channels"]
    config_file.write_text(json.dumps({**config, "in_channels": 2 * channels + 1}), encoding="utf-8")
    (weights_file,) = (folder / "unet").glob("*.safetensors")
    weights = load_file(weights_file)
    old = weights["conv_in.weight"]  # [o, c, 3, 3]
    weights["conv_in.weight"] = torch.cat([old, torch.zeros(len(old), channels + 1, *old.shape[2:])], 1)
    save_file(weights, weights_file, {"format": "pt"})
    return folder


def config_of(folder: Path, seed: int, steps: int) -> TrainConfig:
    """Full fine-tuning on random holes. Without min-SNR, which gives no weight to the highest noise: there the picture
    around the hole says most."""
    return validate(
        {
            "name": f"inpainting-{seed}",
            "device": "cpu",
            "model": {"family": "sdxl", "pretrained": str(folder / "widened")},
            "data": {
                "path": str(folder / "pictures"),
                "resolution": SIDE,
                "variants": VARIANTS,
                "caption_dropout": 0.1,
            },
            "adapter": {"method": "full"},
            "precision": {"weights": "fp32", "compute": "fp32"},
            "optimizer": {"name": "adamw", "lr": 0.001, "betas": [0.9, 0.98]},
            "schedule": {"name": "cosine", "warmup_steps": min(50, steps // 4)},
            "objective": {"name": "ddpm", "prediction": "v", "zero_terminal_snr": True},
            "train": {"steps": steps, "batch_size": 16, "seed": seed},
            "memory": {"checkpointing": "none"},
            "checkpoint": {"every": None},
            "validation": {"prompts": [], "loss_samples": 0},
            "profile": {"max_traces": 0},
            "tracking": {"tensorboard": False},
            "output": {
                "runs": str(folder / "runs"),
                "profiles": str(folder / "profiles"),
                "cache": str(folder / "cache"),
                "report": False,
            },
        },
        "inpainting",
    )


def paint(config: TrainConfig, weights: Weights, some: list[Task]) -> tuple[list[Image.Image], list[Image.Image]]:
    """Paint over pictures.

    Returns:
        The painted pictures, with nothing of the originals pasted back, and those that the autoencoder makes of the
        originals.
    """
    model, dtype = config.model, config.precision.encoder_dtype()
    denoiser, modulation = load_weights(config, weights, CPU, [(SIDE, SIDE)])
    vae, text = model.autoencoder.load(CPU, dtype), TextCache(model, dtype, config.output.place)
    prompts = [caption(task.asked) for task in some]
    text.fill([*prompts, ""], CPU)
    load = cache(text.load)
    pixels = torch.stack([torch.from_numpy(np.array(task.image)).permute(2, 0, 1) for task in some]).float() / 127.5 - 1
    holes = torch.from_numpy(np.stack([task.hole for task in some]))[:, None]  # [b, 1, h, w]
    small = torch.from_numpy(np.stack([latent_hole(task.hole, model.autoencoder.downsampling) for task in some]))[
        :, None
    ].float()
    with torch.no_grad():
        whole, masked = (model.autoencoder.encode(vae, each) for each in (pixels, pixels * ~holes))
    requests = [ImageRequest(each, 7, "", SIDE, SIDE, STEPS, GUIDANCE) for each in prompts]
    requests = [replace(each, seed=number) for number, each in enumerate(requests)]
    sampler = Sampler(denoiser, model, config.precision, modulation, objective=config.objective)
    read: Tensor = torch.cat([small, masked], 1)
    z = sampler.denoise(requests, [load(each) for each in prompts], [load("")] * len(some), inpainting=read)
    return decode(vae, model, z.split(1)), decode(vae, model, whole.split(1))


def difference(images: list[Image.Image], some: list[Task]) -> float:
    """Mean difference from the pictures, 0 to 255, at least 8 pixels outside of their holes."""
    found = []
    for image, task in zip(images, some, strict=True):
        away = np.asarray(Image.fromarray(task.hole).convert("L").filter(ImageFilter.MaxFilter(17))) == 0
        found.append(np.abs(np.asarray(image, float) - np.asarray(task.image, float))[away].mean())
    return float(np.mean(found))


def measured(config: TrainConfig, weights: Weights, some: list[Task]) -> tuple[dict[str, float], list[Image.Image]]:
    """The columns of a row, and what was painted."""
    painted, reconstructed = paint(config, weights, some)
    wanted, below = (checker.score(painted, [getattr(task, what) for task in some]) for what in ("asked", "shown"))
    return {
        "outside": difference(painted, some),
        "autoencoder": difference(reconstructed, some),
        "shape": wanted["shape"],
        "colour": wanted["colour"],
        "kept": (below["shape"] + below["colour"]) / 2,
    }, painted


def prepared(folder: Path) -> Path:
    """Write the widened model and the pictures, once."""
    write_widened(folder / "widened")
    scenes = demo_scenes.sample_scenes(IMAGES, seed=9)
    demo_scenes.write_folder(folder / "pictures", scenes, seed=9, pixels=SIDE)
    for number, scene in enumerate(scenes):
        (folder / "pictures" / f"{number:03d}.txt").write_text(f"{caption(scene)}\n", encoding="utf-8")
    return folder


def run(folder: Path, count: int, minutes: float, only: str) -> Path:
    """Measure missing rows with ``count`` pictures per score; write their table and a contact sheet."""
    results, sheets = Results(folder / "inpainting", COLUMNS, prompted("inpainting", count)), []
    rows = {"widened, not trained": None, **{f"trained, seed {seed}": seed for seed in SEEDS}}
    with tempfile.TemporaryDirectory(prefix="simpletune-inpainting-") as place:
        scratch = prepared(Path(place))
        for name, seed in results.missing(rows, minutes, only):
            config, clock = config_of(scratch, seed or 0, TRAINED), time.perf_counter()
            weights = BASE if seed is None else run_result(train(config))
            trained = {} if seed is None else {"seconds": round(time.perf_counter() - clock, 1)}
            some = tasks(count, seed or 0)
            row, painted = measured(config, weights, some)
            say(f"bench   {name}: outside {row['outside']:.1f}, shape {row['shape']:.2f}, colour {row['colour']:.2f}")
            results.add(name, {**row, **trained, "of": count})
            sheets.append(
                (name, [image for task, own in zip(some[:3], painted, strict=False) for image in (task.image, own)])
            )
    if sheets:
        folder.mkdir(parents=True, exist_ok=True)
        grid(sheets, ["picture", "painted"] * 3).save(folder / "inpainting.png")
    return results.write_table("Inpainting on the tiny SDXL", ABOUT, describe_machine())
