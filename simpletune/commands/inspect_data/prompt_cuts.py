"""Count the tokens of captions, and find where text encoders truncate them, by tokenizers that are available locally.

Downloads nothing. Uses only the library tokenizers, because importing transformers imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.config.resolve import resolve_model_folder
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import MODELS
from simpletune.models.shared.single_file import is_single_file
from simpletune.models.text.clip import ClipEncoder
from simpletune.models.text.encoder import TextEncoder
from simpletune.system.hub import HubPart, Repository, cached_folder, is_hub_name
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
"""CLIP's pattern for words, from the code of arXiv:2103.00020."""
FolderState = tuple[tuple[str, int, int], ...]  # name, time of the last change in ns, and bytes of each file


def token_counts(config: TrainConfig, captions: Sequence[str]) -> list[int] | None:
    """Return the number of tokens of each caption; None if no tokenizer is available. Raises UserError if it is
    damaged."""
    encoder = config.model.text.encoders[0]
    folder = _readable_folder(config, encoder)
    if folder is None or not captions:
        return None
    return [len(encoding.ids) for encoding in _encoded(read_fast_tokenizer(folder, _state(folder)), encoder, captions)]


def _readable_folder(config: TrainConfig, encoder: TextEncoder) -> Path | None:
    """Find the tokenizer of an encoder, if it is available and of a kind that is read here."""
    folder = tokenizer_folder(config, encoder.tokenizer)
    known = folder is not None and (encoder.kind == ClipEncoder.kind or (folder / "tokenizer.json").is_file())
    return folder if known else None


def tokenizer_folder(config: TrainConfig, part: str) -> Path | None:
    """Find ``tokenizer``, ``tokenizer_2`` or ``tokenizer_3`` of a model; None if it is not available locally."""
    if config.is_demo:
        if config.model.pretrained not in MODELS:
            return None
        config = resolve_model_folder(config)
    try:
        field, value = config.model.files.provider(part)
    except (UserError, OSError):  # a missing or damaged single file; training reports it
        return None
    if value is None or is_single_file(value):
        return None
    if is_hub_name(value):
        revision = config.model.revision if field == "pretrained" else None
        return cached_folder(HubPart(Repository(value, revision), part, False))
    folder = Path(value) / part
    return folder if (folder / "vocab.json").exists() or (folder / "tokenizer.json").exists() else None


@dataclass(frozen=True)
class Cut:
    """Where one encoder truncates a caption."""

    encoder: str  # its kind, ``CLIP`` or ``T5``
    tokens: int  # number of tokens of the caption, including those that the tokenizer or a template adds
    limit: int  # number of tokens that the encoder sees
    place: int  # index of the first character that it does not see


class Cutter:
    """The locally available tokenizers of a model."""

    def __init__(self, config: TrainConfig):
        self.known: list[tuple[TextEncoder, Tokenizer]] = []
        self.problems: list[str] = []  # messages about tokenizers that are available but damaged
        first: dict[str, TextEncoder] = {}  # of each kind
        for encoder in config.model.text.encoders:
            first.setdefault(encoder.kind, encoder)
        for encoder in first.values():
            folder = _readable_folder(config, encoder)
            if folder is None:
                continue
            try:
                self.known.append((encoder, read_fast_tokenizer(folder, _state(folder))))
            except UserError as reason:
                self.problems.append(str(reason))
        self.names = [encoder.kind for encoder, _ in self.known]

    def cuts(self, captions: Sequence[str]) -> list[list[Cut]]:
        """Return, for each caption, the encoders that truncate it, and where."""
        found: list[list[Cut]] = [[] for _ in captions]
        for encoder, tokenizer in self.known:
            limit, start = encoder.limit, len(encoder.template[0])
            for place, encoding in enumerate(_encoded(tokenizer, encoder, captions)):
                if len(encoding.ids) <= limit:
                    continue
                text = [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
                kept = limit - (len(encoding.ids) - len(text))
                end = encoding.offsets[text[kept - 1]][1] - start if kept > 0 else 0
                end = min(max(end, 0), len(captions[place]))  # the template's end may be cut alone
                found[place].append(Cut(encoder.kind, len(encoding.ids), limit, end))
        return found


def _encoded(tokenizer: Tokenizer, encoder: TextEncoder, captions: Sequence[str]) -> Sequence[Encoding]:
    """Return the tokens of captions in the encoder's template."""
    before, after = encoder.template
    found: Sequence[Encoding] = tokenizer.encode_batch([f"{before}{caption}{after}" for caption in captions])
    return found


def _state(folder: Path) -> FolderState:
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(folder.iterdir()))


@lru_cache(maxsize=8)  # reading one takes a tenth of a second
def read_fast_tokenizer(folder: Path, state: FolderState = ()) -> Tokenizer:
    """Read tokenizer.json, or CLIP's vocab.json and merges.txt, which SD3's folders have; again if its files have
    another ``state``."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    whole = (folder / "tokenizer.json").is_file()
    place = folder / "tokenizer.json" if whole else folder
    try:
        if whole:
            tokenizer: Tokenizer = Tokenizer.from_file(str(place))
        else:
            files = str(folder / "vocab.json"), str(folder / "merges.txt")
            words = models.BPE.from_file(*files, unk_token=END, end_of_word_suffix="</w>", fuse_unk=False)
            tokenizer = Tokenizer(words)
            end, start = tokenizer.token_to_id(END), tokenizer.token_to_id(START)
            if end is None or start is None:
                raise KeyError(END if end is None else START)
            added = processors.RobertaProcessing((END, end), (START, start), trim_offsets=False, add_prefix_space=False)
    except Exception as error:  # the library raises this very class
        raise UserError(f"model: the tokenizer in {place} is damaged ({error}). Download it again") from None
    if whole:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
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
