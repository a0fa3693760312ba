"""Merge LoRAs into the base, W + sum of scale_n B_n A_n; write a diffusers folder or a file in the original layout.

Streams the output with one layer in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from simpletune.adapters.files.base_reader import KINDS, TYPES, BaseReader
from simpletune.adapters.files.header import TensorEntry, tensor_bytes
from simpletune.adapters.files.updates import Updates, without_other_input
from simpletune.adapters.files.write import overflow
from simpletune.adapters.methods.formulas import FLOATS
from simpletune.engine.tensors import swap_halves
from simpletune.models.lora_registry import require_same_family
from simpletune.models.shared.single_file import FileLayout, Origin, open_file
from simpletune.models.text_layers import encoder_of, encoders_in, split_text
from simpletune.models.unet.unet_config import inpainting_channels
from simpletune.system.atomic import atomic_folder
from simpletune.system.model_folder import NAMES, weight_files
from simpletune.system.options import UserError, join_names, plural
from simpletune.system.safetensors_file import SafetensorsWriter, WeightReader, read_header

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
        weights = base.weight_shapes()
        loras = [(without_other_input("the LoRA", updates, weights), strength) for updates, strength in loras]
        self.base, self._loras, self._dtype = base, loras, dtype
        self._error = self._effect = 0.0
        self.text = sorted({name for updates, _ in loras for name in split_text(updates)[1]})
        self.changed = {name for updates, _ in loras for name in updates} - set(self.text)
        for updates, _ in loras:
            layers = {layer: update.shape for layer, update in split_text(updates)[0].items()}
            require_same_family("the LoRA", layers, weights)
        lost = sorted(name for name in self.changed if name not in weights)
        if lost:
            raise UserError(
                f"{plural(len(lost), 'layer')} of the LoRA {'is' if len(lost) == 1 else 'are'} not in "
                f"{base.name}: {join_names(lost, 5)}"
            )
        for updates, _ in loras:
            for name, update in split_text(updates)[0].items():
                if not update.fits(weights[name]):
                    outputs, *inputs = weights[name]
                    raise UserError(
                        f"{name}: the LoRA has shape {list(update.shape)} (outputs, inputs), and {base.name} has "
                        f"{[outputs, math.prod(inputs)]}. The LoRA belongs to another model"
                    )

    @property
    def names(self) -> set[str]:
        return set(self.base.shapes)

    def kind(self, name: str) -> str:
        """Return the type of a tensor in the output, by safetensors' name."""
        return KINDS[FLOATS[self._dtype]] if self._dtype else self.base.kinds[name]

    def get(self, name: str) -> Tensor:
        """Compute one merged tensor in its output type."""
        tensor, dtype = self.base.get(name), TYPES[self.kind(name)]
        layer = name.removesuffix(".weight")
        if layer == name or layer not in self.changed:
            return _cast(name, tensor, dtype)
        return self._merged(layer, tensor, dtype)

    def _merged(self, layer: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a layer's weight with its updates, in its output type."""
        exact = tensor.float()
        delta = torch.zeros_like(exact)
        for updates, strength in self._loras:
            if layer in updates:
                delta += strength * updates[layer].delta_for(exact.flatten(1)).view_as(delta)
        exact = exact + delta
        merged = _cast(layer, exact, dtype)
        self._error += float((merged.float() - exact).double().square().sum())
        self._effect += float(delta.double().square().sum())
        return merged

    def _merged_original(self, pieces: Pieces, kind: str, whole: Tensor) -> Tensor:
        """Merge the updates of text encoders' layers into the original tensor that holds their weights."""
        merged = whole.clone()
        for layer, origin in pieces:
            weight = merged if origin.rows is None else merged[origin.rows.within(len(merged))]
            weight = weight.T if origin.transposed else weight
            weight.copy_(self._merged_text(layer, kind, weight))
        return merged

    def _merged_text(self, layer: str, kind: str, weight: Tensor) -> Tensor:
        """Merge the updates of a text encoder's layer into its weight, in its own type."""
        update = next(updates[layer] for updates, _ in self._loras if layer in updates)
        if kind not in TYPES or not update.fits(shape := list(weight.shape)):
            raise UserError(
                f"{layer}: the LoRA has shape {list(update.shape)}, and {self.base.name} has {kind} {shape}. The LoRA "
                "belongs to another model. Leave its text encoders out: --denoiser-only"
            )
        return self._merged(layer, weight, TYPES[kind])

    @property
    def lost(self) -> float:
        """Rounding error of the file's type, relative to the updates so far (Frobenius norms over all layers)."""
        return (self._error / self._effect) ** 0.5 if self._effect else 0.0

    def write_folder(self, folder: Path, metadata: Mapping[str, str], done: Callable[[], None]) -> None:
        """Write a folder that diffusers' ``from_pretrained`` loads; replaces an old one. Calls ``done`` after each
        tensor."""
        entries = {name: (self.kind(name), shape) for name, shape in self.base.shapes.items()}
        if self.text:
            encoders = encoders_in(self.text, self.base.family.lora[0].names.encoders)
            raise UserError(
                f"the LoRA also updates {encoders}, and the folder holds only the denoiser. Merge into a "
                "single file that has text encoders (--base FILE --out FILE), or leave them out: --denoiser-only"
            )
        with atomic_folder(folder) as part:
            self.base.save_config(part)
            with SafetensorsWriter(part / f"{NAMES[0]}.safetensors", entries, {"format": "pt", **metadata}) as writer:
                for name in entries:
                    writer.write(name, self.get(name))
                    done()

    def write_file(self, file: Path, metadata: Mapping[str, str], done: Callable[[], None]) -> None:
        """Write one file in the original layout, with the other tensors and the metadata of a single-file base, and the
        other parts in folders if their original names are known. Calls ``done`` after each tensor. Raises UserError if
        the family has no single files, or readers would take this one for a model with another target."""
        base, layout = self.base, self.base.family.files.layout
        if layout is None:
            raise UserError(f"{file}: {base.family.words.title} models have no single files. Give --out a folder")
        predicts_v, read = (
            (base.scheduler() or {}).get("prediction_type") == "v_prediction",
            base.config.get("in_channels"),
        )
        if predicts_v and not layout.marks and read == inpainting_channels(base.config):
            raise UserError(
                f"{base.name}: predicts v, but every reader takes a single file of an inpainting model of Stable "
                "Diffusion 2 for one that predicts noise. Write a folder"
            )
        groups = _by_original(layout.origins(base.config))
        beside = [FolderPart(name, folder, base, layout) for name, folder in base.others().items()]
        prefix = PREFIX
        others: dict[str, TensorEntry] = {}
        old: dict[str, str] = {}
        if base.rest is not None:
            prefix = open_file(base.rest, layout).prefix
            header = read_header(base.rest)
            old = header.pop("__metadata__", None) or {}
            old = {k: v for k, v in old.items() if not k.startswith("modelspec.hash")}
            given = tuple(part.prefix for part in beside)
            others = {
                name: entry
                for name, entry in header.items()
                if name.removeprefix(prefix) not in groups and not name.startswith(given)
            }
        if (marks := base.marks()) is not None:
            others = {name: entry for name, entry in others.items() if name not in layout.marks}
        entries: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (entry["dtype"], tuple(entry["shape"])) for name, entry in others.items()
        }
        for original, pieces in groups.items():
            entries[prefix + original] = (self.kind(pieces[0][0]), _original_shape(pieces, base.shapes))
        for part in beside:
            entries |= part.entries
        entries |= {mark: ("F32", (0,)) for mark in marks or ()}
        text = self._text_weights(layout, others, beside)
        file.parent.mkdir(parents=True, exist_ok=True)
        with SafetensorsWriter(file, entries, {**old, "format": "pt", **metadata}) as writer:
            for original, pieces in groups.items():
                writer.write(prefix + original, _original_tensor(pieces, self.get))
                for _ in pieces:
                    done()
            for part in beside:
                for original, pieces in part.groups.items():
                    writer.write(part.prefix + original, _original_tensor(pieces, partial(self._of_part, part, text)))
            for mark in marks or ():
                writer.write_bytes(mark, b"")
            whole = WeightReader([base.rest] if base.rest is not None else [])
            for name, entry in others.items():
                assert base.rest is not None
                if name in text:
                    writer.write(name, self._merged_original(text[name], entry["dtype"], whole.get(name)))
                else:
                    writer.write_bytes(name, tensor_bytes(base.rest, entry))

    def _of_part(self, part: FolderPart, text: Mapping[str, Pieces], name: str) -> Tensor:
        """Return one tensor of another part, with the updates of its layer."""
        tensor, pieces = part.reader.get(name), text.get(part.layer_weight(name))
        return tensor if pieces is None else self._merged_original(pieces, part.header[name]["dtype"], tensor)

    def _text_weights(
        self, layout: FileLayout, others: Mapping[str, TensorEntry], beside: Sequence[FolderPart]
    ) -> dict[str, Pieces]:
        """Return the updated layers of text encoders by the names of the tensors with their weights: in a single file,
        whose names are transformers' or the original ones, or of ``layer_weight``. Raises UserError if the base lacks
        one."""
        lost = []
        others = {**others, **{part.layer_weight(name): part.header[name] for part in beside for name in part.header}}
        found: dict[str, list[tuple[str, Origin]]] = {}
        for layer in self.text:
            encoder, name = encoder_of(layer)
            weight, prefix = f"{name}.weight", layout.prefixes.get(encoder, "")
            places = [Origin(f"{within}{weight}") for within in (prefix, f"{prefix}transformer.", f"{encoder}.")]
            if layout.others is not None and encoder in layout.prefixes:
                original = layout.others(encoder, [weight], self.base.config)[weight]
                places.append(replace(original, name=prefix + original.name))
            place = next((each for each in places if each.name in others), None)
            if place is None:
                lost.append(layer)
            else:
                found.setdefault(place.name, []).append((layer, place))
        if lost:
            raise UserError(
                f"{len(lost)} layers of text encoders that the LoRA updates are not in {self.base.name}: "
                f"{join_names(lost, 3)}. Merge into a single file that has them, or leave them out: --denoiser-only"
            )
        return dict(found)


class FolderPart:
    """A pipeline's part other than the denoiser, to be written under its original names.

    Args:
        name: ``vae``, ``text_encoder``.
        folder: the part's.
        base: the checkpoint that it belongs to.
        layout: of the file.

    Raises:
        UserError: the folder has no weights, or a tensor without an original name.
    """

    def __init__(self, name: str, folder: Path, base: BaseReader, layout: FileLayout):
        files = weight_files(folder)
        assert layout.others is not None
        self.name, self.prefix, self.reader = name, layout.prefixes[name], WeightReader(files)
        headers = [read_header(file) for file in files]
        self.header: dict[str, TensorEntry] = {n: e for h in headers for n, e in h.items() if n != "__metadata__"}
        try:
            self.groups = _by_original(layout.others(name, self.header, base.config))
        except KeyError as error:
            raise UserError(
                f"{folder}: its tensor {error.args[0]} has no name in the original layout of {layout.family}, which "
                f"has an AutoencoderKL and CLIP. Use the denoiser alone: --base {folder.parent / layout.denoiser}"
            ) from None
        shapes = {name: tuple(entry["shape"]) for name, entry in self.header.items()}
        self.entries = {
            self.prefix + original: (self.header[pieces[0][0]]["dtype"], _original_shape(pieces, shapes))
            for original, pieces in self.groups.items()
        }

    def layer_weight(self, name: str) -> str:
        """Name a text encoder's tensor as ``encoder_of`` names layers, with or without transformers' prefix in the
        file."""
        inner = name.removeprefix("text_model.")
        return f"{self.name}.{inner if inner.startswith('text_projection.') else f'text_model.{inner}'}"


Pieces = Sequence[tuple[str, Origin]]  # the tensors in diffusers' layout that make up an original one, in their order


def _by_original(origins: Mapping[str, Origin]) -> dict[str, Pieces]:
    groups: dict[str, list[tuple[str, Origin]]] = {}
    for name, origin in origins.items():
        groups.setdefault(origin.name, []).append((name, origin))
    return {original: sorted(pieces, key=lambda piece: piece[1].rows or ()) for original, pieces in groups.items()}


def _original_shape(pieces: Pieces, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    name, origin = pieces[0]
    first, *rest = reversed(shapes[name]) if origin.transposed else shapes[name]
    return (origin.rows.whole(first) if origin.rows else first, *rest, *((1, 1) if origin.pointwise else ()))


def _original_tensor(pieces: Pieces, get: Callable[[str], Tensor]) -> Tensor:
    """Return the original tensor, from those in diffusers' layout."""
    whole, origin = torch.cat([get(name) for name, _ in pieces]), pieces[0][1]
    whole = whole[:, :, None, None] if origin.pointwise else whole.T if origin.transposed else whole
    return swap_halves(whole) if origin.swapped and len(pieces) == 1 else whole


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    if dtype is torch.float16 and not cast.isfinite().all():
        raise UserError(f"{name} {overflow('fp16')}")
    return cast
