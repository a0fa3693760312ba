"""Replace a token by its words in a prompt, and find their rows in an encoder's sequence. No torch.

The text encoders never see the token itself, only its words. So no tokenizer and no table grows, and CLIP still finds
the end of the text, whose position determines the pooled embedding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def occurs(prompt: str, token: str) -> bool:
    """Return whether a prompt contains the token as a separate word."""
    return _pattern(token).search(prompt) is not None


def expand(prompt: str, token: str, words: Sequence[str]) -> str:
    """Replace every occurrence of the token by its words."""
    return _expanded(prompt, token, words)[0]


def positions(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    token: str,
    words: Sequence[str],
    length: int | None = None,
) -> list[list[int]]:
    """Find the rows of the token's words in an encoder's sequence of this length; None: the tokenizer's maximum.

    Returns:
        For every occurrence its rows in order, one for each token that the words have in this encoder; omits rows
        beyond the length, and occurrences without any row.
    """
    text, spans = _expanded(prompt, token, words)
    if not spans:
        return []
    found = tokenizer(
        text, truncation=True, max_length=length or tokenizer.model_max_length, return_offsets_mapping=True
    )
    offsets = found["offset_mapping"]
    rows = [
        [row for row, (start, stop) in enumerate(offsets) if start < stop and start < last and stop > first]
        for first, last in spans
    ]
    return [each for each in rows if each]


def tokens_of(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> list[int]:
    """Return the ids of the words as an encoder reads them within a prompt, without its begin and end tokens."""
    return list(tokenizer(" ".join(words), add_special_tokens=False).input_ids)


def _pattern(token: str) -> re.Pattern[str]:
    """Find the token, but not within a longer word."""
    before = r"(?<!\w)" if token[0].isalnum() or token[0] == "_" else ""
    after = r"(?!\w)" if token[-1].isalnum() or token[-1] == "_" else ""
    return re.compile(before + re.escape(token) + after)


def _expanded(prompt: str, token: str, words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Expand a prompt; also return where the words of each occurrence begin and end.

    Inserts a space between the token and whatever directly precedes it, or a letter or digit that directly follows it,
    because T5 splits a word differently if it does not follow a space.
    """
    text, spans, last = "", list[tuple[int, int]](), 0
    for match in _pattern(token).finditer(prompt):
        text += prompt[last : match.start()]
        text += " " if text and not text[-1].isspace() else ""
        spans.append((len(text), len(text) + len(" ".join(words))))
        text += " ".join(words)
        last = match.end()
        text += " " if last < len(prompt) and (prompt[last].isalnum() or prompt[last] == "_") else ""
    return text + prompt[last:], spans
