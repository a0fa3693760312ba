"""The first losses of a training run, computed without the package under test.

    python tests/reference/train.py PIPELINE DATA_FOLDER settings.json [--lora FILE]

prints them as a JSON list. Everything is fp32 on the CPU; AdamW, clipping and the model are written out by hand.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import image_files
import mmdit
import numpy as np
import text
import torch
from plan import MicroBatch, Settings, buckets, draw_dropped, draw_noise, draw_sigma, micro_batches
from safetensors.torch import load_file
from torch import Tensor

Images = Sequence[tuple[Path | str, str]]


@dataclass(frozen=True)
class Prepared:
    """The data of a run, encoded once."""

    z_0: list[Tensor]  # per sample [16, h/8, w/8]
    prompt_embeds: Tensor  # [samples + 1, l, width]; the last row is the empty string
    pooled: Tensor  # [samples + 1, pooled width]
    steps: list[list[MicroBatch]]


def prepare(pipeline: Path, images: Images, settings: Settings) -> Prepared:
    """Sorts the pictures by path, encodes them and their captions, and lays out the steps."""
    samples = sorted((Path(path).absolute().as_posix(), caption) for path, caption in images)
    candidates = buckets(settings.resolution, settings.max_aspect)
    members, z_0 = image_files.encode(pipeline, [Path(path) for path, _ in samples], candidates)
    captions = [caption for _, caption in samples] + [""]
    prompt_embeds, pooled = text.encode(pipeline, captions, settings.t5, settings.t5_length)
    return Prepared(z_0, prompt_embeds, pooled, micro_batches(settings, members))


def micro_batch_loss(model: mmdit.MMDiT, data: Prepared, settings: Settings, batch: MicroBatch) -> Tensor:
    """Mean squared error of the velocity at z_t = (1 - sigma) z_0 + sigma noise (arXiv:2403.03206, eq. 13)."""
    places = [(batch.step, batch.micro, batch.first + i) for i in range(len(batch.samples))]
    z_0 = torch.stack([data.z_0[sample] for sample in batch.samples])  # [b, 16, h/8, w/8]
    shape = tuple(z_0.shape[1:])
    noise = torch.stack([torch.from_numpy(draw_noise(settings, *place, shape)) for place in places])
    sigma = torch.from_numpy(np.stack([draw_sigma(settings, *place) for place in places]))  # [b]
    dropped = [draw_dropped(settings, *place) for place in places]
    rows = [-1 if gone else sample for gone, sample in zip(dropped, batch.samples, strict=True)]
    level = sigma[:, None, None, None]
    z_t = (1 - level) * z_0 + level * noise
    velocity = mmdit.predict(model, z_t, 1000 * sigma, data.prompt_embeds[rows], data.pooled[rows])
    return (velocity - (noise - z_0)).square().mean()


def clip(gradients: list[Tensor], clip_norm: float) -> float:
    """Scales gradients in place to at most this global norm, as torch's clip_grad_norm_; returns their norm."""
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    for gradient in gradients:
        gradient *= min(1.0, clip_norm / (norm + 1e-6))
    return norm


def adamw(parameter: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: int, settings: Settings) -> None:
    """One update with decoupled weight decay, in place (arXiv:1711.05101, algorithm 2); steps count from 1."""
    beta_1, beta_2 = settings.betas
    m.copy_(beta_1 * m + (1 - beta_1) * gradient)
    v.copy_(beta_2 * v + (1 - beta_2) * gradient.square())
    m_hat, v_hat = m / (1 - beta_1**step), v / (1 - beta_2**step)
    parameter *= 1 - settings.lr * settings.weight_decay
    parameter -= settings.lr * m_hat / (v_hat.sqrt() + settings.eps)


def full_method(model: mmdit.MMDiT) -> tuple[mmdit.MMDiT, list[str]]:
    """Everything trains but the table of positions, which is a buffer."""
    return model, [key for key in model.weights if key != "pos_embed.pos_embed"]


def lora_method(model: mmdit.MMDiT, file: Path, alpha: float) -> tuple[mmdit.MMDiT, list[str]]:
    """Only lora_A and lora_B train; all modules share one rank."""
    lora = {key: value.float() for key, value in load_file(file).items()}
    modules = {key.rsplit(".lora_", 1)[0] for key in lora}
    wanted = {f"{module}.lora_{side}.weight" for module in modules for side in "AB"}
    strangers = sorted((set(lora) ^ wanted) | {module for module in modules if not model.has(module)})
    if strangers:
        raise ValueError(f"{file}: these keys have no partner or no module in the transformer: {strangers}")
    ranks = {value.shape[0] for key, value in lora.items() if ".lora_A." in key}
    if len(ranks) != 1:
        raise ValueError(f"{file}: one rank for all modules is needed, found {sorted(ranks)}.")
    return replace(model, weights=model.weights | lora, lora_scale=alpha / ranks.pop()), list(lora)


def steps(model: mmdit.MMDiT, names: list[str], data: Prepared, settings: Settings) -> Iterator[tuple[float, float]]:
    """Trains the named weights in place; yields each step's loss and its gradient norm before clipping."""
    trained = [model.weights[name].requires_grad_() for name in names]
    m = [torch.zeros_like(parameter) for parameter in trained]
    v = [torch.zeros_like(parameter) for parameter in trained]
    for number, batches in enumerate(data.steps, start=1):
        total, samples = 0.0, sum(len(batch.samples) for batch in batches)
        gradients = [torch.zeros_like(parameter) for parameter in trained]
        for batch in batches:
            loss = micro_batch_loss(model, data, settings, batch) * len(batch.samples) / samples
            parts = torch.autograd.grad(loss, trained)
            gradients = [gradient + part for gradient, part in zip(gradients, parts, strict=True)]
            total += loss.item()
        norm = clip(gradients, settings.clip_norm)
        with torch.no_grad():
            for state in zip(trained, gradients, m, v, strict=True):
                adamw(*state, number, settings)
        yield total, norm


def run(
    pipeline: Path | str,
    images: Images,
    settings: Mapping[str, Any],
    method: str = "full",
    lora: Path | str | None = None,
) -> list[tuple[float, float]]:
    """As `losses`, with each step's gradient norm before clipping beside its loss."""
    chosen = Settings(**settings)
    model = mmdit.load(Path(pipeline) / "transformer")
    if method == "full":
        model, names = full_method(model)
    elif method == "lora":
        if lora is None or chosen.lora_alpha is None:
            raise ValueError('The method "lora" needs the file of its initial weights and the setting lora_alpha.')
        model, names = lora_method(model, Path(lora), chosen.lora_alpha)
    else:
        raise ValueError(f'method is "{method}", which is neither "full" nor "lora".')
    return list(steps(model, names, prepare(Path(pipeline), images, chosen), chosen))


def losses(
    pipeline: Path | str,
    images: Images,
    settings: Mapping[str, Any],
    method: str = "full",
    lora: Path | str | None = None,
) -> list[float]:
    """Computes the losses of a run's first steps.

    Args:
        pipeline: a folder in diffusers' StableDiffusion3Pipeline layout.
        pictures: (path, caption) of every picture, in any order.
        settings: the fields of `plan.Settings`.
        method: "full", or "lora".
        lora: for "lora", a safetensors file with `<module>.lora_A.weight` and `<module>.lora_B.weight` to start from.

    Returns:
        One loss a step, the mean over its samples.

    Raises:
        ValueError: an unknown method or density, or a LoRA file that does not fit the transformer.
        TypeError: an unknown or a missing setting.
    """
    return [loss for loss, _ in run(pipeline, images, settings, method, lora)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("settings", type=Path)
    parser.add_argument("--lora", type=Path, help="train a LoRA that starts from this file, not the full model")
    arguments = parser.parse_args()
    settings = json.loads(arguments.settings.read_text(encoding="utf-8"))
    found = image_files.list_folder(arguments.data_folder)
    method = "full" if arguments.lora is None else "lora"
    print(json.dumps(losses(arguments.pipeline, found, settings, method, arguments.lora)))


if __name__ == "__main__":
    main()
