"""Run T5 layer by layer: load each layer, run it over all prompts, and free it, so that neither the device nor host
memory ever holds the whole encoder.

Results equal those of the whole model: the layers are transformers' own, called as its encoder calls them, in the same
batches. SD3 uses T5 without an attention mask. Shapes: n prompts, T tokens, e width (4096 for SD3 Medium).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel
from transformers.masking_utils import create_bidirectional_mask

from simpletune.engine.memory import accounting
from simpletune.engine.memory.snapshot import HOST
from simpletune.engine.tensors import to_device
from simpletune.models.shared.parts import CHUNK_BYTES, Part, explain_load_errors, require_tensor_shapes
from simpletune.system.console import progress
from simpletune.system.model_folder import weight_files
from simpletune.system.safetensors_file import read_header

EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight")  # one tensor under two names; a file has either or both
NOT_ENCODER = ("decoder.", "lm_head.")


class Tensors(Protocol):
    """A source of a part's tensors."""

    shapes: dict[str, torch.Size]

    def get(self, name: str) -> Tensor:
        """Read one tensor on the host."""


class PartTensors:
    """Reads the tensors of one part by name. Opens the file for each read, so that nothing stays mapped in between."""

    def __init__(self, part: Part):
        if part.file is not None:
            part.single_file().check(part.name)
        assert part.file is not None or part.folder is not None
        files = [part.file] if part.file is not None else weight_files(part.folder)  # type: ignore[arg-type]
        prefix = "" if part.layout is None else part.layout.prefixes[part.name]
        self._places = {
            name.removeprefix(prefix): (file, name, entry["shape"])
            for file in files
            for name, entry in read_header(file).items()
            if name != "__metadata__" and name.startswith(prefix)
        }

        self.shapes = {name: torch.Size(shape) for name, (_, _, shape) in self._places.items()}

    def get(self, name: str) -> Tensor:
        """Read one tensor, as a view of the memory-mapped file."""
        from safetensors import safe_open

        file, original, _ = self._places[name]
        with safe_open(file, framework="pt") as handle, accounting.allocating(HOST):
            return handle.get_tensor(original)


class EmptyT5:
    """Uninitialised tensors of a T5 encoder in host memory, by its part's configuration."""

    def __init__(self, part: Part, dtype: torch.dtype):
        with init_empty_weights():
            model = T5EncoderModel(T5Config.from_dict(part.config()))
        self.shapes, self.dtype = {name: tensor.shape for name, tensor in model.state_dict().items()}, dtype

    def get(self, name: str) -> Tensor:
        with accounting.allocating(HOST):
            return torch.empty(self.shapes[name], dtype=self.dtype)


class LayeredT5:
    """A T5 encoder whose weights stay in their files.

    Args:
        part: the location of the encoder.
        dtype: the type in which it runs.
        device: where the layers run; embeddings and hidden states stay on the host.
        tensors: its weights; None reads the part's files.

    Raises:
        UserError: the weights do not match the configuration.
    """

    def __init__(self, part: Part, dtype: torch.dtype, device: torch.device, tensors: Tensors | None = None):
        self.dtype, self.device = dtype, device
        with explain_load_errors(part), init_empty_weights():
            self.model = T5EncoderModel(T5Config.from_dict(part.config())).eval()
        self.tensors = tensors or PartTensors(part)
        found = {name: s for name, s in self.tensors.shapes.items() if not name.startswith(NOT_ENCODER)}
        self.embedding = next((name for name in EMBEDDINGS if name in found), EMBEDDINGS[0])
        unused = set(EMBEDDINGS) - {self.embedding}
        expected = {name: tensor.shape for name, tensor in self.model.state_dict().items() if name not in unused}
        require_tensor_shapes(part, expected, {name: shape for name, shape in found.items() if name not in unused})

    @torch.no_grad()
    def encode(self, ids: Tensor, batch_size: int) -> Iterator[Tensor]:
        """Yield the last hidden states of each prompt [T, e] on the host, of token ids [n, T]; ``batch_size`` prompts
        pass through a layer together."""
        per_prompt = ids.shape[1] * self.model.config.d_model * self.dtype.itemsize
        batches = max(1, CHUNK_BYTES // (per_prompt * batch_size))
        for chunk in ids.split(batches * batch_size):
            yield from self._encode(chunk, batch_size)

    def _encode(self, ids: Tensor, batch_size: int) -> Tensor:  # [n, T] -> [n, T, e]
        """Run all layers over the prompts of one chunk."""
        encoder, bias = self.model.encoder, None
        with accounting.allocating(HOST):
            hidden = self.tensors.get(self.embedding)[ids].to(self.dtype)  # reads only these rows of the table
        with progress("text  t5", len(encoder.block), "layers") as advance:
            for number, block in enumerate(encoder.block):
                with self._loaded(block, f"encoder.block.{number}."):
                    for batch in hidden.split(batch_size):
                        x = to_device(batch, self.device)
                        mask = create_bidirectional_mask(config=encoder.config, inputs_embeds=x, attention_mask=None)
                        x, bias, _ = block(x, mask, bias)  # the first layer computes the position bias for all
                        batch.copy_(x)
                advance()
        with self._loaded(encoder.final_layer_norm, "encoder.final_layer_norm."):
            for batch in hidden.split(batch_size):
                batch.copy_(encoder.final_layer_norm(to_device(batch, self.device)))
        return hidden

    @contextmanager
    def _loaded(self, module: nn.Module, prefix: str) -> Iterator[None]:
        """Load the module's weights onto the device for the duration of this context."""
        names = list(module.state_dict())
        weights = {name: to_device(self.tensors.get(prefix + name), self.device, self.dtype) for name in names}
        module.load_state_dict(weights, assign=True)
        del weights
        try:
            yield
        finally:
            module.to("meta")
