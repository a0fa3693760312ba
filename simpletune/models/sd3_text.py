"""Encode prompts with SD3's three text encoders, one encoder at a time.

Shapes: L = 77 CLIP tokens, widths 768 (CLIP-L) and 1280 (CLIP-G), T T5 tokens of width e = 4096 (for SD3 Medium).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from simpletune.models.parts import Part, load_text_model
from simpletune.options import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOKENIZER_BYTES = 64 * 2**20  # per file; T5's has 2.4 MB
MAX_TOKENS = 4096  # of a CLIP encoder
BATCH = 1  # prompts encoded together; with more, the last bits of a prompt's embedding would depend on its neighbours


@dataclass(frozen=True)
class Encoder:
    """A text encoder, with the names of its parts in a pipeline's folder."""

    name: str
    tokenizer: str
    model: str
    is_t5: bool = False


ENCODERS = (
    Encoder("clip_l", "tokenizer", "text_encoder"),
    Encoder("clip_g", "tokenizer_2", "text_encoder_2"),
    Encoder("t5", "tokenizer_3", "text_encoder_3", is_t5=True),
)


class Prompts:
    """The text side of a pipeline.

    Args:
        part: locates a part by its name.
        t5_length: tokens of the T5 part.
        t5: whether to use T5; if not, zeros replace its embeddings.
        width: e, the width of a prompt's embedding.
        dtype: the type of the encoders' weights and of the embeddings.
    """

    def __init__(self, part: Callable[[str], Part], t5_length: int, t5: bool, width: int, dtype: torch.dtype):
        self.part, self.t5_length, self.t5, self.width, self.dtype = part, t5_length, t5, width, dtype

    @property
    def encoders(self) -> tuple[Encoder, ...]:
        """The encoders in use."""
        return ENCODERS if self.t5 else ENCODERS[:2]

    def _tokenizer_folder(self, encoder: Encoder) -> Path:
        folder = self.part(encoder.tokenizer).folder
        assert folder is not None  # single files never contain tokenizers
        return folder

    def fingerprint(self, encoder: Encoder) -> str:
        """A name for everything an encoder's output depends on, apart from the prompt."""
        length = f"-{self.t5_length}" if encoder.is_t5 else ""
        tokens = _folder_hash(self._tokenizer_folder(encoder))
        weights = self.part(encoder.model).fingerprint()
        return f"{encoder.name}-{weights}-{tokens}-{str(self.dtype).removeprefix('torch.')}{length}"

    def encode(
        self, encoder: Encoder, prompts: list[str], device: torch.device, batch_size: int = BATCH
    ) -> Iterator[dict[str, Tensor]]:
        """Load one encoder, encode prompts with it, and free it.

        Yields:
            For each prompt ``hidden`` [L or T, width], for CLIP also ``pooled`` [width], and ``tokens`` [1], the
            number of tokens in the prompt before truncation.
        """
        tokenizer = _tokenizer(encoder, self._tokenizer_folder(encoder))
        length = self.t5_length if encoder.is_t5 else tokenizer.model_max_length
        counts = [len(ids) for ids in tokenizer(prompts).input_ids]
        ids = tokenizer(
            prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        run = _run_t5 if encoder.is_t5 else _run_clip
        outputs = run(self.part(encoder.model), ids, self.dtype, device, batch_size)
        for output, count in zip(outputs, counts, strict=True):
            parts = {name: tensor.to("cpu", self.dtype) for name, tensor in output.items()}
            yield {**parts, "tokens": torch.tensor([count])}

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Combine the encoders' outputs into one prompt's embeddings.

        Concatenates CLIP-L and CLIP-G along the width, pads them with zeros to e, and appends T5 along the sequence
        (arXiv:2403.03206, section 4).

        Args:
            parts: ``encode``'s output by the encoder's name.

        Returns:
            prompt_embeds [L + T, e] and pooled [768 + 1280].
        """
        clip = torch.cat([parts["clip_l"]["hidden"], parts["clip_g"]["hidden"]], dim=-1)
        clip = torch.nn.functional.pad(clip, (0, self.width - clip.shape[-1]))
        t5 = parts["t5"]["hidden"] if self.t5 else clip.new_zeros(self.t5_length, self.width)
        return torch.cat([clip, t5], dim=0), self.pool(parts)

    def pool(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """Concatenate CLIP-L's and CLIP-G's pooled embeddings of one prompt: [768 + 1280]."""
        return torch.cat([parts["clip_l"]["pooled"], parts["clip_g"]["pooled"]], dim=-1)


def _tokenizer(encoder: Encoder, folder: Path) -> PreTrainedTokenizerBase:
    from transformers import CLIPTokenizer, T5TokenizerFast

    for file in folder.iterdir():
        if file.is_file() and file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise UserError(
                f"{file} has {file.stat().st_size:,} bytes; the limit for a tokenizer's file is "
                f"{MAX_TOKENIZER_BYTES:,}. Download it again"
            )
    kind = T5TokenizerFast if encoder.is_t5 else CLIPTokenizer
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises nothing narrower
        said = str(error).strip().partition("\n")[0][:300]
        raise UserError(f"{folder} contains no readable tokenizer ({said}). Download it again") from error
    if not encoder.is_t5 and not 1 <= tokenizer.model_max_length <= MAX_TOKENS:
        raise UserError(
            f"{folder}: model_max_length is {tokenizer.model_max_length}; it must be from 1 to {MAX_TOKENS}. "
            "Download the tokenizer again"
        )
    return tokenizer


def _run_clip(
    part: Part, ids: Tensor, dtype: torch.dtype, device: torch.device, batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """Run a whole CLIP encoder over all prompts."""
    return clip_outputs(load_text_model(part, dtype).eval().to(device), ids, device, batch_size)


@torch.no_grad()
def clip_outputs(model: nn.Module, ids: Tensor, device: torch.device, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Compute the outputs of a CLIP encoder that SD3 uses.

    Args:
        model: the encoder, on the device.
        ids: token ids [n, L].
        device: the encoder's device.
        batch_size: prompts encoded together.

    Yields:
        For each prompt ``hidden`` [L, width], the penultimate hidden state, and ``pooled`` [width], projected.
    """
    for batch in ids.split(batch_size):
        output = model(batch.to(device), output_hidden_states=True)
        for hidden, pooled in zip(output.hidden_states[-2], output.text_embeds, strict=True):
            yield {"hidden": hidden, "pooled": pooled}


def _run_t5(
    part: Part, ids: Tensor, dtype: torch.dtype, device: torch.device, batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """Run the T5 encoder over all prompts, layer by layer."""
    from simpletune.models.t5_layers import LayeredT5

    return ({"hidden": hidden} for hidden in LayeredT5(part, dtype, device).encode(ids, batch_size))


def _folder_hash(folder: Path) -> str:
    """A short hash of a tokenizer's files."""
    import hashlib

    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            digest.update(file.name.encode())
            with open(file, "rb") as stream:
                while part := stream.read(2**20):
                    digest.update(part)
    return digest.hexdigest()[:8]
