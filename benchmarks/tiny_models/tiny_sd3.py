"""Write a tiny Stable Diffusion 3 with random weights, in the exact folder layout of diffusers' pipeline.

It has all nine components and loads offline; it draws noise until it is trained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.tiny_models import networks, vocabulary
from benchmarks.tiny_models.networks import TORCH_DTYPES, Dtype
from simpletune.data.demo import demo_scenes
from simpletune.system.atomic import new_folder

if TYPE_CHECKING:
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

VERSION = 1
"""Increase it whenever `build` writes other bytes for the same arguments: the names of cached folders include it."""

COMPONENTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_3": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "CLIPTokenizer"),
    "tokenizer_3": ("transformers", "T5TokenizerFast"),
    "transformer": ("diffusers", "SD3Transformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the four networks.

    Args:
        layers: Joint blocks of the transformer.
        heads: Attention heads of 64; the hidden width is 64 times this. ComfyUI needs as many heads as layers.
        vae_channels: Channels of the autoencoder's four levels, multiples of 8.
        clip_widths: Hidden and projected widths of the two CLIP encoders, multiples of 16.
        t5_width: Width of T5 and of the transformer's text input, a multiple of 32 and at least the sum of
            `clip_widths`.

    Raises:
        ValueError: The sizes are invalid.
    """

    layers: int = 3
    heads: int = 3
    vae_channels: tuple[int, int, int, int] = (16, 32, 48, 64)
    clip_widths: tuple[int, int] = (32, 48)
    t5_width: int = 96

    def __post_init__(self) -> None:
        if self.layers != self.heads or self.layers < 1:
            raise ValueError(
                f"layers {self.layers} and heads {self.heads}: ComfyUI infers both from the hidden width. Use equal "
                "numbers of at least 1."
            )
        if len(self.vae_channels) != 4 or any(width < 8 or width % 8 for width in self.vae_channels):
            raise ValueError(
                f"vae_channels {self.vae_channels} are not four multiples of 8. Use, for example, (16, 32, 48, 64)."
            )
        if any(width < 16 or width % 16 for width in self.clip_widths):
            raise ValueError(f"clip_widths {self.clip_widths} are not multiples of 16. Use, for example, (32, 48).")
        least = sum(self.clip_widths)
        if self.t5_width % 32 or self.t5_width < least:
            raise ValueError(
                f"t5_width {self.t5_width} is not a multiple of 32 of at least {least}, the sum of clip_widths."
                f" Use {-(-least // 32) * 32}."
            )


MINIMAL = Sizes(layers=1, heads=1, vae_channels=(8, 8, 8, 8), clip_widths=(16, 16), t5_width=32)
"""The smallest possible SD3, for tests. Its only block is also the last one: text leaves it only through keys and
values, so `add_q_proj` gets no gradient and there is no `to_add_out`."""


def build(
    folder: Path, sizes: Sizes = Sizes(), *, seed: int = 0, dtype: Dtype = "bf16", tokenizers: Path | None = None
) -> None:
    """Write the pipeline folder atomically; the same arguments give the same bytes.

    Args:
        folder: Must not exist, or be empty.
        sizes: Sizes of the networks.
        seed: Seed of the weights. No global random state is read or changed.
        dtype: Type of all weights on disk.
        tokenizers: A folder with `tokenizer`, `tokenizer_2` and `tokenizer_3` to copy, such as SD3's. None: write
            the project's own, with one token for each word of the demo's captions.

    Raises:
        ValueError: The type is unknown.
        FileExistsError: The folder is not empty.
    """
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown. Use one of {', '.join(TORCH_DTYPES)}.")
    with new_folder(folder) as sibling, _quiet():
        _write_tokenizers(sibling, tokenizers)
        for index, (name, width) in enumerate(zip(("", "_2"), sizes.clip_widths, strict=True)):
            with seeded(seed, index):
                clip = networks.clip(sibling / f"tokenizer{name}", width, "gelu" if name else "quick_gelu")
            save_model(clip, sibling / f"text_encoder{name}", dtype)
        with seeded(seed, 2):
            t5 = networks.t5(sibling / "tokenizer_3", sizes.t5_width)
        save_model(t5, sibling / "text_encoder_3", dtype)
        with seeded(seed, 3):
            transformer = networks.transformer(sizes.layers, sizes.t5_width, sum(sizes.clip_widths))
        save_model(transformer, sibling / "transformer", dtype)
        with seeded(seed, 4):
            vae = networks.autoencoder(sizes.vae_channels, dtype)
        save_model(vae, sibling / "vae", dtype)
        write_scheduler_and_index(sibling)


@contextmanager
def seeded(seed: int, stream: int) -> Iterator[None]:
    """Seed the CPU's global generator, from which the libraries initialise, and restore it afterwards."""
    import torch

    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed * 16 + stream)  # torch.manual_seed would reseed CUDA too
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable transformers' progress bars: files of a megabyte need none."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_model(model: ModelMixin | PreTrainedModel, folder: Path, dtype: Dtype) -> None:
    """Cast a model in place and write it."""
    networks.cast(model, dtype).save_pretrained(folder)
    # As in the real repository, an encoder's config says float32 whatever the type of the file: transformers 5 loads
    # in the config's type, diffusers in float32, and a pipeline of both types fails at its first multiplication.
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)  # the folder that it was read from
    if "dtype" in config:
        config["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_tokenizers(folder: Path, source: Path | None) -> None:
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        if source is not None:
            shutil.copytree(source / name, folder / name, copy_function=shutil.copyfile)
            (folder / name).chmod(0o755)  # the source may be read-only
        elif name == "tokenizer_3":
            vocabulary.write_t5(folder / name, demo_scenes.words())
        else:
            vocabulary.write_clip(folder / name, demo_scenes.words())


def write_scheduler_and_index(folder: Path) -> None:
    """Write `scheduler/` and `model_index.json`."""
    import diffusers

    # Use shift 1, no shift: SD3's 3 compensates for the redundancy of 1024 px. By the paper's square-root-of-area rule
    # 64 px would get less than 1.
    diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0).save_pretrained(folder / "scheduler")
    # Write the index by hand: transformers 5 would write T5Tokenizer, which diffusers' layout calls T5TokenizerFast.
    index: dict[str, object] = {"_class_name": "StableDiffusion3Pipeline", "_diffusers_version": diffusers.__version__}
    index |= {name: list(source) for name, source in COMPONENTS.items()}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
