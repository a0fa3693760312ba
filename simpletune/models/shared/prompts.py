"""Encode prompts with a family's text encoders, one encoder at a time; families extend ``Prompts``.

Shapes: n prompts, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import BATCH, Part, TextEncoder, groups_of, load_text_model
from simpletune.models.shared.transformers_folder import TOKENIZERS
from simpletune.system.model_folder import files_hash
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOKENIZER_BYTES = 64 * 2**20  # per file; T5's has 2.4 MB
MAX_TOKENS = 4096  # of a CLIP encoder
HIDDEN_ALONE = "-hidden"
"""The end of a fingerprint of penultimate states without a pooled output. Without it, it is that of both."""


class Prompts:
    """The text side of a pipeline. A family defines how the encoders' outputs are combined.

    Args:
        part: locates a part by its name.
        encoders: the encoders in use.
        dtype: the type of the encoders' weights and of the embeddings.
    """

    def __init__(self, part: Callable[[str], Part], encoders: Sequence[TextEncoder], dtype: torch.dtype):
        self.part, self.encoders, self.dtype = part, encoders, dtype
        self._hashes: dict[str, str] = {}  # of the tokenizers' folders, which each run reads once

    def run(
        self, encoder: TextEncoder, ids: Tensor, device: torch.device, batch_size: int
    ) -> Iterator[dict[str, Tensor]]:
        """Load an encoder and run it on token ids [n, L]. Yields for each prompt the tensors that ``assemble`` reads,
        without ``tokens``."""
        part = self.part(encoder.model)
        if encoder.is_t5:  # layer by layer
            from simpletune.models.shared.t5_layers import LayeredT5

            return ({"hidden": hidden} for hidden in LayeredT5(part, self.dtype, device).encode(ids, batch_size))
        return clip_outputs(encoder, self.load_clip(encoder).to(device), ids, device, batch_size)

    def load_clip(self, encoder: TextEncoder) -> Any:
        """Load a CLIP encoder on the CPU. Its pooled output is taken at the first token that its tokenizer calls the
        end of a text: the published configurations name another (eos_token_id 2), for which transformers takes the
        largest id, and a token that was added to the vocabulary has a larger one."""
        model = load_text_model(self.part(encoder.model), self.dtype, encoder.projected).eval()
        end = self.tokenizer(encoder).eos_token_id
        for module in model.modules():
            if hasattr(module, "eos_token_id"):
                module.eos_token_id = end
        return model

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Combine the encoders' outputs into one prompt's embeddings.

        Args:
            parts: ``encode``'s output by the encoder's name.

        Returns:
            prompt_embeds [t, e] and pooled [p]; p is 0 for a family without a pooled embedding.
        """
        raise NotImplementedError

    def pool(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """The pooled embedding [p] of one prompt, from the outputs of the CLIP encoders."""
        raise NotImplementedError

    def _tokenizer_folder(self, encoder: TextEncoder) -> Path:
        folder = self.part(encoder.tokenizer).folder
        assert folder is not None  # single files never contain tokenizers
        return folder

    def tokenizer(self, encoder: TextEncoder) -> PreTrainedTokenizerBase:
        """See ``read_tokenizer``."""
        folder = self._tokenizer_folder(encoder)
        return _known_tokenizer(encoder, folder, self._hash(encoder), get_ident())

    def token_ids(self, encoder: TextEncoder, prompts: list[str]) -> Tensor:  # [n, L]
        """The ids of prompts, truncated and padded to the encoder's length.

        Raises:
            UserError: the encoder has no such token or position, so that one of both is damaged.
        """
        tokenizer, config = self.tokenizer(encoder), self.part(encoder.model).config()
        length, folder = encoder.length or tokenizer.model_max_length, self._tokenizer_folder(encoder)
        room = None if encoder.is_t5 else config.get("max_position_embeddings")
        remedy = "One of them is damaged, or they do not belong together. Download both again"
        if isinstance(room, int) and length > room:
            file = folder / "tokenizer_config.json"
            raise UserError(f"{file}: model_max_length is {length}, but {encoder.title} reads {room} tokens. {remedy}")
        ids: Tensor = tokenizer(
            prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        size, largest = config.get("vocab_size"), int(ids.max())
        if isinstance(size, int) and largest >= size:
            file = next((folder / name for name in TOKENIZERS if (folder / name).is_file()), folder)
            token = tokenizer.convert_ids_to_tokens(largest)
            raise UserError(
                f"{file} numbers the token {token!r} {largest}, but {encoder.title} has {size} tokens. {remedy}"
            )
        return ids

    def _hash(self, encoder: TextEncoder) -> str:
        if encoder.tokenizer not in self._hashes:
            self._hashes[encoder.tokenizer] = files_hash(self._tokenizer_folder(encoder))
        return self._hashes[encoder.tokenizer]

    def fingerprint(self, encoder: TextEncoder, sums: Path | None = None) -> str:
        """A name for everything an encoder's output depends on, apart from the prompt; ``sums`` as for
        ``Part.fingerprint``."""
        length = "" if encoder.length is None else f"-{encoder.length}"
        tokens = self._hash(encoder)
        weights = self.part(encoder.model).fingerprint(sums)
        packed = "-int8" if encoder.packed else ""
        states = HIDDEN_ALONE if encoder.penultimate and not encoder.projected else ""
        return f"{encoder.name}-{weights}-{tokens}-{str(self.dtype).removeprefix('torch.')}{length}{packed}{states}"

    def encode(
        self, encoder: TextEncoder, prompts: list[str], device: torch.device, batch_size: int = BATCH
    ) -> Iterator[dict[str, Tensor]]:
        """Load one encoder, encode prompts with it, and free it.

        Yields:
            For each prompt what ``run`` yields, in the encoders' type on the CPU or packed, and ``tokens`` [1], the
            number of tokens in the prompt before truncation.
        """
        tokenizer = self.tokenizer(encoder)
        counts = [len(ids) for ids in tokenizer(prompts).input_ids]
        outputs = self.run(encoder, self.token_ids(encoder, prompts), device, batch_size)
        for output, count in zip(outputs, counts, strict=True):
            parts = {name: tensor.to("cpu", self.dtype) for name, tensor in output.items()}
            yield {**(pack(parts) if encoder.packed else parts), "tokens": torch.tensor([count])}


def empty_clip(encoder: TextEncoder, config: ModelConfig) -> nn.Module:
    """Build a CLIP encoder with uninitialised weights from its ``config.json``."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    kind = CLIPTextModelWithProjection if encoder.projected else CLIPTextModel
    return kind(CLIPTextConfig.from_dict(config))


def clip_output(encoder: TextEncoder, model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Run a CLIP encoder once over the ids [b, L]: ``hidden`` [b, L, width], and ``pooled`` [b, width] if it is
    projected."""
    output = model(ids, output_hidden_states=encoder.penultimate)
    hidden = output.hidden_states[-2] if encoder.penultimate else output.last_hidden_state
    return {"hidden": hidden, "pooled": output.text_embeds} if encoder.projected else {"hidden": hidden}


@torch.no_grad()
def clip_outputs(
    encoder: TextEncoder, model: nn.Module, ids: Tensor, device: torch.device, batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """Run a CLIP encoder over the rows of the ids [n, L]. Yields ``clip_output`` of each, without dimension b."""
    for batch in ids.split(batch_size):
        found = clip_output(encoder, model, batch.to(device))
        for row in zip(*found.values(), strict=True):
            yield dict(zip(found, row, strict=True))


def pack(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round an encoder's ``hidden`` [L, width] to int8, and add its ``scale`` [L, width / 64] in fp32: one for each 64
    numbers of a token, whose largest becomes 127. One for a whole token would round all of it as coarsely as its few
    large channels."""
    hidden = parts["hidden"].float()
    grouped = hidden.unflatten(-1, (groups_of(hidden.shape[-1]), -1))
    scale = grouped.abs().amax(dim=-1) / 127
    steps = grouped / scale.where(scale > 0, 1.0)[..., None]
    return {**parts, "hidden": steps.round().clamp(-127, 127).to(torch.int8).flatten(-2), "scale": scale}


def unpack(parts: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert an encoder's output to what ``Prompts.assemble`` reads: hidden states in a floating-point type."""
    if "scale" not in parts:
        return dict(parts)
    found = {name: tensor for name, tensor in parts.items() if name != "scale"}
    scale, hidden = parts["scale"], parts["hidden"].float()
    return found | {"hidden": (hidden.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2).to(dtype)}


@lru_cache(maxsize=8)
def _known_tokenizer(encoder: TextEncoder, folder: Path, content: str, thread: int) -> PreTrainedTokenizerBase:
    """Cached per thread: reading it takes longer than encoding a prompt, and it is not thread-safe."""
    return read_tokenizer(encoder, folder)


def read_tokenizer(encoder: TextEncoder, folder: Path) -> PreTrainedTokenizerBase:
    """Read an encoder's tokenizer. UserError: its files are damaged or have impossible sizes."""
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
    if encoder.length is None and not 1 <= tokenizer.model_max_length <= MAX_TOKENS:
        raise UserError(
            f"{folder}: model_max_length is {tokenizer.model_max_length}; it must be from 1 to {MAX_TOKENS}. "
            "Download the tokenizer again"
        )
    return tokenizer
