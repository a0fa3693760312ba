"""Find where text encoders truncate captions. Uses only tokenizers, because importing transformers imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.commands.inspect_data.token_counts import LIMIT, tokenizer_folder
from simpletune.config.schema import TrainConfig
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
"""CLIP's pattern for words, from the code of arXiv:2103.00020."""


@dataclass(frozen=True)
class Cut:
    """Where one encoder truncates a caption."""

    encoder: str  # ``CLIP`` or ``T5``
    tokens: int  # number of tokens of the caption, including those that the tokenizer adds
    limit: int  # number of tokens that the encoder sees
    place: int  # index of the first character that it does not see


class Cutter:
    """The locally available tokenizers of a model."""

    def __init__(self, config: TrainConfig):
        self.known: list[tuple[str, int, Tokenizer]] = []
        self.problems: list[str] = []
        """Messages about tokenizers that are available but damaged."""
        length = getattr(config.model, "t5_length", None)
        parts = [("CLIP", LIMIT, "tokenizer"), *([("T5", length, "tokenizer_3")] if length is not None else [])]
        for name, limit, part in parts:
            folder = tokenizer_folder(config, part)
            if folder is None or (part == "tokenizer_3" and not (folder / "tokenizer.json").is_file()):
                continue
            try:
                self.known.append((name, limit, _loaded(folder, folder.stat().st_mtime_ns)))
            except UserError as reason:
                self.problems.append(str(reason))

    @property
    def names(self) -> list[str]:
        """Names of the encoders whose tokenizers are available."""
        return [name for name, _, _ in self.known]

    def cuts(self, captions: Sequence[str]) -> list[list[Cut]]:
        """Return, for each caption, the encoders that truncate it, and where."""
        found: list[list[Cut]] = [[] for _ in captions]
        for name, limit, tokenizer in self.known:
            for place, encoding in enumerate(tokenizer.encode_batch(list(captions))):
                if len(encoding.ids) <= limit:
                    continue
                text = [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
                kept = limit - (len(encoding.ids) - len(text))
                end = encoding.offsets[text[kept - 1]][1] if kept > 0 else 0
                found[place].append(Cut(name, len(encoding.ids), limit, end))
        return found


@lru_cache(maxsize=8)
def _loaded(folder: Path, changed: int) -> Tokenizer:
    """Read a folder's tokenizer; cached, because reading one takes a tenth of a second."""
    return read_tokenizer(folder)


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json, or CLIP's vocab.json and merges.txt, which SD3's folders have."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    if (folder / "tokenizer.json").is_file():
        return _from_file(folder / "tokenizer.json")
    try:
        files = str(folder / "vocab.json"), str(folder / "merges.txt")
        words = models.BPE.from_file(*files, unk_token=END, end_of_word_suffix="</w>", fuse_unk=False)
        tokenizer = Tokenizer(words)
        added = processors.RobertaProcessing(
            (END, _id(tokenizer, END)),
            (START, _id(tokenizer, START)),
            trim_offsets=False,
            add_prefix_space=False,
        )
    except Exception as error:  # the library raises this very class
        raise _damaged(folder, error) from None
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.post_processor = added
    tokenizer.add_special_tokens([START, END])
    return tokenizer


def _id(tokenizer: Tokenizer, token: str) -> int:
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def _from_file(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises this very class
        raise _damaged(file, error) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _damaged(place: Path, error: Exception) -> UserError:
    return UserError(f"model: the tokenizer in {place} is damaged ({error}). Download it again")
