"""Single ``.safetensors`` files in the original layout (Stability, ComfyUI): identify their content by the header.

Imports torch only to read tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.engine.tensors import swap_halves
from simpletune.models.shared.fused import Rows
from simpletune.models.shared.model_config import ModelConfig, require_sizes
from simpletune.models.shared.recognise import A_LORA, OF_DIFFUSERS, kind_of
from simpletune.system.checksums import fingerprint_of_spans
from simpletune.system.hub import WEIGHT_FILES
from simpletune.system.options import UserError, join_names
from simpletune.system.portable import join_words
from simpletune.system.safetensors_file import conversion_command, read_header, require_safetensors
from simpletune.system.shell import quote_command

if TYPE_CHECKING:
    from torch import Tensor

DENOISER_PREFIXES = ("model.diffusion_model.", "")


def is_single_file(name: str) -> bool:
    """Return whether a name is the path of a single weight file."""
    return name.endswith(WEIGHT_FILES) and not Path(name).is_dir()


def a_lora(file: Path) -> str:
    """Say what to do with a LoRA that was given in place of something else."""
    named = join_words([str(file)])
    return (
        f"a LoRA. Draw with it: {quote_command('simpletune', 'generate', '--lora', file)}. Train it further by "
        f"adapter.start={named}, or on top of it by model.loras, in a configuration of its base"
    )


def _what_else(file: Path, shapes: Mapping[str, list[int]]) -> str | None:
    """Say what a file is that has no model of a family, and what to do with it; None if it is unknown."""
    if any(map(A_LORA.search, shapes)):
        return a_lora(file)
    kind = kind_of(shapes)
    if kind is None or not kind.family:
        return kind and str(kind)
    if kind.form == OF_DIFFUSERS:
        return f"{kind}: give the folder that contains it"
    return f"{kind.title}: set model.family to {kind.family}"


@dataclass(frozen=True)
class Origin:
    """The source of one of diffusers' tensors in the original layout."""

    name: str  # the original tensor's name, without the prefix
    rows: Rows | None = None  # which part of it, if it is fused
    swapped: bool = False  # whether to swap the two halves along the first axis
    pointwise: bool = False  # whether the original is a 1x1 convolution's weight, and this one a matrix
    transposed: bool = False  # whether the original is this matrix's transpose


@dataclass(frozen=True, eq=False)  # compared by identity: each family has one
class FileLayout:
    """How a family's single files are laid out."""

    family: str  # the family's name for messages, such as SD3
    denoiser: str  # the name of the part that is trained: ``transformer`` or ``unet``
    marker: str  # a tensor that every file with that part contains, without its prefix
    prefixes: Mapping[str, str]  # the prefix of every other part's tensors, by the part's name
    infer: Callable[[Mapping[str, list[int]]], ModelConfig]
    """Derives the denoiser's ``config.json`` from its tensors' shapes, by original names."""
    origins: Callable[[ModelConfig], Mapping[str, Origin]]
    """Returns the source of each of the denoiser's tensors, by diffusers' name."""
    text: Callable[[Mapping[str, Tensor], ModelConfig], dict[str, Tensor]] | None = None
    """Returns a text encoder's tensors under transformers' names, by their names in the file without the prefix and the
    encoder's ``config.json``; None if the file has these names."""
    others: Callable[[str, Collection[str], ModelConfig], Mapping[str, Origin]] | None = None
    """Returns the source of each tensor of a part other than the denoiser, by its name in the part's folder, from the
    part's name, these names and the denoiser's ``config.json``. KeyError: there is no such tensor originally. None if
    written files contain only the denoiser, unless a single file provides the rest."""
    marks: Mapping[str, ModelConfig] = field(default_factory=dict)
    """The settings of the scheduler that the empty tensors of a file stand for, by the tensor's name."""
    told: Callable[[SingleFile], ModelConfig] = lambda file: {}
    """Returns the settings of the scheduler that a file's shapes tell."""
    unused: Collection[str] = ()
    """Names of tensors that some files have and no forward pass reads."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """What a file with a tensor of such a name (a pattern) is, if it cannot be trained, and a remedy."""


class SingleFile:
    """A file in the original layout, of which only the header is read. Create it with ``open_file``.

    Args:
        path: the file.
        layout: the family's layout.

    Raises:
        UserError: it is damaged, or contains no model of that family.
    """

    def __init__(self, path: Path, layout: FileLayout):
        if path.suffix == ".gguf":
            require_safetensors(path)
        if path.suffix != ".safetensors":
            raise UserError(
                f"{path} is not a .safetensors file. Pickled checkpoints (.ckpt, .pt) are never opened. Convert it: "
                f"{conversion_command(path)}"
            )
        self.path, self.layout = path, layout
        self.header = {name: entry for name, entry in read_header(path).items() if name != "__metadata__"}
        self.prefix = next((prefix for prefix in DENOISER_PREFIXES if prefix + layout.marker in self.header), "")
        for pattern, similar in layout.refused.items():
            if tell := next((name for name in self.header if re.search(pattern, name)), None):
                raise UserError(f"{path} (by its tensor {tell}) is {similar}")
        if not self.has(layout.denoiser) and not any(self.has(part) for part in layout.prefixes if part != "vae"):
            first = ", ".join(list(self.header)[:3]) or "nothing"
            kind = _what_else(path, {name: entry["shape"] for name, entry in self.header.items()})
            seems = f"It seems to be {kind}" if kind else f"Its first tensors: {first}"
            block = layout.marker.partition(".")[0]
            raise UserError(f"{path} contains no {layout.family} model in the original layout ({block}...). {seems}")

    def has(self, part: str) -> bool:
        """Return whether the file contains the weights of a part (``transformer``, ``vae``, ``text_encoder``, ...)."""
        prefixes = self.layout.prefixes
        if part == self.layout.denoiser:
            return self.prefix + self.layout.marker in self.header
        return part in prefixes and any(name.startswith(prefixes[part]) for name in self.header)

    def tensors_of(self, part: str) -> ModelConfig:
        """Return a part's header entries, by name without its prefix. Raises UserError if their type is unsupported."""
        prefix = self.prefix if part == self.layout.denoiser else self.layout.prefixes[part]
        others = () if prefix else tuple(self.layout.prefixes.values())
        named = {name: entry for name, entry in self.header.items() if name.startswith(prefix)}
        found = {
            name.removeprefix(prefix): entry
            for name, entry in named.items()
            if not name.startswith(others) and name not in self.layout.marks
        }
        found = {name: entry for name, entry in found.items() if name not in self.layout.unused}
        types = sorted(
            {entry["dtype"] for entry in found.values()} - {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64"}
        )
        scaled = [name for name in found if name.endswith(("scaled_fp8", ".scale_weight", ".weight_scale"))]
        if scaled or types:
            number = "int8" if "I8" in types else "fp8"
            what = f"scaled {number} ({scaled[0]})" if scaled else f"the type {', '.join(types)}"
            if nvfp4 := next((name for name in found if name.endswith(".weight_scale_2")), None):
                what = f"nvfp4 ({nvfp4})"
            raise UserError(
                f"{self.path}: its {part} is in {what}, which is not supported. Use the fp16 or bf16 file instead"
            )
        return found

    @cached_property
    def denoiser_config(self) -> ModelConfig:
        """The denoiser's configuration, inferred from its tensors' shapes. Raises UserError if they do not make one."""
        part = self.layout.denoiser
        found, incomplete = self.tensors_of(part), f"{self.path} is not a complete {self.layout.family} {part}"
        try:
            config = self.layout.infer({name: entry["shape"] for name, entry in found.items()})
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None
        except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
            raise UserError(f"{incomplete}: {error} is missing or invalid. Download it again") from None
        require_sizes(config, part, str(self.path))
        wanted = {origin.name for origin in self.layout.origins(config).values()}
        if missing := sorted(wanted - set(found)):
            raise UserError(f"{incomplete}; missing: {join_names(missing)}. Download it again")
        return config

    @property
    def scheduler_settings(self) -> ModelConfig:
        """The settings of the scheduler that the file's shapes tell and its marks stand for."""
        present = (settings for mark, settings in self.layout.marks.items() if mark in self.header)
        return {**self.layout.told(self), **{name: value for each in present for name, value in each.items()}}

    def check(self, part: str) -> None:
        """Check that a part can be read. Raises UserError if tensors are missing, or have an unsupported type."""
        _ = self.denoiser_config if part == self.layout.denoiser else self.tensors_of(part)

    def fingerprint(self, part: str, sums: Path | None = None) -> str:
        """Return a short hash of a part's names, types, shapes and bytes; ``sums`` as for ``Part.fingerprint``."""
        entries = self.tensors_of(part)
        about = repr(sorted((name, entry["dtype"], entry["shape"]) for name, entry in entries.items()))
        with open(self.path, "rb") as handle:
            start = 8 + int.from_bytes(handle.read(8), "little")
        spans: list[tuple[int, int]] = []  # of the part alone: another part's tensors may lie between
        for first, last in sorted(entry["data_offsets"] for entry in entries.values()):
            if spans and spans[-1][1] == start + first:
                spans[-1] = spans[-1][0], start + last
            else:
                spans.append((start + first, start + last))
        return fingerprint_of_spans(self.path, about, spans, sums)

    def read(self, part: str) -> dict[str, Tensor]:
        """Read a part's tensors, by the name without its prefix, as views of the memory-mapped file."""
        from safetensors import safe_open

        prefix = self.layout.prefixes[part]
        with safe_open(self.path, framework="pt") as handle:
            return {name: handle.get_tensor(prefix + name) for name in self.tensors_of(part)}


def open_file(path: Path, layout: FileLayout) -> SingleFile:
    """Open a file by its header, cached until the file changes. See ``SingleFile``."""
    return _open(path, layout, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _open(path: Path, layout: FileLayout, _changed: int) -> SingleFile:
    return SingleFile(path, layout)


class OriginalReader:
    """Reads the denoiser of a memory-mapped single file on demand, under diffusers' names."""

    def __init__(self, path: Path, layout: FileLayout):
        from safetensors import safe_open

        file = open_file(path, layout)
        self._prefix = file.prefix
        self._origins = layout.origins(file.denoiser_config)
        unknown = set(file.tensors_of(layout.denoiser)) - {origin.name for origin in self._origins.values()}
        self.names = set(self._origins) | unknown
        """Diffusers' names, and the original names of unknown tensors."""
        self._file = safe_open(path, framework="pt")

    def get(self, name: str) -> Tensor:
        """Read one tensor on the CPU in its type on disk, except that fp8 is converted to bf16, which is exact."""
        import torch

        origin = self._origins[name]
        tensor = self._file.get_tensor(self._prefix + origin.name)
        if origin.rows is not None:
            tensor = tensor[origin.rows.within(len(tensor))]
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            tensor = tensor.to(torch.bfloat16)
        return swap_halves(tensor) if origin.swapped else tensor
