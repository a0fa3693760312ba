"""From picture files to latents (part of the independent reference)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageOps
from plan import Bucket, nearest
from torch import Tensor

SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}


def list_folder(folder: Path) -> list[tuple[Path, str]]:
    """Every picture below a folder, with the text of the `.txt` beside it (none: the empty string)."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    captions = [path.with_suffix(".txt") for path in found]
    texts = [file.read_text(encoding="utf-8").strip() if file.exists() else "" for file in captions]
    return list(zip(found, texts, strict=True))


def open_upright(path: Path) -> Image.Image:
    """RGB, turned as its EXIF tag says, transparency on white."""
    image = ImageOps.exif_transpose(Image.open(path))
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def fit(image: Image.Image, bucket: Bucket) -> Tensor:  # [1, 3, h, w]
    """Scales a picture to cover its bucket, crops the centre and maps 0..255 to -1..1."""
    (pw, ph), (bw, bh) = image.size, bucket
    scale = max(bw / pw, bh / ph)
    nw, nh = max(bw, round(pw * scale)), max(bh, round(ph * scale))
    left, top = (nw - bw) // 2, (nh - bh) // 2
    cropped = image.resize((nw, nh), Image.Resampling.LANCZOS).crop((left, top, left + bw, top + bh))
    pixels = np.asarray(cropped).astype(np.float32) / 127.5 - 1
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous()


@torch.no_grad()
def encode(pipeline: Path, paths: Sequence[Path], candidates: Sequence[Bucket]) -> tuple[list[Bucket], list[Tensor]]:
    """The bucket of each picture, and its z_0 [c, h/8, w/8]: the posterior's mode, shifted and scaled."""
    vae = AutoencoderKL.from_pretrained(pipeline / "vae").float().eval()
    sizes, latents = [], []
    for path in paths:
        image = open_upright(path)
        sizes.append(nearest(candidates, *image.size))
        mode = vae.encode(fit(image, sizes[-1])).latent_dist.mode()[0]
        latents.append((mode - (vae.config.shift_factor or 0)) * vae.config.scaling_factor)
    return sizes, latents
