"""Write what a run trained on the text side: its LoRA into the LoRA file, its embeddings into a separate file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.adapters.text.files import COSINES, EmbeddingFile, write_embeddings
from simpletune.adapters.text.option import embedding_name
from simpletune.models.shared.lora_names import ALPHA, DOWN, UP, Layout
from simpletune.system.safetensors_file import WeightReader, read_header, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

    from simpletune.adapters.text.update import TextUpdate

ROLES = {"lora_A": DOWN, "lora_B": UP}


def export_embeddings(text: TextUpdate, folder: Path, run: str, metadata: Mapping[str, str]) -> Path | None:
    """Write the embeddings into a file named after run and token; None if there are none.

    Args:
        text: the trained text side.
        folder: the folder to write to.
        run: the run's name.
        metadata: strings for the header.
    """
    option = text.option.embeddings
    if option is None:
        return None
    vectors = {name: each.detach() for name, each in text.embeddings.items()} | text.t5_rows
    words = tuple(option.words())
    cosines = {COSINES: json.dumps(trained_cosines(text))} if text.first else {}
    embedding = EmbeddingFile(option.token, option.place, vectors, text.family.family, words, {**metadata, **cosines})
    return write_embeddings(folder / embedding_name(run, option.token), embedding)


def trained_cosines(text: TextUpdate) -> dict[str, list[float]]:
    """The cosine of every vector with its value before training, by encoder: how far it has moved from its word."""
    from torch.nn.functional import cosine_similarity

    pairs = {name: (each.detach().cpu().float(), text.first[name].float()) for name, each in text.embeddings.items()}
    return {name: [round(float(c), 4) for c in cosine_similarity(*pair, dim=1)] for name, pair in pairs.items()}


def export_lora(text: TextUpdate, file: Path, metadata: Mapping[str, str]) -> Path | None:
    """Add the text encoders' LoRA to the LoRA file, or write a new one; returns None if there is no such LoRA.

    Args:
        text: the trained text side.
        file: the file of the denoiser's LoRA, which need not exist.
        metadata: strings for the header of a new file.
    """
    state = text_lora_tensors(text)
    if not state:
        return None
    known: dict[str, Tensor] = {}
    header = dict(metadata)
    if file.exists():
        known = WeightReader([file]).get_all()
        header = {key: value for key, value in read_header(file)["__metadata__"].items() if key != "format"}
    return write_safetensors({**known, **state}, file, header)


def text_lora_tensors(text: TextUpdate) -> dict[str, Tensor]:
    """The factors of the text encoders' updates, by their keys in the layout of the family's results.

    Without a tensor for alpha, the scale is folded into the second factor.
    """
    import torch

    from simpletune.adapters.methods.lora_layers import lora_state

    option, layout = text.option.lora, text.family.lora[0]
    if option is None:
        return {}
    parts = {encoder.name: encoder.model for encoder in text.family.encoders()}
    state: dict[str, Tensor] = {}
    for name in text.with_lora():
        for factor, tensor in lora_state(text.encoders[name]).items():
            module, _, letter = factor.removesuffix(".weight").rpartition(".")
            fold = letter == "lora_B" and not layout.alpha and option.scale != 1
            state[text_lora_key(layout, parts[name], module, ROLES[letter])] = tensor * option.scale if fold else tensor
            if layout.alpha:
                state[text_lora_key(layout, parts[name], module, ALPHA)] = torch.tensor(option.scale * option.rank)
    return state


def text_lora_key(layout: Layout, part: str, module: str, role: str) -> str:
    """The key of a text encoder's layer in a LoRA file.

    Args:
        layout: the file's layout.
        part: ``text_encoder`` or ``text_encoder_2``.
        module: the layer's name in transformers' model, with or without ``text_model``.
        role: see ``Layout.key``.
    """
    whole = "text_model." + module.removeprefix("text_model.")
    ending = {DOWN: layout.down, UP: layout.up}.get(role, role)
    if layout.dots:
        return f"{part}.{whole}.{ending}"
    return f"lora_te_{whole.replace('.', '_')}.{ending}"
