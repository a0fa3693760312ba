"""Merge LoRAs into the base, W + sum of scale_n B_n A_n; write a diffusers folder or a file in the original layout.

Streams the output with one layer in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from simpletune.adapters.files.base_reader import KINDS, TYPES, BaseReader
from simpletune.adapters.files.header import TensorEntry, tensor_bytes
from simpletune.adapters.files.updates import Updates
from simpletune.adapters.files.write import overflow
from simpletune.adapters.methods.formulas import FLOATS
from simpletune.engine.tensors import exchanged_halves
from simpletune.models.shared.single_file import Origin, open_file
from simpletune.models.shared.text_layers import encoder_of, encoders_in, split_text
from simpletune.system.atomic import atomic_folder
from simpletune.system.model_folder import NAMES
from simpletune.system.options import UserError, join_names, plural
from simpletune.system.safetensors_file import SafetensorsWriter, read_header

PREFIX = "model.diffusion_model."


class Merger:
    """Merges LoRAs into one base, and writes the result, whose tensors it computes one by one.

    Args:
        base: the checkpoint.
        loras: updates with their strengths.
        dtype: ``fp32``, ``fp16`` or ``bf16``; None uses the base's type for each tensor.

    Raises:
        UserError: the base lacks a layer, or has it with another shape.
    """

    def __init__(self, base: BaseReader, loras: Sequence[tuple[Updates, float]], dtype: str | None):
        self.base, self._loras, self._dtype = base, loras, dtype
        self._error = self._effect = 0.0
        self.text = sorted({name for updates, _ in loras for name in split_text(updates)[1]})
        self.changed = {name for updates, _ in loras for name in updates} - set(self.text)
        linears = base.linear_shapes()
        lost = sorted(name for name in self.changed if name not in linears)
        if lost:
            raise UserError(
                f"{plural(len(lost), 'layer')} of the LoRA {'is' if len(lost) == 1 else 'are'} not in "
                f"{base.name}: {join_names(lost, 5)}"
            )
        for updates, _ in loras:
            for name, update in split_text(updates)[0].items():
                if not update.fits(linears[name]):
                    raise UserError(
                        f"{name}: the LoRA has shape {list(update.shape)} (outputs, inputs), and {base.name} has "
                        f"{list(linears[name])}. The LoRA belongs to another model"
                    )

    def kind(self, name: str) -> str:
        """The type of a tensor in the output, by safetensors' name."""
        return KINDS[FLOATS[self._dtype]] if self._dtype else self.base.kinds[name]

    def get(self, name: str) -> Tensor:
        """Compute one merged tensor in its output type."""
        tensor, dtype = self.base.get(name), TYPES[self.kind(name)]
        layer = name.removesuffix(".weight")
        if layer == name or layer not in self.changed:
            return _cast(name, tensor, dtype)
        return self._merged(layer, tensor, dtype)

    def _merged(self, layer: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A layer's weight with its updates, in its output type."""
        exact = tensor.float()
        delta = torch.zeros_like(exact)
        for updates, strength in self._loras:
            if layer in updates:
                delta += strength * updates[layer].difference(exact.flatten(1)).view_as(delta)
        exact = exact + delta
        merged = _cast(layer, exact, dtype)
        self._error += float((merged.float() - exact).double().square().sum())
        self._effect += float(delta.double().square().sum())
        return merged

    def _merged_text(self, layer: str, entry: TensorEntry, data: bytes) -> bytes:
        """Merge the updates of a text encoder's layer into the bytes of its weight, in its own type."""
        kind, shape = entry["dtype"], entry["shape"]
        update = next(updates[layer] for updates, _ in self._loras if layer in updates)
        if kind not in TYPES or not update.fits(shape):
            raise UserError(
                f"{layer}: the LoRA has shape {list(update.shape)}, and {self.base.name} has {kind} {shape}. The LoRA "
                "belongs to another model. Leave its text encoders out: --denoiser-only"
            )
        weight = torch.frombuffer(bytearray(data), dtype=TYPES[kind]).view(shape)
        return self._merged(layer, weight, TYPES[kind]).contiguous().view(torch.uint8).numpy().tobytes()

    @property
    def lost(self) -> float:
        """Rounding error of the file's type, relative to the updates so far (Frobenius norms over all layers)."""
        return (self._error / self._effect) ** 0.5 if self._effect else 0.0

    def write_folder(self, folder: Path, metadata: Mapping[str, str], done: Callable[[], None]) -> None:
        """Write a folder that diffusers' ``from_pretrained`` loads; replaces an old one. Calls ``done`` after each
        tensor."""
        entries = {name: (self.kind(name), shape) for name, shape in self.base.shapes.items()}
        if self.text:
            raise UserError(
                f"the LoRA also updates {encoders_in(self.text)}, and the folder holds only the denoiser. Merge into a "
                "single file that has text encoders (--base FILE --out FILE), or leave them out: --denoiser-only"
            )
        with atomic_folder(folder) as part:
            self.base.save_config(part)
            with SafetensorsWriter(part / f"{NAMES[0]}.safetensors", entries, {"format": "pt", **metadata}) as writer:
                for name in entries:
                    writer.write(name, self.get(name))
                    done()

    def write_file(self, file: Path, metadata: Mapping[str, str], done: Callable[[], None]) -> None:
        """Write one file in the original layout, with the other tensors and the metadata of a single-file base. Calls
        ``done`` after each tensor."""
        base = self.base
        groups: dict[str, list[tuple[str, Origin]]] = {}  # the diffusers tensors that make up an original one
        for name, origin in base.family.layout.origins(base.config).items():
            groups.setdefault(origin.name, []).append((name, origin))
        for parts in groups.values():
            parts.sort(key=lambda part: part[1].third or 0)
        prefix = PREFIX
        others: dict[str, TensorEntry] = {}
        old: dict[str, str] = {}
        if base.file is not None:
            prefix = open_file(base.file, base.family.layout).prefix
            header = read_header(base.file)
            old = header.pop("__metadata__", None) or {}
            old = {k: v for k, v in old.items() if not k.startswith("modelspec.hash")}
            others = {name: entry for name, entry in header.items() if name.removeprefix(prefix) not in groups}
        entries: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (entry["dtype"], tuple(entry["shape"])) for name, entry in others.items()
        }
        for original, parts in groups.items():
            shape = base.shapes[parts[0][0]]
            entries[prefix + original] = (self.kind(parts[0][0]), (shape[0] * len(parts), *shape[1:]))
        text = self._text_weights(others)
        file.parent.mkdir(parents=True, exist_ok=True)
        with SafetensorsWriter(file, entries, {**old, "format": "pt", **metadata}) as writer:
            for original, parts in groups.items():
                tensors = [self.get(name) for name, _ in parts]
                swapped = len(parts) == 1 and parts[0][1].swapped
                whole = tensors[0] if len(parts) == 1 else torch.cat(tensors)
                writer.write(prefix + original, exchanged_halves(whole) if swapped else whole)
                for _ in parts:
                    done()
            for name, entry in others.items():
                assert base.file is not None
                data = tensor_bytes(base.file, entry)
                writer.write_bytes(name, self._merged_text(text[name], entry, data) if name in text else data)

    def _text_weights(self, others: Mapping[str, TensorEntry]) -> dict[str, str]:
        """The updated layers of text encoders by the names of their weights in a single file."""
        places = self.base.family.layout.prefixes
        found = {}
        for layer in self.text:
            encoder, name = encoder_of(layer)
            names = [f"{places.get(encoder, '')}{within}{name}.weight" for within in ("", "transformer.")]
            found[next((each for each in names if each in others), names[0])] = layer
        lost = [layer for name, layer in found.items() if name not in others]
        if lost:
            raise UserError(
                f"{len(lost)} layers of text encoders that the LoRA updates are not in {self.base.name}: "
                f"{join_names(lost, 3)}. Merge into a single file that has them, or leave them out: --denoiser-only"
            )
        return found


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    if dtype is torch.float16 and not cast.isfinite().all():
        raise UserError(f"{name} {overflow('fp16')}")
    return cast
