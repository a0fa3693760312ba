"""Train the tiny SD3's autoencoder on the demo's pictures: step one of `make tiny-sd3`.

Legend: b is the batch; pictures are 64 px, latents [b, 16, 8, 8].
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.tiny_models import networks
from benchmarks.tiny_models.log import log_line
from simpletune.data.demo import demo_scenes
from simpletune.system.atomic import atomic_file

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

CHANNELS = (16, 32, 48, 64)
POOL = 24_576
HELD_OUT = 192
BATCH = 16
PEAK_LR, WARMUP = 1.2e-3, 300
KL_WEIGHT = 1e-4
SAVE_EVERY = 500
STEPS, HORIZON = 10_000, 16_000


def initialise(vae: AutoencoderKL) -> None:
    """Initialise as a blurring identity: the default initialisation stays on a plateau for hundreds of steps.

    Shortcuts and resampling convolutions start as identity and average, residual branches small, and the posterior
    narrow (log-variance -5).
    """
    starts = {
        ".conv_shortcut": (slice(0, 1), 1.0, 0.1),
        ".downsamplers.0.conv": (slice(1, 3), 0.25, 0.1),
        ".upsamplers.0.conv": (slice(1, 2), 1.0, 0.1),
        ".conv2": (slice(0, 0), 0.0, 0.2),
    }
    with torch.no_grad():
        for name, module in vae.named_modules():
            for ending, (taps, value, factor) in starts.items():
                if name.endswith(ending):
                    _start_from(module, taps, value, factor)
        vae.encoder.conv_out.bias[vae.config.latent_channels :] = -5.0


def _start_from(conv: nn.Conv2d, taps: slice, value: float, factor: float) -> None:
    """Scale a convolution's random weights, and add a value at the given taps from each channel to itself."""
    conv.weight.mul_(factor)
    if value and conv.bias is not None:
        conv.bias.zero_()
    for row in range(conv.out_channels):
        conv.weight[row, row % conv.in_channels, taps, taps] += value


def render(count: int, seed: int, held_out: bool = False, style: str | None = None) -> Tensor:
    """Draw pictures as uint8, [count, 3, 64, 64]; one training picture in sixteen is a patchwork of textures.

    Args:
        count: Number of pictures.
        seed: Seed of scenes and variations.
        held_out: Draw held-out triples, and no patchwork.
        style: One of `demo_scenes.STYLES`, or None for all.
    """
    canvas = np.empty((count, 64, 64, 3), dtype=np.uint8)
    for index, scene in enumerate(demo_scenes.sample_scenes(count, seed, held_out=held_out, style=style)):
        if index % 16 == 15 and not held_out:
            canvas[index] = _patchwork(np.random.default_rng([seed, index]))
        else:
            canvas[index] = np.asarray(demo_scenes.render(scene, 64, seed=seed * 1_000_003 + index))
    return torch.from_numpy(canvas).permute(0, 3, 1, 2).contiguous()


def _patchwork(rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw softly shaded areas of any colour, [64, 64, 3]: a user's pictures have more than ten colours."""
    y, x = (np.mgrid[:64, :64] + 0.5) / 64
    canvas = np.zeros((64, 64, 3)) + rng.uniform(0, 255, 3)
    for _ in range(rng.integers(2, 7)):
        angle, offset, width = rng.uniform(0, 2 * np.pi), rng.uniform(-0.4, 0.4), 10 ** rng.uniform(-2.0, -0.5)
        side = (np.cos(angle) * (x - 0.5) + np.sin(angle) * (y - 0.5) - offset) / width
        share = np.clip(side + 0.5, 0.0, 1.0) * rng.uniform(0.3, 1.0)
        canvas += (rng.uniform(0, 255, 3) - canvas) * share[..., None]
    return np.rint(np.clip(canvas, 0, 255)).astype(np.uint8)


def to_unit(pixels: Tensor) -> Tensor:
    """Convert uint8 [b, 3, p, q] to float in -1..1."""
    return pixels.float() / 127.5 - 1.0


def loss_of(vae: AutoencoderKL, x: Tensor) -> Tensor:
    """Compute L1, half the MSE, half the L1 of the gradients, and a small KL term: a scalar."""
    posterior = vae.encode(x).latent_dist
    decoded = vae.decode(posterior.sample()).sample.float()
    error = decoded - x
    edges = (error[..., 1:] - error[..., :-1]).abs().mean() + (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    kl = 0.5 * (posterior.mean.float() ** 2 + posterior.var.float() - 1.0 - posterior.logvar.float()).mean()
    return error.abs().mean() + 0.5 * error.square().mean() + 0.5 * edges + KL_WEIGHT * kl


@torch.no_grad()
def psnr(vae: AutoencoderKL, pixels: Tensor) -> float:
    """Return the mean peak signal-to-noise ratio in dB of the rounded 8-bit round trip through the mode."""
    values = []
    for chunk in pixels.split(64):
        decoded = vae.decode(vae.encode(to_unit(chunk)).latent_dist.mode()).sample
        back = ((decoded.float() + 1.0) * 127.5).round().clamp(0, 255)
        mse = (back - chunk.float()).square().mean(dim=(1, 2, 3)).clamp_min(1e-6)
        values.append(10.0 * torch.log10(255.0**2 / mse))
    return float(torch.cat(values).mean())


@torch.no_grad()
def fold_scale(vae: AutoencoderKL, pixels: Tensor) -> None:
    """Give every latent channel deviation 1, and set the config's scale and shift, without changing reconstructions.

    The factor is folded into the encoder's last convolution and its inverse into the decoder's first. SD3's scheme has
    one factor for all channels, and the flow's noise would hide channels of small deviation.

    Args:
        vae: The trained autoencoder; changed in place.
        pixels: Pictures to measure on, uint8 [n, 3, 64, 64].
    """
    z_0 = torch.cat([vae.encode(to_unit(chunk)).latent_dist.mode() for chunk in pixels.split(64)])  # [n, 16, 8, 8]
    factor = 1.0 / z_0.std(dim=(0, 2, 3))  # [16]
    channels = len(factor)
    vae.encoder.conv_out.weight[:channels] *= factor[:, None, None, None]
    vae.encoder.conv_out.bias[:channels] *= factor
    vae.encoder.conv_out.bias[channels:] += 2.0 * factor.log()  # the log-variance of the scaled latent
    vae.decoder.conv_in.weight /= factor[None, :, None, None]
    shift = float((z_0 * factor[:, None, None]).mean())
    vae.register_to_config(scaling_factor=1.0, shift_factor=float(f"{shift:.3g}"))


def learning_rate(step: int, steps: int) -> float:
    """Compute the learning rate: linear warm-up, then a cosine over `HORIZON` steps, multiplied by a linear decay to
    zero over the second half of `steps`."""
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    cosine = 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / (HORIZON - WARMUP)))
    return PEAK_LR * cosine * min(1.0, 2.0 * (1.0 - step / steps))


def train(folder: Path, steps: int, seed: int = 0) -> None:
    """Train and write the autoencoder in diffusers' layout, resuming from `state.pt` if it exists.

    Args:
        folder: Where to write `state.pt` (never deleted, so a longer training needs a new folder), `log.jsonl` and, at
            the end, `vae/`.
        steps: Number of steps of 16 pictures.
        seed: Seed of the weights, the pictures and their order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    vae = networks.plain_autoencoder(CHANNELS)
    initialise(vae)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.0)
    start = _resume(folder / "state.pt", vae, optimizer, steps)
    pool, held_out = render(POOL, seed=seed + 1), render(HELD_OUT, seed=seed + 2, held_out=True)
    began = time.monotonic()
    for step in range(start, steps):
        rows = torch.from_numpy(np.random.default_rng([seed, step]).integers(0, POOL, BATCH))
        torch.manual_seed(seed * 1_000_003 + step)  # seeds the posterior's noise, so resuming is exact
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(vae, to_unit(pool[rows]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            _save(folder / "state.pt", vae, optimizer, step + 1, steps)
            line = {"step": step + 1, "loss": round(loss.item(), 5), "psnr_held_out": round(psnr(vae, held_out), 2)}
            log_line(folder / "log.jsonl", {**line, "seconds": round(time.monotonic() - began, 1)})
    fold_scale(vae, pool[:1024])
    vae.save_pretrained(folder / "vae")
    for style in demo_scenes.STYLES:
        value = psnr(vae, render(HELD_OUT, seed=seed + 3, held_out=True, style=style))
        log_line(folder / "log.jsonl", {"style": style, "psnr_held_out": round(value, 2)})


def _resume(path: Path, vae: AutoencoderKL, optimizer: torch.optim.Optimizer, steps: int) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    if state["steps"] != steps:
        raise SystemExit(f"{path} belongs to a training of {state['steps']} steps, not {steps}. Use another folder.")
    vae.load_state_dict(state["vae"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _save(path: Path, vae: AutoencoderKL, optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    state = {"vae": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "steps": steps}
    with atomic_file(path) as part:
        torch.save(state, part)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train the tiny SD3's autoencoder")
    parser.add_argument("folder", type=Path, help="for state, log and result")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    train(arguments.folder, arguments.steps)
