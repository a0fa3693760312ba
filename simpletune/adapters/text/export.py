"""Write what a run trained on the text side: its LoRA into the LoRA file, its embeddings into a separate file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.adapters.text.files import COSINES, EmbeddingFile, write_embeddings
from simpletune.adapters.text.option import embedding_name
from simpletune.models.shared.lora_names import ALPHA
from simpletune.system.safetensors_file import WeightReader, read_header, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

    from simpletune.adapters.text.update import TextUpdate


def export_embeddings(text: TextUpdate, folder: Path, run: str, metadata: Mapping[str, str]) -> Path | None:
    """Write the embeddings into a file named after run and token; None if there are none."""
    from torch.nn.functional import cosine_similarity

    option = text.option.embeddings
    if option is None:
        return None
    vectors = {name: each.detach() for name, each in text.embeddings.items()}
    moved = {}  # the cosine of every vector with its value before training: how far it has moved from its word
    for name, each in vectors.items() if text.first else ():
        found = cosine_similarity(each.cpu().float(), text.first[name].float(), dim=1)
        moved[name] = [round(float(cosine), 4) for cosine in found]
    about = {**metadata, COSINES: json.dumps(moved)} if moved else metadata
    words = tuple(option.words())
    embedding = EmbeddingFile(option.token, option.place, vectors | text.t5_rows, text.family.family, words, about)
    return write_embeddings(folder / embedding_name(run, option.token), embedding)


def export_lora(text: TextUpdate, file: Path, metadata: Mapping[str, str]) -> Path | None:
    """Add the text encoders' LoRA to the file of the denoiser's, or write a new one with this metadata, under the keys
    of the family's results; None if there is no such LoRA."""
    import torch

    from simpletune.adapters.methods.lora_layers import lora_factors

    option, layout = text.option.lora, text.family.lora[0]
    if option is None:
        return None
    parts = {encoder.name: encoder.model for encoder in text.family.encoders()}
    state: dict[str, Tensor] = {}
    for name in text.option.with_lora(text.family.clip_encoders):
        for layer, a, b in lora_factors(text.encoders[name]):
            module = "text_model." + layer.removeprefix("text_model.")  # transformers names it with or without
            key = f"{parts[name]}.{module}" if layout.dots else f"lora_te_{module.replace('.', '_')}"
            state[f"{key}.{layout.down}"], state[f"{key}.{layout.up}"] = a.detach(), b.detach()
            if layout.alpha:
                state[f"{key}.{ALPHA}"] = torch.tensor(option.scale * option.rank)
            elif option.scale != 1:  # readers of this layout ignore alpha
                state[f"{key}.{layout.up}"] = b.detach() * option.scale
    if not state:
        return None
    known: dict[str, Tensor] = {}
    header = dict(metadata)
    if file.exists():
        known = WeightReader([file]).get_all()
        header = {key: value for key, value in read_header(file)["__metadata__"].items() if key != "format"}
    return write_safetensors({**known, **state}, file, header)
