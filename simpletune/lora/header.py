"""What a LoRA file's header tells: layout, layers, ranks, alphas. No weights are read but alphas; no torch."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from simpletune.lora.families import family_of_lora, is_lora, kind_of_model, other_methods
from simpletune.lora.layouts import ALPHA, DOWN, PEFT, TEXT_ENCODERS, UP, Layout, layers_of, layout_of, split_key
from simpletune.options import Json, UserError, shortened
from simpletune.system.safetensors_file import TYPES, read_header

PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
ADAPTER_METADATA = "lora_adapter_metadata"  # diffusers' name for PEFT's settings in the header
LISTED = 6
LONGEST_PATTERN = 200  # characters
LARGEST_SCALE = 1e6
"""Alpha over rank, at most; files that people train have 0.001 to 100."""


class TensorEntry(TypedDict):
    """What a safetensors header says of one tensor; offsets count from the header's end."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass
class Module:
    """One updated module of a file.

    Args:
        name: as in the file, with its prefix.
        keys: by role.
        layers: diffusers' names of the layers that it updates: one, or the three of a fused q, k, v.
        alpha: from its own tensor; None: it has none.
    """

    name: str
    keys: dict[str, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    alpha: float | None = None


class LoraHeader:
    """A LoRA file as its header shows it.

    Args:
        file: safetensors.

    Raises:
        UserError: it is damaged, or no safetensors file.
    """

    def __init__(self, file: Path):
        require_safetensors(file)
        self.file = file
        header = read_header(file)
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.entries: dict[str, TensorEntry] = header
        self.names = list(self.entries)
        self.text = [name for name in self.names if TEXT_ENCODERS.match(name)]
        self.methods = other_methods(self.names)
        self.odd_alphas: list[str] = []
        self.modules = self._modules()
        names = [module.name for module in self.modules.values()]
        self.layout: Layout | None = layout_of(names)
        for module in self.modules.values():
            module.layers = layers_of(self.layout, module.name) if self.layout else ()

    def _modules(self) -> dict[str, Module]:
        found: dict[str, Module] = {}
        for key in self.names:
            split = split_key(key)
            if split is None or key in self.text:
                continue
            module = found.setdefault(split[0], Module(split[0]))
            module.keys[split[1]] = key
            if split[1] == ALPHA:
                module.alpha = self._scalar(key)
        return {name: found[name] for name in sorted(found, key=natural)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by key."""
        return {name: tuple(entry["shape"]) for name, entry in self.entries.items()}

    @cached_property
    def family(self) -> tuple[str, str]:
        """The model that it is for, and what shows it."""
        return family_of_lora(self.shapes)

    @property
    def is_lora(self) -> bool:
        """Whether it holds updates rather than a model."""
        return is_lora(self.names)

    @property
    def unmatched(self) -> list[str]:
        """Keys that belong to no layer of SD3's transformer."""
        lost = [key for module in self.modules.values() if not module.layers for key in module.keys.values()]
        known = {key for module in self.modules.values() for key in module.keys.values()}
        return [name for name in self.names if name not in known or name in lost]

    @property
    def halves(self) -> list[str]:
        """Modules that lack one of the two factors."""
        return [module.name for module in self.modules.values() if not {DOWN, UP} <= set(module.keys)]

    def rank(self, module: Module) -> int:
        """A module's rank: the rows of its first factor; 0 for a factor that is one number."""
        return (self.shapes[module.keys[DOWN]] or (0,))[0]

    @cached_property
    def settings(self) -> Json | None:
        """PEFT's settings of the transformer's adapter, from the header or an adapter_config.json beside; else None."""
        if ADAPTER_METADATA in self.metadata:
            try:
                found = json.loads(self.metadata[ADAPTER_METADATA])
            except (ValueError, RecursionError):
                raise UserError(
                    f"{self.file}: {ADAPTER_METADATA} in its header is no JSON. The file is damaged"
                ) from None
            return _checked(found, f"{self.file}: {ADAPTER_METADATA} in its header")
        beside = self.file.with_name("adapter_config.json")
        if self.layout is PEFT and beside.is_file():
            try:
                return _checked(json.loads(beside.read_text()), str(beside))
            except ValueError:
                raise UserError(f"{beside} is no JSON. The file is damaged") from None
        return None

    def scale(self, module: Module) -> float:
        """What a module's product is multiplied by: its own alpha before the header's, over its rank; else 1."""
        rank = self.rank(module)
        if module.alpha is not None:
            return module.alpha / rank if rank else math.nan
        return self.header_scale(module)

    def header_scale(self, module: Module) -> float:
        """What the settings in the header make of it, as PEFT reads them; 1 without any."""
        if self.settings is None:
            return 1.0
        layer = module.layers[0] if module.layers else module.name
        alpha = _pattern(self.settings.get("alpha_pattern"), layer, self.settings.get("lora_alpha"))
        rank = _pattern(self.settings.get("rank_pattern"), layer, self.settings.get("r"))
        if alpha is None or not rank:
            return 1.0
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def _scalar(self, key: str) -> float | None:
        entry = self.entries[key]
        begin, end = entry["data_offsets"]
        of = TYPES.get(entry["dtype"])
        if math.prod(entry["shape"]) != 1 or of is None or of.struct is None:
            self.odd_alphas.append(f"{key} should be one number, and is {entry['dtype']} {entry['shape']}")
            return None
        with open(self.file, "rb") as handle:
            handle.seek(8 + int.from_bytes(handle.read(8), "little") + begin)
            data = handle.read(end - begin)
        if entry["dtype"] == "BF16":
            data = b"\0\0" + data
        return float(struct.unpack(of.struct, data)[0])


def require_safetensors(file: Path) -> None:
    """Refuse what is not there and what would have to be unpickled.

    Raises:
        UserError: with what it is.
    """
    if not file.is_file():
        raise UserError(f"{file} does not exist. Give a .safetensors file")
    with open(file, "rb") as handle:
        start = handle.read(4)
    pickled = start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") or start == b"PK\x03\x04"
    if file.suffix in PICKLES or pickled:
        raise UserError(
            f"{file} is a pickle file ({file.suffix or 'by its first bytes'}): loading one can run any program, so "
            "it is never opened. Get the .safetensors version, or convert it where you trust its source"
        )
    if start == b"GGUF":
        raise UserError(f"{file} is a GGUF file, which is not read. Get the .safetensors version")


def open_lora(file: Path) -> LoraHeader:
    """The header of a LoRA that SD3's transformer can take, checked as far as a header can be.

    Raises:
        UserError: it is no LoRA, of another model, by another method, incomplete, or has keys that match nothing.
    """
    header = LoraHeader(file)
    if not header.names:
        raise UserError(f"{file} is empty: it holds no tensors")
    if not header.is_lora:
        kind = kind_of_model(header.names) or f"no LoRA that is known here (it holds {', '.join(header.names[:4])})"
        raise UserError(f"{file} is {kind}. Give a LoRA for Stable Diffusion 3")
    family, shown = header.family
    if not family.startswith("Stable Diffusion 3"):
        raise UserError(f"{file} is a LoRA for {family} ({shown}). Give one for Stable Diffusion 3")
    if header.methods:
        method, keys = next(iter(header.methods.items()))
        raise UserError(
            f"{file} is {method}, which is not supported ({keys[0]}). Only plain LoRA can be applied exactly"
        )
    if header.settings and header.settings.get("use_dora"):
        raise UserError(f"{file} is DoRA by its header, which is not supported. Only plain LoRA can be applied exactly")
    if header.layout is None:
        raise UserError(f"{file} mixes layouts: {', '.join(_examples(header))}. Every key must have the same prefix")
    if header.unmatched:
        count, listed = len(header.unmatched), shortened(header.unmatched, LISTED)
        text = " (updates of text encoders, which simpletune does not apply)" if header.text else ""
        raise UserError(f"{file}: {count} of {len(header.names)} keys match no layer of SD3: {listed}{text}")
    if header.halves:
        raise UserError(f"{file}: {header.halves[0]} lacks one of its two factors. The file is damaged")
    if header.odd_alphas:
        raise UserError(f"{file}: {header.odd_alphas[0]}. The file is damaged")
    _require_shapes(header)
    _require_scales(header)
    return header


def _require_shapes(header: LoraHeader) -> None:
    for module in header.modules.values():
        down, up = header.shapes[module.keys[DOWN]], header.shapes[module.keys[UP]]
        if len(down) != 2 or len(up) != 2:
            if module.layers == ("pos_embed.proj",):
                raise UserError(
                    f"{header.file}: {module.name} updates a convolution (the patch embedding): not supported"
                )
            raise UserError(f"{header.file}: {module.name} has {list(down)} and {list(up)}, which are no matrices")
        if down[0] != up[1] or up[0] % len(module.layers) or 0 in (*down, *up):
            raise UserError(
                f"{header.file}: {module.name} has {list(down)} and {list(up)}, which do not fit each other"
            )


def _require_scales(header: LoraHeader) -> None:
    for module in header.modules.values():
        scale = header.scale(module)
        if not abs(scale) <= LARGEST_SCALE:  # NaN, too
            raise UserError(
                f"{header.file}: {module.keys.get(ALPHA, module.name)} gives a scale of {scale:g}. A scale is finite "
                f"and at most {LARGEST_SCALE:g}. The file is damaged"
            )


def _examples(header: LoraHeader) -> list[str]:
    by_start = {name.partition(".")[0].partition("_")[0]: name for name in header.modules}
    return list(by_start.values())[:LISTED]


def _checked(found: object, where: str) -> Json:
    """PEFT's settings, with the kinds of values that they must have.

    Raises:
        UserError: they have others.
    """
    settings = {str(k).removeprefix("transformer."): v for k, v in found.items()} if isinstance(found, dict) else {}
    numbers = [settings.get(name) for name in ("r", "lora_alpha")]
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(name) or {}
        numbers += patterns.values() if isinstance(patterns, dict) else [patterns]
    odd = [n for n in numbers if n is not None and (type(n) not in (int, float) or not 0 <= n < 2**31)]
    if not isinstance(found, dict) or odd:
        raise UserError(
            f"{where} holds {str(odd[0] if odd else found)[:40]!r}, which is no setting. The file is damaged"
        )
    return settings


def _pattern(patterns: Mapping[str, float] | None, layer: str, default: float | None) -> float | None:
    """PEFT's rule: the first pattern that matches the end of a layer's name."""
    for pattern, value in (patterns or {}).items():
        if len(pattern) > LONGEST_PATTERN or len(re.findall(r"[*+?{]", pattern)) > 4 or re.search(r"\)[*+?{]", pattern):
            raise UserError(
                f"the pattern {pattern[:40]!r} in a LoRA's settings could take for ever to match: at most "
                f"{LONGEST_PATTERN} characters, 4 repetitions, none of a group. Use the layers' names"
            )
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", layer)
        except re.error:
            raise UserError(f"the pattern {pattern!r} in a LoRA's settings is none. The file is damaged") from None
        if fits:
            return value
    return default


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts block 2 before block 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
