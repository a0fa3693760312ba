"""Train the tiny SD3's three text encoders on captions alone: step two of `make tiny-sd3`.

Each encoder learns to predict a caption's attributes from its pooled output and from the mean of its states, and every
token from its own state, including meaningless words, which fine-tuning will teach.

Legend: b captions, t tokens, w an encoder's width.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.tiny_models import networks, vocabulary
from benchmarks.tiny_models.checker import ATTRIBUTES
from benchmarks.tiny_models.log import log_line
from simpletune.data.demo import demo_scenes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CLIP_WIDTHS, T5_WIDTH = (32, 48), 96
POOL, BATCH, PEAK_LR = 32_768, 64, 2e-3
T5_TOKENS = 24
STEPS = 1200
TABLES: Mapping[str, tuple[str, ...]] = {
    "shape": tuple(demo_scenes.SHAPES),
    "colour": tuple(demo_scenes.COLOURS),
    "background": tuple(demo_scenes.BACKGROUNDS),
    "size": tuple(demo_scenes.SIZES),
    "position": tuple(demo_scenes.POSITIONS),
    "style": demo_scenes.STYLES,
}
UNKNOWN = -100  # cross-entropy's ignore_index, for the style of a caption with a trigger word


@dataclass
class Reader:
    """An encoder with its classification heads for training.

    Args:
        name: folder to save it in.
        tokenizer: the encoder's tokenizer.
        encoder: a CLIP text model or a T5 encoder.
        length: t.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    encoder: PreTrainedModel
    length: int

    def __post_init__(self) -> None:
        width = self.encoder.config.hidden_size
        self.heads = nn.ModuleDict({name: nn.Linear(width, len(table)) for name, table in TABLES.items()})
        self.pooled_heads = nn.ModuleDict({name: nn.Linear(width, len(table)) for name, table in TABLES.items()})
        self.words = nn.Linear(width, len(self.tokenizer))

    def parameters(self) -> list[nn.Parameter]:
        """Return all trained parameters."""
        parts = (self.encoder, self.heads, self.pooled_heads, self.words)
        return [parameter for part in parts for parameter in part.parameters()]

    def tokens(self, captions: list[str]) -> Tensor:
        """Tokenize captions, [b, t]."""
        options = {"padding": "max_length", "max_length": self.length, "truncation": True, "return_tensors": "pt"}
        return self.tokenizer(captions, **options).input_ids

    def states(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the states that SD3 uses, [b, t, w], and CLIP's pooled output, [b, w]."""
        if self.name == "text_encoder_3":
            return self.encoder(ids)[0], None
        output = self.encoder(ids, output_hidden_states=True)
        return output.hidden_states[-2], output.text_embeds

    def loss(self, captions: list[str], labels: Mapping[str, Tensor]) -> Tensor:
        """Compute the loss of attributes from mean state and pooled output, of tokens from states, and of unit size."""
        ids = self.tokens(captions)
        hidden, pooled = self.states(ids)
        real = (ids != self.tokenizer.pad_token_id).float()[..., None]  # [b, t, 1]
        mean = (hidden * real).sum(1) / real.sum(1)
        loss = _attribute_loss(self.heads, mean, labels)
        loss = loss + 0.5 * functional.cross_entropy(self.words(hidden).flatten(0, 1), ids.flatten())
        loss = loss + 0.1 * (hidden.square().mean() - 1.0).square()
        if pooled is not None:
            loss = loss + _attribute_loss(self.pooled_heads, pooled, labels)
            loss = loss + 0.1 * (pooled.square().mean() - 1.0).square()
        return loss

    @torch.no_grad()
    def accuracy(self, captions: list[str], labels: Mapping[str, Tensor]) -> float:
        """Return the share of attributes predicted correctly from the pooled output (T5: from the mean state)."""
        ids = self.tokens(captions)
        hidden, pooled = self.states(ids)
        real = (ids != self.tokenizer.pad_token_id).float()[..., None]
        heads, source = self.pooled_heads, pooled
        if pooled is None:
            heads, source = self.heads, (hidden * real).sum(1) / real.sum(1)
        return float(np.mean([(heads[name](source).argmax(-1) == labels[name]).float().mean() for name in ATTRIBUTES]))


def _attribute_loss(heads: nn.ModuleDict, source: Tensor, labels: Mapping[str, Tensor]) -> Tensor:
    losses = [functional.cross_entropy(heads[name](source), labels[name]) for name in ATTRIBUTES]
    return torch.stack(losses).nan_to_num().mean()  # without any known style the mean is NaN


def captions_of(count: int, seed: int, held_out: bool = False) -> tuple[list[str], dict[str, Tensor]]:
    """Generate captions of random scenes, and their attributes.

    A sixth of the captions has a trigger word instead of the style, a sixth has stray words and letters inserted.

    Args:
        count: b.
        seed: seed of all random choices.
        held_out: return plain captions of held-out triples instead.

    Returns:
        The captions, and for each of `ATTRIBUTES` the value's index in its table, [b].
    """
    rng = np.random.default_rng([seed, 7])
    captions, scenes = [], demo_scenes.sample_scenes(count, seed, held_out=held_out)
    known = {name: [TABLES[name].index(getattr(scene, name)) for scene in scenes] for name in ATTRIBUTES}
    for index, scene in enumerate(scenes):
        kind = 5 if held_out else int(rng.integers(6))
        trigger = None
        if kind == 0:
            trigger = demo_scenes.MEANINGLESS[1 - int(rng.integers(2))]
            known["style"][index] = UNKNOWN
        text = demo_scenes.caption(scene, int(rng.integers(len(demo_scenes.TEMPLATES))), trigger)
        captions.append(_with_strays(text, rng) if kind == 1 else text)
    return captions, {name: torch.tensor(values) for name, values in known.items()}


def _with_strays(text: str, rng: np.random.Generator) -> str:
    """Insert one to three strings of random letters, or trigger words, between the words of a caption."""
    words = text.split()
    for _ in range(int(rng.integers(1, 4))):
        letters = "".join(chr(97 + code) for code in rng.integers(26, size=int(rng.integers(1, 4))))
        stray = (letters, *reversed(demo_scenes.MEANINGLESS))[int(rng.integers(3))]
        words.insert(int(rng.integers(len(words) + 1)), stray)
    return " ".join(words)


def train(folder: Path, steps: int, seed: int = 0) -> None:
    """Train and write tokenizers and encoders in the pipeline's layout.

    Args:
        folder: for new `tokenizer*/`, `text_encoder*/` and `text_log.jsonl`.
        steps: number of steps of 64 captions; training takes a few minutes and cannot be resumed.
        seed: seed of weights and captions.
    """
    from transformers import CLIPTokenizer, T5TokenizerFast

    torch.manual_seed(seed)
    readers = []
    for suffix, width in zip(("", "_2"), CLIP_WIDTHS, strict=True):
        vocabulary.write_clip(folder / f"tokenizer{suffix}", demo_scenes.words())
        encoder = networks.clip(folder / f"tokenizer{suffix}", width, "gelu" if suffix else "quick_gelu")
        tokenizer = CLIPTokenizer.from_pretrained(folder / f"tokenizer{suffix}", local_files_only=True)
        readers.append(Reader(f"text_encoder{suffix}", tokenizer, encoder, vocabulary.CLIP_LENGTH))
    vocabulary.write_t5(folder / "tokenizer_3", demo_scenes.words())
    tokenizer = T5TokenizerFast.from_pretrained(folder / "tokenizer_3", local_files_only=True)
    readers.append(Reader("text_encoder_3", tokenizer, networks.t5(folder / "tokenizer_3", T5_WIDTH), T5_TOKENS))

    optimizer = torch.optim.AdamW([p for reader in readers for p in reader.parameters()], lr=PEAK_LR)
    pool, shown = captions_of(POOL, seed=seed + 2)
    held_out = captions_of(512, seed=seed + 1, held_out=True)
    began = time.monotonic()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = PEAK_LR * min(1.0, (step + 1) / 100, 2.0 * (1.0 - step / steps))
        rows = np.random.default_rng([seed, step]).integers(0, POOL, BATCH)
        captions, labels = [pool[row] for row in rows], {name: values[rows] for name, values in shown.items()}
        loss = torch.stack([reader.loss(captions, labels) for reader in readers]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 250 == 0 or step + 1 == steps:
            scores = {reader.name: round(reader.accuracy(*held_out), 4) for reader in readers}
            line = {"step": step + 1, "loss": round(loss.item(), 4), "held_out": scores}
            log_line(folder / "text_log.jsonl", {**line, "seconds": round(time.monotonic() - began, 1)})
    for reader in readers:
        reader.encoder.save_pretrained(folder / reader.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train the tiny SD3's text encoders")
    parser.add_argument("folder", type=Path, help="for tokenizers, encoders and the log")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    train(arguments.folder, arguments.steps)
