"""``make tiny-encoders``: train the two encoders that know the tiny SD3's pictures, from scratch.

``tiny_dino`` (pictures) learns to find the same figure on another background, at another place and size, among others:
figures are shapes in three styles, and shapes in shapes. ``tiny_clip`` (pictures and captions) learns which caption
belongs to which picture; some of its captions leave out the style, or call a shape a figure. Neither sees the demo's
own figure, nor a triple of shape, colour and background that the tiny SD3 was not trained on.

Legend: b pictures, d width of an embedding, s side of a picture after preprocessing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from benchmarks.tiny_models import vocabulary
from benchmarks.tiny_models.log import log_line
from benchmarks.tiny_models.tiny_encoders_data import SIDE, TABLES, figures, scenes_with_captions, view
from simpletune.commands.evaluate.encoders import CLIP, IMAGENET, SHORTER, TRAINED, normalise, scale_and_crop
from simpletune.data.demo import ENCODERS, demo_scenes
from simpletune.system.atomic import new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PATCH, WIDTH, LAYERS, HEADS = 8, 64, 3, 4
TEXT_WIDTH, TEXT_LAYERS, TEXT_HEADS = 64, 2, 4
DINO_STEPS, CLIP_STEPS, BATCH, PEAK_LR = 800, 1600, 96, 2e-3
FIGURES, VIEWS, SCENES = 3000, 4, 16_384
TEMPERATURE = 0.1  # of the contrastive loss
NOISE = 0.03  # standard deviation of the noise on pictures in 0..1; an autoencoder leaves about as much
CARD = Path(__file__).with_name("tiny_encoders_card.md")
UNKNOWN = -100  # cross-entropy's ignore_index


def bytes_of(drawn: Sequence[Image.Image], shorter: int) -> Tensor:  # [b, s, s, 3] of bytes
    """Preprocess pictures up to their normalisation."""
    return torch.from_numpy(np.stack([np.asarray(scale_and_crop(each, shorter, SIDE)) for each in drawn]))


def noisy(values: Tensor, norm: tuple, rng: torch.Generator) -> Tensor:  # [b, s, s, 3] -> [b, 3, s, s]
    """Normalise pictures; blur half of them a little and add noise, as an autoencoder does."""
    shown = values.permute(0, 3, 1, 2).float() / 255
    blurred = F.avg_pool2d(F.pad(shown, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    share = torch.rand(len(shown), 1, 1, 1, generator=rng).clamp(min=0.5) * 2 - 1  # 0 for half of them
    shown = shown + share * (blurred - shown) + NOISE * torch.randn(shown.shape, generator=rng)
    mean, deviation = (torch.tensor(each).view(1, 3, 1, 1) for each in norm)
    return (shown - mean) / deviation


def tower() -> dict[str, int]:
    """Return the sizes of both vision transformers."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS}
    return sizes | {"num_attention_heads": HEADS, "image_size": SIDE, "patch_size": PATCH}


def fit(parameters: Sequence[nn.Parameter], steps: int, loss: Callable[[int], Tensor], log: Path) -> None:
    """Train by AdamW with warm-up and a linear decay; log every 100 steps.

    Args:
        parameters: parameters to train.
        steps: number of steps.
        loss: computes the loss of a step from its number.
        log: JSON lines.
    """
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LR, weight_decay=0.05)
    began = time.monotonic()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = PEAK_LR * min(1.0, (step + 1) / 100, 1.5 * (1 - step / steps))
        value = loss(step)
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            seconds = round(time.monotonic() - began, 1)
            log_line(log, {"step": step + 1, "loss": round(value.item(), 4), "seconds": seconds})


def train_dino(log: Path, steps: int, seed: int = 0) -> PreTrainedModel:
    """Train the picture encoder: two views of a figure attract each other among views of others (NT-Xent,
    arXiv:2002.05709, eq. 1).

    Args:
        log: JSON lines.
        steps: number of steps of `BATCH` figures.
        seed: seed of weights, figures and order.
    """
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(seed)
    model = ViTModel(ViTConfig(**tower()), add_pooling_layer=False)
    chosen = figures(FIGURES, seed)
    drawn = [view(figure, VIEWS * number + which) for number, figure in enumerate(chosen) for which in range(VIEWS)]
    pool = bytes_of(drawn, round(SIDE * SHORTER / TRAINED)).unflatten(0, (len(chosen), VIEWS))
    rng = torch.Generator().manual_seed(seed)

    def loss(step: int) -> Tensor:
        rows = torch.randperm(len(chosen), generator=rng)[:BATCH]
        one, other = torch.randperm(VIEWS, generator=rng)[:2].tolist()
        both = noisy(torch.cat([pool[rows, one], pool[rows, other]]), IMAGENET, rng)
        unit = F.normalize(model(pixel_values=both).last_hidden_state[:, 0], dim=-1)  # [2b, d]
        cosines = (unit @ unit.T / TEMPERATURE).fill_diagonal_(-torch.inf)
        return F.cross_entropy(cosines, torch.arange(2 * BATCH).roll(BATCH))

    fit(list(model.parameters()), steps, loss, log)
    return model.eval()


def train_clip(folder: Path, log: Path, steps: int, seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Train the encoder of pictures and captions: contrast in both directions (arXiv:2103.00020, figure 3), and predict
    each attribute from each embedding by a linear layer that is discarded afterwards.

    Args:
        folder: where to write the tokenizer.
        log: JSON lines.
        steps: number of steps of `BATCH` pictures and captions.
        seed: seed of weights, scenes and order.
    """
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    torch.manual_seed(seed)
    vocabulary.write_clip(folder, demo_scenes.words())
    tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    text = {"hidden_size": TEXT_WIDTH, "intermediate_size": 2 * TEXT_WIDTH, "num_hidden_layers": TEXT_LAYERS}
    text |= {"num_attention_heads": TEXT_HEADS, "vocab_size": len(tokenizer)}
    text |= {"max_position_embeddings": vocabulary.CLIP_LENGTH, "bos_token_id": tokenizer.bos_token_id}
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=tower(), projection_dim=TEXT_WIDTH))
    heads = nn.ModuleDict({name: nn.Linear(TEXT_WIDTH, len(table)) for name, table in TABLES.items()})
    drawn, captions, known = scenes_with_captions(SCENES, seed + 2, held_out=False)
    pool = bytes_of(drawn, SIDE)
    ids = tokenizer(captions, padding="max_length", max_length=vocabulary.CLIP_LENGTH, return_tensors="pt")
    labels = {
        name: torch.tensor([index_of(table, getattr(each, name)) for each in known]) for name, table in TABLES.items()
    }
    rng = torch.Generator().manual_seed(seed)

    def loss(step: int) -> Tensor:
        rows = torch.randperm(len(pool), generator=rng)[:BATCH]
        shown = model(
            pixel_values=noisy(pool[rows], CLIP, rng), input_ids=ids.input_ids[rows],
            attention_mask=ids.attention_mask[rows],
        )  # fmt: skip
        own = torch.arange(BATCH)
        total = F.cross_entropy(shown.logits_per_image, own) + F.cross_entropy(shown.logits_per_text, own)
        for name, head in heads.items():
            both = head(torch.cat([shown.image_embeds, shown.text_embeds])) * 10  # they have length 1
            total = total + F.cross_entropy(both, labels[name][rows].repeat(2), ignore_index=UNKNOWN)
        return total

    fit([*model.parameters(), *heads.parameters()], steps, loss, log)
    return model.eval(), tokenizer


def index_of(table: Sequence[str], value: str) -> int:
    """Return the index of a value in its table; `UNKNOWN` for one that a caption leaves out."""
    return table.index(value) if value else UNKNOWN


@torch.no_grad()
def dino_accuracy(model: PreTrainedModel, count: int = 200, seed: int = 99) -> float:
    """Measure how often the nearest of ``count`` other pictures shows the same figure, for figures not trained on."""
    seen = set(figures(FIGURES, 0))
    chosen = [figure for figure in figures(4 * count, seed) if figure not in seen][:count]
    views = [[view(figure, 10**6 + 2 * number + which) for number, figure in enumerate(chosen)] for which in range(2)]
    shorter = round(SIDE * SHORTER / TRAINED)
    cut = [[scale_and_crop(each, shorter, SIDE) for each in drawn] for drawn in views]
    one, other = (
        F.normalize(model(pixel_values=normalise(each, IMAGENET)).last_hidden_state[:, 0], dim=-1) for each in cut
    )
    return float(((one @ other.T).argmax(-1) == torch.arange(len(chosen))).float().mean())


@torch.no_grad()
def clip_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int = 200) -> dict[str, float]:
    """Measure how often a picture of a held-out triple is nearer to its caption than to one with another value, by
    attribute; and as ``caption``, how often its own caption is the nearest of all."""
    drawn, captions, scenes = scenes_with_captions(count, 98, held_out=True)
    rng = np.random.default_rng(98)
    pixels = normalise([scale_and_crop(each, SIDE, SIDE) for each in drawn], CLIP)

    def embedded(texts: list[str]) -> Tensor:  # [b, d]
        ids = tokenizer(texts, padding="max_length", max_length=vocabulary.CLIP_LENGTH, return_tensors="pt")
        shown = model(pixel_values=pixels, **ids)
        found["pictures"] = shown.image_embeds
        return shown.text_embeds

    found: dict[str, Tensor] = {}
    own = embedded(captions)
    nearest = (found["pictures"] @ own.T).argmax(-1).tolist()
    result = {
        "caption": float(np.mean([captions[place] == text for place, text in zip(nearest, captions, strict=True)]))
    }
    right = (found["pictures"] * own).sum(-1)
    for name, table in TABLES.items():
        others = [replace(s, **{name: str(rng.choice([v for v in table if v != getattr(s, name)]))}) for s in scenes]
        wrong = embedded([demo_scenes.caption(scene, number) for number, scene in enumerate(others)])
        result[name] = float((right > (found["pictures"] * wrong).sum(-1)).float().mean())
    return {name: round(value, 4) for name, value in result.items()}


def write(model: PreTrainedModel, folder: Path) -> None:
    """Write a model in half precision; its configuration says float32, like those of the tiny SD3's encoders."""
    nn.Module.to(model, torch.float16).save_pretrained(folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), "dtype": "float32"}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "model.safetensors").chmod(0o644)


def card(accuracy: Mapping[str, Mapping[str, float]]) -> str:
    """Insert the measured accuracies into the model card."""
    rows = [f"| `tiny_dino` | which of 200 other pictures shows the same figure, one that was never trained on? | "
            f"{accuracy['tiny_dino']['figure']:.1%} | 0.5% |"]  # fmt: skip
    for name, value in accuracy["tiny_clip"].items():
        asked = f"is the caption nearer than one with another {name}?", "50%"
        asked = ("which of 200 captions belongs to a picture?", "0.5%") if name == "caption" else asked
        rows.append(f"| `tiny_clip` | {asked[0]} | {value:.1%} | {asked[1]} |")
    return CARD.read_text(encoding="utf-8").replace("{accuracy}", "\n".join(rows))


def make(folder: Path, dino_steps: int = DINO_STEPS, clip_steps: int = CLIP_STEPS) -> None:
    """Train both encoders, measure them and write them with their log and card.

    Args:
        folder: replaced if it exists.
        dino_steps: steps of the picture encoder.
        clip_steps: steps of the encoder of pictures and captions.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with new_folder(folder) as part:
        dino = train_dino(part / "tiny_dino_log.jsonl", dino_steps)
        clip, tokenizer = train_clip(part / "tiny_clip", part / "tiny_clip_log.jsonl", clip_steps)
        accuracy = {"tiny_dino": {"figure": round(dino_accuracy(dino), 4)}, "tiny_clip": clip_accuracy(clip, tokenizer)}
        (part / "accuracy.json").write_text(json.dumps(accuracy, indent=2) + "\n", encoding="utf-8")
        write(dino, part / "tiny_dino")
        write(clip, part / "tiny_clip")
        (part / "README.md").write_text(card(accuracy), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train the tiny SD3's two encoders")
    parser.add_argument("--out", type=Path, default=ENCODERS["demo:tiny-dino"].parent, help="folder for the result")
    parser.add_argument("--dino-steps", type=int, default=DINO_STEPS)
    parser.add_argument("--clip-steps", type=int, default=CLIP_STEPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # faster for models of this size, and sums have a fixed order
    make(arguments.out, arguments.dino_steps, arguments.clip_steps)
