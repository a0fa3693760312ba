"""The words that Stable Diffusion's text encoders know as one token, without a tokenizer."""

from __future__ import annotations

import functools
import lzma
import unicodedata
from pathlib import Path

WORDS = Path(__file__).parents[1] / "assets" / "clip_words" / "words.txt.xz"


def is_clip_word(word: str) -> bool:
    """Return whether a word is one token of CLIP's vocabulary, which ignores capitals and the form of accents."""
    return unicodedata.normalize("NFC", word).lower() in _words()


@functools.cache
def _words() -> frozenset[str]:
    return frozenset(lzma.decompress(WORDS.read_bytes()).decode().split())
