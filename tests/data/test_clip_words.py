"""CLIP's one-token words, against the real tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simpletune.data.clip_words import _words, is_clip_word


@pytest.mark.parametrize("word", ["dog", "Dog", "cat", "backpack", "teapot", "café", "cafe\u0301", "sks", "a"])
def test_a_word_of_one_token(word: str) -> None:
    assert is_clip_word(word)


@pytest.mark.parametrize(
    "word",
    [
        "maskdog",
        "mydog",
        "hund3",
        "dog2",
        "my dog",
        "dog ",
        " dog",
        "dog-photos",
        "",
        "katze",
        "собака",
        "7",
        "!",
        "犬",
    ],
)
def test_no_word_of_one_token(word: str) -> None:
    assert not is_clip_word(word)


@pytest.mark.data
def test_the_words_are_those_of_the_real_tokenizer(real_data: Path) -> None:
    from transformers import CLIPTokenizer

    folder = real_data / "sd15_config" / "tokenizer"
    tokenizer, vocabulary = CLIPTokenizer.from_pretrained(folder), json.loads((folder / "vocab.json").read_bytes())
    words = sorted(_words())
    assert len(words) == 33020 and words == [word.lower() for word in words]
    assert {len(ids) for ids in tokenizer(words, add_special_tokens=False).input_ids} == {1}
    # every other entry, and some words written together, is a word only if the tokenizer agrees
    others = [entry.removesuffix("</w>") for entry in vocabulary] + [
        a + b for a, b in zip(words, words[7::20], strict=False)
    ]
    others = [word for word in others if word.isascii() and word.isalpha()]
    lengths = [len(ids) for ids in tokenizer(others, add_special_tokens=False).input_ids]
    assert [is_clip_word(word) for word in others] == [length == 1 for length in lengths]


def test_asking_imports_no_torch() -> None:
    code = (
        "import sys; from simpletune.data.clip_words import is_clip_word as f; print(f('dog'), 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True False\n"
