"""What a shared file or a model card states about its run: when it was trained, a thumbnail, the trigger words, and how
tools use its token."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from PIL import Image, ImageOps

from simpletune.adapters.text.files import how_to_use
from simpletune.adapters.text.option import embedding_name
from simpletune.config.schema import TrainConfig
from simpletune.runs.attempts import attempts_of
from simpletune.runs.folder import SAMPLES

SIDE = 256  # pixels; the model spec recommends 256x256
MOST = 32_000  # characters of a thumbnail in the header
QUALITIES = ((SIDE, 85), (SIDE, 70), (SIDE, 50), (SIDE, 30), (SIDE // 2, 50), (SIDE // 4, 50))
"""Sides and JPEG qualities to try, in this order."""
PREFIX = "data:image/jpeg;base64,"
DATE = "%Y-%m-%dT%H:%M:%SZ"


def trained_at(run: Path) -> str | None:
    """When a run's last attempt ended, in UTC as ISO 8601; None if it is not recorded.

    Exports of one run have the same date, and so the same bytes.
    """
    attempts = attempts_of(run)
    if not attempts:
        return None
    return (attempts[-1].started + timedelta(seconds=round(attempts[-1].seconds))).strftime(DATE)


def thumbnail(run: Path, step: int | None) -> str | None:
    """A run's validation picture as a small JPEG in a data URI; None if there is none.

    Args:
        run: the run's folder.
        step: a checkpoint's step; None: the last step that pictures were drawn at.
    """
    states = sorted((run / SAMPLES).glob("step-*")) if step is None else [run / SAMPLES / f"step-{step:06d}"]
    for state in reversed(states):
        for file in sorted(state.glob("prompt-*.png")):
            return data_uri(file)
    return None


def data_uri(file: Path) -> str | None:
    """A picture as a square JPEG of at most ``MOST`` characters; None if it cannot be read.

    Drops metadata, because a PNG's text chunks contain the prompt.
    """
    try:
        with Image.open(file) as image:
            plain = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    for side, quality in QUALITIES:
        small = ImageOps.fit(plain, (side, side), Image.Resampling.LANCZOS)
        clean, buffer = Image.new("RGB", small.size), io.BytesIO()
        clean.paste(small)
        clean.save(buffer, "JPEG", quality=quality, optimize=True)
        uri = PREFIX + base64.b64encode(buffer.getvalue()).decode()
        if len(uri) <= MOST:
            return uri
    return None


def trigger_of(config: TrainConfig) -> str | None:
    """The trigger words: the prompt of all pictures, or what precedes every caption."""
    if config.data.prompt:
        return config.data.prompt
    prefixes = {source.caption_prefix.strip(" ,") for source in config.data.members if not source.regularization}
    return (prefixes.pop() or None) if len(prefixes) == 1 else None


def tags_of(config: TrainConfig) -> Iterator[str]:
    """Tags for finding the file."""
    yield config.adapter.method
    yield config.model.diffusers.tag
    yield "simpletune"


def has_one_encoder(config: TrainConfig) -> bool:
    """Whether the model has one text encoder, whose embeddings diffusers and A1111 read."""
    return len(config.model.clip_encoders) == 1


def titles_of(config: TrainConfig) -> str:
    """The result's contents, in words."""
    found = [config.adapter.title] if config.adapter.trains else []
    found += ["LoRA of the text encoders"] if config.text.lora is not None else []
    found += [f"Embeddings of `{config.text.embeddings.token}`"] if config.text.embeddings is not None else []
    return " and ".join(found)


def loaded_tokens(config: TrainConfig) -> list[str]:
    """The embedding files that diffusers loads."""
    option = config.text.embeddings
    if option is None or option.place == "output" or not has_one_encoder(config):
        return []
    return [embedding_name(config.name, option.token)]


def loads_in_diffusers(config: TrainConfig) -> bool:
    """Whether diffusers loads any of the result."""
    return config.adapter.trains or config.text.lora is not None or bool(loaded_tokens(config))


def token_usage(config: TrainConfig) -> Iterator[str]:
    """How tools use the token, as a list in Markdown; empty for a run without embeddings."""
    option = config.text.embeddings
    if option is None:
        return
    name = embedding_name(config.name, option.token)
    uses = how_to_use(name, option.token, option.place, has_one_encoder(config))
    others = [f"- {use}" for use in uses if not use.startswith(("ComfyUI", "These"))]
    yield "\n".join([option.use(name), "", *others])
