"""Write tokenizers for the tiny SD3. Vocabularies follow rules, because training one gives other ids on every run.

Any text can be tokenized: CLIP's byte alphabet is complete, T5 uses `<unk>` for anything but printable Latin.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

END_OF_WORD = "</w>"
CLIP_LENGTH = 24
T5_LENGTH = 512
BOS, EOS = "<|startoftext|>", "<|endoftext|>"


def merges_of(words: Iterable[str], end: str = END_OF_WORD) -> list[tuple[str, str]]:
    """Compute byte-pair merges, in order of rank, that make each word one token.

    Each word is first merged by the earlier words' merges, then joined from the left. Merges added later rank lower, so
    they cannot break earlier words.

    Args:
        words: Lower-case ASCII letters only.
        end: What the last letter of a word has behind it, in CLIP's vocabulary.
    """
    merges: dict[tuple[str, str], int] = {}
    for word in words:
        pieces = _merged([*word[:-1], word[-1] + end], merges)
        while len(pieces) > 1:
            merges.setdefault((pieces[0], pieces[1]), len(merges))
            pieces = [pieces[0] + pieces[1], *pieces[2:]]
    return list(merges)


def _merged(pieces: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    while True:
        pairs = [pair for pair in zip(pieces, pieces[1:], strict=False) if pair in ranks]
        if not pairs:
            return pieces
        best, joined = min(pairs, key=lambda pair: ranks[pair]), list[str]()
        for piece in pieces:
            if joined and (joined[-1], piece) == best:
                joined[-1] += piece
            else:
                joined.append(piece)
        pieces = joined


def write_clip(folder: Path, words: Iterable[str]) -> None:
    """Write a CLIP tokenizer in its original file format: start is id 0, end and padding are id 1.

    The end must not be id 2: it switches transformers' CLIP to its legacy pooling, which assumes that the highest id
    ends the text.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    merges = merges_of(words)
    alphabet = sorted(ByteLevel.alphabet())
    tokens = [BOS, EOS, *alphabet, *(letter + END_OF_WORD for letter in alphabet), *(a + b for a, b in merges)]
    tokens = list(dict.fromkeys(tokens))  # different merges may produce the same token
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "unk_token": EOS}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": CLIP_LENGTH, "do_lower_case": True, **names}
    folder.mkdir(parents=True)
    _write_json(folder / "vocab.json", {token: index for index, token in enumerate(tokens)})
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _write_json(folder / "special_tokens_map.json", names)
    _write_json(folder / "tokenizer_config.json", settings)


def write_t5(folder: Path, words: Iterable[str]) -> None:
    """Write a T5 (Unigram) tokenizer: padding 0, end 1, unknown 2, then the words and single characters.

    T5 does not lower-case text: a capitalised word splits into characters.
    """
    from transformers import T5Tokenizer

    characters = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0x100)) if code != 0xAD]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -10.0)]
    pieces += [("\u2581" + word, -4.0) for word in words] + [(character, -10.0) for character in characters]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=T5_LENGTH)
    tokenizer.save_pretrained(folder)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
