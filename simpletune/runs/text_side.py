"""The text side of weights to generate with: their embeddings, and their LoRA files' updates of the text encoders."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.adapters.text.embedding_files import embeddings_in, keys_of, read_embeddings
from simpletune.runs.weights import Embedding, Weights
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from simpletune.adapters.files.updates import Update
    from simpletune.adapters.text.embedding_files import EmbeddingFile
    from simpletune.adapters.text.side import TextSide
    from simpletune.adapters.text.text_option import Text

StandIns = tuple[tuple[str, tuple[str, ...]], ...]
"""Words by token."""


def embedding_of(text: str) -> Embedding:
    """Find the embeddings that ``--embedding`` names: a file or a run, with an optional ``:TOKEN``."""
    path, token = Path(text), None
    if not path.exists() and ":" in text:
        name, _, token = text.rpartition(":")
        path = Path(name)
    if token == "":
        raise UserError(f"--embedding: {text} names no token after the colon. Write one, as in {path}:<dots>")
    if path.is_dir():
        found = embeddings_in(path)
        if len(found) != 1:
            raise UserError(f"--embedding: {path} has {len(found)} files of embeddings. Name a .safetensors file")
        path = found[0]
    try:
        held = keys_of(path)
    except UserError as error:
        raise UserError(f"--embedding: {error}", error.code) from None
    if not held:
        raise UserError(
            f"--embedding: {path} is not an embedding file. Give one, such as runs/demo/demo_dots.safetensors"
        )
    return path, token


def embeddings_of(weights: Weights) -> tuple[EmbeddingFile, ...]:
    """Read the embeddings of weights: their own, and those bundled in their LoRA files."""
    from simpletune.adapters.files.header import LoraHeader

    found = [each for file, token in weights.embeddings for each in read_embeddings(file, token)]
    for file, _ in weights.loras:
        if LoraHeader(file).bundled:
            found += read_embeddings(file)
    return tuple(found)


def text_side_of(weights: Weights, stand_ins: StandIns = ()) -> TextSide:
    """Read the text side of weights; ``stand_ins`` are words for tokens without an embedding in these weights."""
    from simpletune.adapters.files.attach import holds_hypernetwork
    from simpletune.adapters.files.header import open_lora
    from simpletune.adapters.text.side import AppliedText, TextSide
    from simpletune.system.checksums import sha256_of

    embeddings = embeddings_of(weights)
    own = {each.token for each in embeddings}
    loras = []
    for file, scale in weights.loras:
        if not holds_hypernetwork(file) and open_lora(file).text_modules:
            digest = sha256_of(file)
            loras.append(AppliedText(str(file), _text_updates(file, digest), scale, digest))
    return TextSide(embeddings, tuple(loras), tuple(each for each in stand_ins if each[0] not in own))


@cache
def _text_updates(file: Path, digest: str) -> dict[str, Update]:
    """Read the text encoders' updates from a file with this digest, once for all strengths."""
    from simpletune.adapters.files.read import read_lora
    from simpletune.models.text_layers import split_text

    return split_text(read_lora(file))[1]


def stand_ins_of(models: Iterable[Weights], text: Text) -> StandIns:
    """Return the words that embeddings were initialised from, by token; models without the embedding read them
    instead."""
    words = {each.token: each.words for weights in models for each in embeddings_of(weights) if each.words}
    if (option := text.embeddings) is not None:
        words.setdefault(option.token, tuple(option.words()))
    return tuple(sorted(words.items()))


def with_embeddings(weights: Weights, given: Collection[Embedding]) -> Weights:
    """Add embeddings to weights. A given embedding replaces the weights' own for the same token."""
    if not given:
        return weights
    tokens = {each.token for file, token in given for each in read_embeddings(file, token)}
    kept = [
        (file, token)
        for file, token in weights.embeddings
        if not tokens & {each.token for each in read_embeddings(file, token)}
    ]
    return replace(weights, embeddings=(*kept, *given))
