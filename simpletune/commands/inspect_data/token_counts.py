"""Count the CLIP tokens of captions if a tokenizer is available locally; downloads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simpletune.config.resolve import MODEL_DEMOS, resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.models.shared.sources import is_single_file, provider
from simpletune.system.hub import HubPart, Repository, in_cache, is_hub_name
from simpletune.system.options import UserError

LIMIT = 77  # tokens that CLIP sees, including the start and end tokens


def token_counts(config: TrainConfig, captions: Sequence[str]) -> list[int] | None:
    """Return the number of tokens of each caption; None if no tokenizer is available."""
    folder = tokenizer_folder(config, "tokenizer")
    if folder is None or not captions:
        return None
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    return [len(ids) for ids in tokenizer(list(captions), verbose=False).input_ids]


def tokenizer_folder(config: TrainConfig, part: str) -> Path | None:
    """Find a tokenizer without downloading anything; None if it is not available locally.

    Args:
        config: configuration whose model names folders or repositories.
        part: ``tokenizer``, ``tokenizer_2`` or ``tokenizer_3``.
    """
    if config.is_demo:
        if config.model.pretrained not in MODEL_DEMOS:
            return None
        config = resolve_model_folder(config)
    try:
        field, value = provider(config.model, part)
    except (UserError, OSError):  # a missing or damaged single file; training reports it
        return None
    if value is None or is_single_file(value):
        return None
    if is_hub_name(value):
        revision = config.model.revision if field == "pretrained" else None
        return in_cache(HubPart(Repository(value, revision), part, False))
    folder = Path(value) / part
    return folder if (folder / "vocab.json").exists() or (folder / "tokenizer.json").exists() else None
