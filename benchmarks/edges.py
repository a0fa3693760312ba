"""``edges``: whether training treats the edges of a picture as its middle.

Users of another trainer see artefacts at the left and bottom edges with their LoRAs of SD3.5 Medium, elsewhere than in
the trainer's own samples (github.com/Nerogar/OneTrainer/issues/651). Here: gradients by position beside diffusers'
blocks, on a random SD3.5 Medium of full size, and pictures of a trained tiny SD3 off its training size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.quality import GUIDANCE, STEPS, Easel, prompts_of
from benchmarks.quiet import ALONE, quiet_config
from benchmarks.table import Results, describe_machine
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_folders
from simpletune.data.demo import demo_scenes
from simpletune.models.sd3.joint_block import use_joint_blocks
from simpletune.models.sd3.positions import crop_positions
from simpletune.models.sd3.sd3_option import SD3
from simpletune.runs.weights import BASE, Weights, run_result
from simpletune.system.console import say
from simpletune.system.options import Json
from simpletune.training.train import train

DEMO = Path("configs/demo.json")
SIZES = [(64, 64), (48, 48), (80, 80), (96, 64), (64, 96)]
PROMPTS = 32
BAND = 8  # an edge of gradients is an eighth of the side
RIM = 2  # and of a picture two pixels
GRADIENTS, AUTOENCODER = "gradients, SD3.5 Medium", "autoencoder of the tiny SD3"
COLUMNS = {"what": "", **{side: side for side in ("left", "right", "top", "bottom")}, "most": "largest difference"}
ABOUT = f"""\
Each figure is a mean over an edge; of gradients, an edge is the outermost eighth.

- *Gradients*: of the loss, by the picture's tokens, norms over width; SD3.5 Medium with random weights in fp32, 512 px,
  batch 1. Ours (our blocks, the position table cropped to 512 px) over diffusers' own; *largest difference* of any
  token, relative. 1 on all sides: no position counts more or less than in the reference.
- *Autoencoder*: how far the outermost {RIM} pixels of decoded latents are from the picture, in levels of 255.
- *Pictures*: the tiny SD3 and the demo's LoRA of it (trained at 64 px), {PROMPTS} held-out prompts with the trigger,
  {STEPS} steps, guidance {GUIDANCE:g}, the same noise. How far the outermost {RIM} pixels are from the background,
  in levels of 255: an artefact at an edge would stand out in the result. *Largest difference* between sides.
- 48 px are three patches, an odd number: SD3 then sees the upper left three of the four that it was trained on, base
  and result alike, and cuts figures off on the right and below. Multiples of 32 px do not shift."""


def sides(values: np.ndarray, wide: int) -> dict[str, np.ndarray]:
    """The outermost ``wide`` columns or rows of ``values`` [h, w, ...]."""
    return {"left": values[:, :wide], "right": values[:, -wide:], "top": values[:wide], "bottom": values[-wide:]}


def bands(values: np.ndarray, wide: int) -> dict[str, float]:
    """Average the outermost ``wide`` columns or rows of ``values`` [h, w]."""
    return {side: float(band.mean()) for side, band in sides(values, wide).items()}


def gradients(layers: int | None = None, side: int = 512) -> Json:
    """Compare gradients by position between our blocks and diffusers'.

    Args:
        layers: of SD3.5 Medium; None: all.
        side: of the picture in pixels.
    """
    from diffusers import SD3Transformer2DModel

    family = SD3(pretrained="stabilityai/stable-diffusion-3.5-medium")
    config = dict(family.files.known_config())
    if layers is not None:
        config |= {"num_layers": layers, "dual_attention_layers": tuple(range(layers))}
    torch.manual_seed(0)
    model = SD3Transformer2DModel.from_config(config).requires_grad_(False)
    torch.nn.init.normal_(model.proj_out.weight, std=0.02)
    latents = torch.randn(1, *family.autoencoder.shape(side, side))
    text = torch.randn(1, 154, family.text.width)
    pooled = torch.randn(1, family.text.pooled_width)

    def by_position() -> torch.Tensor:  # [h, w], of patches
        tokens = []
        hook = model.pos_embed.register_forward_hook(lambda *called: tokens.append(called[2].requires_grad_()))
        found = model(latents, text, pooled, torch.full((1,), 500.0), return_dict=False)[0]
        hook.remove()
        (grad,) = torch.autograd.grad((found - latents).square().mean(), tokens)
        count = latents.shape[-1] // config["patch_size"]
        return grad[0].norm(dim=-1).view(count, count)

    theirs = by_position()
    use_joint_blocks(model.transformer_blocks)
    crop_positions(model.pos_embed, [(side, side)], lambda: torch.empty(0))
    ratio = (by_position() / theirs).double().numpy()
    return {**bands(ratio, len(ratio) // BAND), "most": float(np.abs(ratio - 1).max())}


def deviations(generated: list[Image.Image]) -> dict[str, float]:
    """How far the outermost pixels of each side are from the picture's background, in levels of 255.

    Backgrounds of the demo's scenes are plain and figures do not touch the border, so the median of the border is the
    background.
    """
    found = sides(np.stack([np.asarray(image, float) for image in generated], axis=2), RIM)  # each [h, w, picture, 3]
    rim = np.concatenate([side.reshape(-1, len(generated), 3) for side in found.values()])
    background = np.median(rim, axis=0)
    return {name: float(np.abs(side - background).mean()) for name, side in found.items()}


def autoencoder() -> Json:
    """How far the outermost pixels of decoded latents are from the picture, in levels of 255, by side."""
    config = resolve_folders(read_config(DEMO)[0])
    vae = config.model.autoencoder.load(torch.device("cpu"), torch.float32)
    generated = [
        demo_scenes.render(scene, seed=n)
        for n, scene in enumerate(demo_scenes.sample_scenes(PROMPTS, seed=9, held_out=True))
    ]
    values = torch.from_numpy(np.stack([np.asarray(image) for image in generated])).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        z = vae.encode(values).latent_dist.mode()  # type: ignore[operator]
        decoded = vae.decode(z).sample  # type: ignore[operator]
    error = (decoded - values).abs().mean(dim=(0, 1)).double().numpy() * 127.5
    found = bands(error, RIM)
    return {**found, "most": max(found.values()) - min(found.values()), "all": float(error.mean())}


def demo_at_sizes(names: list[str]) -> Iterator[tuple[str, Json]]:
    """Train the demo, and compare its pictures' edges with the base's, by size."""
    if not names:
        return
    scratch = tempfile.mkdtemp(prefix="simpletune-edges-")
    config = quiet_config(DEMO, scratch, "edges", [], (*ALONE, "memory.crop_positions=false"))
    result = run_result(train(config))
    prompts = prompts_of(PROMPTS, "striped", demo_scenes.STYLE_TRIGGER)
    for name in names:
        size, weights = IMAGES[name]
        found = deviations(Easel.of(config, weights or result).draw(prompts, size))
        yield name, {**found, "most": max(found.values()) - min(found.values())}


IMAGES: dict[str, tuple[tuple[int, int], Weights | None]] = {
    f"pictures, {width}x{height} px, {what}": ((width, height), weights)
    for width, height in SIZES
    for what, weights in (("base", BASE), ("result", None))
}


def run(folder: Path, minutes: float, only: str = "") -> Path:
    """Measure the missing rows."""
    results = Results(folder / "edges", COLUMNS)
    missing = [name for name, _ in results.missing(dict.fromkeys((GRADIENTS, AUTOENCODER, *IMAGES)), minutes, only)]
    for name, measure in {GRADIENTS: gradients, AUTOENCODER: autoencoder}.items():
        if name in missing:
            results.add(name, measure())
    for name, row in demo_at_sizes([name for name in missing if name in IMAGES]):
        results.add(name, row)
        say(f"bench   {name}: largest difference {row['most']:.2g}")
    return results.write_table("Edges of pictures", ABOUT, describe_machine())
