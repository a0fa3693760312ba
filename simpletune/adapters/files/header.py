"""Read a LoRA file's layout, layers, ranks and alphas without torch. Apart from alphas, reads only the header."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from simpletune.adapters.files.detect_model import (
    TEXT_ALONE,
    UNKNOWN,
    Detected,
    family_of_lora,
    is_lora,
    other_methods,
)
from simpletune.adapters.files.keys import (
    DECOMPOSED,
    DORA,
    DORA_ROLES,
    LOHA,
    LORA,
    OFT,
    PEFT,
    UpdateShape,
    is_by_output,
    is_whole,
    layout_of,
    module_kind,
    plain_key,
    split_key,
    update_shape,
)
from simpletune.adapters.files.resemblance import resemblance
from simpletune.adapters.methods.hypernetwork_structure import is_hypernetwork
from simpletune.models.families import DENOISERS
from simpletune.models.lora_registry import LAYOUTS
from simpletune.models.shared.fused import Rows
from simpletune.models.shared.lora_layout import ALPHA, DORA_SCALE, DOWN, Layout
from simpletune.models.shared.recognise import kind_of
from simpletune.models.text_layers import BUNDLED, TEXT_KEY, encoder_of, encoders_in, is_text, text_layer
from simpletune.system.options import Json, UserError, join_names, plural
from simpletune.system.safetensors_file import TYPES, fp8_value, read_header, require_safetensors

OBJECTIVE, EMBEDDED = "simpletune_objective", "simpletune_config"  # in headers of our files
ADAPTER_METADATA = "lora_adapter_metadata"  # diffusers' name for PEFT's settings in the header
LISTED = 6
FACTORS = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2")
"""Types of factors, by safetensors' names; those of 8 and of 64 bits are read in fp32."""
FAMILIES = ", ".join(names.title for names in LAYOUTS)
READ = "LoRA, LoKr and LoHa, each with DoRA's magnitudes, too, and OFT of the outputs are read"
LONGEST_PATTERN = 200  # characters
DAMAGED = "The file is damaged: download or export it again"
MOST_TENSORS = 100_000  # of a file that is described: matching so many names takes seconds
MOST_BYTES = 2**35  # of a LoRA's tensors; a header of a few bytes can announce any number
MOST_SIDE = 2**15  # inputs or outputs of a layer, and ranks; the widest known have 23,040 (a U-Net's 3x3 convolutions)
MOST_RANK = (
    4096  # of small layers, whose rank may exceed both sides: one setting for all, or the joined ranks of q, k and v
)
MOST_PRODUCTS = 2**15  # rank squared of LoHa, the rank of the equal LoRA; published files have ranks up to 64
LARGEST_SCALE = 1e6
"""Largest accepted alpha / rank; real files have 0.001 to 100."""


class TensorEntry(TypedDict):
    """The entry of one tensor in a safetensors header; offsets count from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def tensor_bytes(file: Path, entry: TensorEntry) -> bytes:
    """Read the bytes of one tensor of a safetensors file."""
    begin, end = entry["data_offsets"]
    with open(file, "rb") as handle:
        handle.seek(8 + int.from_bytes(handle.read(8), "little") + begin)
        return handle.read(end - begin)


@dataclass
class Module:
    """One updated module of a file.

    Args:
        name: the name in the file, with its prefix, but without the words of wrappers.
        keys: keys by role.
        layers: diffusers' names of the layers that it updates: one, or those that it fuses, such as q, k and v.
        rows: which of its rows each is; empty for one layer.
        alpha: the value of its own alpha tensor, or None.
        kind: LoRA, LoKr, LoHa, each of them with magnitudes, or OFT, by its roles.
        factors: keys by role, without alpha.
    """

    name: str
    keys: dict[str, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    rows: tuple[Rows, ...] = ()
    alpha: float | None = None
    kind: str = LORA
    factors: dict[str, str] = field(default_factory=dict)


class LoraHeader:
    """The header of a LoRA file.

    Attributes:
        entries: entries of the tensors by name; ``shapes``: their shapes.
        modules: updated modules of the denoiser by name; ``text_modules``: of text encoders; ``all_modules``: both.
        methods: methods other than plain LoRA, with the keys that identify them.
        is_lora: whether the file contains updates rather than a model.
        kinds: kinds of the denoiser's modules; ``named_kinds``: in a file of text encoders alone, of theirs.
        unmatched: keys that match no layer of the family's denoiser or of a text encoder.
        halves: modules that lack a factor.
        removed: words of wrappers that stand in the file's names and are not read, such as ``_orig_mod.``.
        adapters: PEFT's names of adapters in its keys, which are not read either.
        twice: keys that name a factor which another key names, too.

    Raises:
        UserError: the file is damaged, or not a safetensors file.
    """

    def __init__(self, file: Path):
        require_safetensors(file)
        self.file = file
        header = read_header(file, MOST_TENSORS)
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.entries: dict[str, TensorEntry] = header
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self.entries.items()}
        self.names = list(self.entries)
        self.plain = {name: plain_key(name) for name in self.names}
        self.removed = tuple(dict.fromkeys(word for plain in self.plain.values() for word in plain.removed))
        self.adapters = sorted({plain.adapter for plain in self.plain.values()} - {""})
        plain_names = [plain.key for plain in self.plain.values()]
        self.text = [name for name in plain_names if TEXT_KEY.match(name)]
        self.bundled = [name for name in self.names if name.startswith(BUNDLED)]
        self.methods = other_methods(plain_names)
        self.is_lora = is_lora(plain_names)
        size = max((entry["data_offsets"][1] for entry in self.entries.values()), default=0)
        if self.is_lora and size > MOST_BYTES:
            raise UserError(f"{file} has {size:,} bytes of tensors; a LoRA has at most {MOST_BYTES:,}. {DAMAGED}")
        self.odd_alphas: list[str] = []
        self.twice: list[str] = []
        found: dict[str, Module] = {}
        for key, plain in self.plain.items():
            if (split := split_key(plain.key)) is not None:
                module = found.setdefault(split[0], Module(split[0]))
                if split[1] in module.keys:
                    self.twice.append(key)
                module.keys[split[1]] = key
                if split[1] == ALPHA:
                    module.alpha = self._scalar(key)
        for module in found.values():
            module.kind = module_kind(module.keys)
            module.factors = {role: key for role, key in module.keys.items() if role != ALPHA}
        found = {name: found[name] for name in sorted(found, key=natural_sort_key)}
        self.modules = {name: module for name, module in found.items() if not TEXT_KEY.match(name)}
        self.text_modules = {name: module for name, module in found.items() if name not in self.modules}
        self.all_modules = [*self.modules.values(), *self.text_modules.values()]
        for module in self.text_modules.values():
            layer = text_layer(module.name)
            module.layers = (layer,) if layer else ()
        self.layout: Layout | None = layout_of(list(self.modules), self.family.model, self.family.names)
        self.layout_name = self.layout.name if self.layout else None
        for module in self.modules.values():
            if self.layout is not None:
                module.layers = self.layout.layers(module.name)
                if len(module.layers) > 1:
                    module.rows = self.layout.rows(module.layers)
        self.kinds = sorted({module.kind for module in self.modules.values()})
        self.named_kinds = self.kinds or sorted({module.kind for module in self.text_modules.values()})
        self.halves = [module.name for module in self.all_modules if not is_whole(module.keys)]
        lost = {key for module in self.all_modules if not module.layers for key in module.keys.values()}
        known = {key for module in self.all_modules for key in module.keys.values()} | set(self.bundled)
        self.unmatched = [name for name in self.names if name not in known or name in lost]

    @cached_property
    def family(self) -> Detected:
        """Model that the file is for."""
        if not self.modules and self.text_modules:
            layers = [layer for module in self.text_modules.values() for layer in module.layers]
            return Detected(TEXT_ALONE, encoders_in(layers) or "their keys")
        sizes = {module.name: self.size(module) for module in self.modules.values() if module.kind != LORA}
        sides = {name: (size.outputs, size.inputs) for name, size in sizes.items() if size is not None}
        return family_of_lora({self.plain[key].key: shape for key, shape in self.shapes.items()}, sides, self.metadata)

    @cached_property
    def objective(self) -> str | None:
        """What it was trained by, the name of a ``TrainingObjective``; None if its header does not say it."""
        if OBJECTIVE in self.metadata:
            return self.metadata[OBJECTIVE]
        try:
            return str(json.loads(self.metadata.get(EMBEDDED, "{}"))["objective"]["name"])
        except (LookupError, RecursionError, TypeError, ValueError):  # none of our runs made it
            return None

    def size(self, module: Module) -> UpdateShape | None:
        """Return the size of a module's update; None if factors are missing or do not match."""
        if not is_whole(module.keys):
            return None
        return update_shape({role: self.shapes[key] for role, key in module.factors.items()})

    def rank(self, module: Module) -> int | None:
        """Return what to divide alpha by: for LoRA the rows of its first factor; 0 if the shapes do not tell, None to
        ignore alpha."""
        if module.kind in (LORA, DORA) and DOWN in module.keys:
            return (self.shapes[module.keys[DOWN]] or (0,))[0]
        size = self.size(module)
        return 0 if size is None else size.rank

    @cached_property
    def settings(self) -> Json | None:
        """PEFT's settings of the adapter, from the header or from adapter_config.json beside the file, or None."""
        if ADAPTER_METADATA in self.metadata:
            try:
                found = json.loads(self.metadata[ADAPTER_METADATA])
            except (ValueError, RecursionError):
                raise UserError(f"{self.file}: {ADAPTER_METADATA} in its header is not JSON. {DAMAGED}") from None
            return _valid_settings(found, f"{self.file}: {ADAPTER_METADATA} in its header")
        beside = self.file.with_name("adapter_config.json")
        if (self.layout_name == "peft" or PEFT in self.removed) and beside.is_file():
            try:
                return _valid_settings(json.loads(beside.read_text(encoding="utf-8")), str(beside))
            except ValueError:
                raise UserError(f"{beside} is not JSON. {DAMAGED}") from None
        return None

    @property
    def caution(self) -> str | None:
        """What is known to be wrong with the file by its header (``LoraNames.caution``)."""
        targets = (self.settings or {}).get("target_modules")
        listed = [each for each in targets if isinstance(each, str)] if isinstance(targets, list) else []
        return self.family.names[0].caution(listed) if self.family.names else None

    def scale(self, module: Module) -> float:
        """Return the scale of a module: its own alpha / rank, otherwise the header's, otherwise 1."""
        rank = self.rank(module)
        if module.alpha is not None and rank is None:
            return 1.0
        if module.alpha is not None:
            return module.alpha / rank if rank else math.nan
        return self.header_scale(module)

    def oft_limit(self, module: Module) -> float | None:
        """Return the largest ||B - B^T|| of OFT by its alpha; None: no limit.

        sd-scripts (networks/oft.py) and LyCORIS (diag_oft) limit it to alpha x outputs. ComfyUI trains and applies it
        with alpha alone, and writes its own names without sd-scripts' fields.
        """
        if not module.alpha:
            return None
        size = self.size(module)
        of_comfyui = self.layout_name == "comfy" and "ss_network_module" not in self.metadata
        return module.alpha * (1 if of_comfyui or size is None else size.outputs)

    def is_by_input(self, module: Module) -> bool:
        """Return whether DoRA's magnitudes in a module are of its inputs."""
        size = self.size(module)
        return (
            module.kind in DECOMPOSED.values()
            and DORA_SCALE in module.keys
            and size is not None
            and not is_by_output(DORA_SCALE, self.shapes[module.keys[DORA_SCALE]], size.outputs)
        )

    def header_scale(self, module: Module) -> float:
        """Return the scale that PEFT derives from the header's settings; 1 without settings."""
        layer, settings = module.layers[0] if module.layers else module.name, self.settings
        if settings is None:
            return 1.0
        if is_text(layer):
            encoder, layer = encoder_of(layer)
            own = {k.removeprefix(f"{encoder}."): v for k, v in settings.items() if k.startswith(f"{encoder}.")}
            settings = _valid_settings(own, f"{self.file}: {ADAPTER_METADATA} in its header")
        # alpha has different names for LoRA and for LoKr and LoHa
        alpha = _by_pattern(settings.get("alpha_pattern"), layer, settings.get("lora_alpha", settings.get("alpha")))
        rank = _by_pattern(settings.get("rank_pattern"), layer, settings.get("r"))
        if alpha is None or not rank:
            return 1.0
        return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)

    def _scalar(self, key: str) -> float | None:
        entry = self.entries[key]
        of = TYPES.get(entry["dtype"])
        if math.prod(entry["shape"]) == 1 and entry["dtype"].startswith("F8_") and of is not None:
            return fp8_value(tensor_bytes(self.file, entry)[0], entry["dtype"])
        if math.prod(entry["shape"]) != 1 or of is None or of.struct is None:
            self.odd_alphas.append(f"{key} must be a single number but is {entry['dtype']} {entry['shape']}")
            return None
        data = tensor_bytes(self.file, entry)
        if entry["dtype"] == "BF16":
            data = b"\0\0" + data
        return float(struct.unpack(of.struct, data)[0])


def _valid_settings(found: object, where: str) -> Json:
    """Validate the values of PEFT's settings, and take the denoiser's prefix off their names."""
    denoisers = "|".join(DENOISERS)
    given = found if isinstance(found, dict) else {}
    settings = {re.sub(rf"^({denoisers})\.", "", str(k)): v for k, v in given.items()}
    numbers = [settings.get(name) for name in ("r", "lora_alpha", "alpha")]
    odd: list[object] = []
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(name) or {}
        if isinstance(patterns, dict):
            numbers += patterns.values()
        else:
            odd.append(patterns)
    odd += [n for n in numbers if n is not None and (type(n) not in (int, float) or not 0 <= n < 2**31)]
    if not isinstance(found, dict) or odd:
        raise UserError(f"{where} contains the invalid value {str(odd[0] if odd else found)[:40]!r}. {DAMAGED}")
    return settings


def _by_pattern(patterns: Mapping[str, float] | None, layer: str, default: float | None) -> float | None:
    """Return the value of the first pattern that matches the end of a layer's name, as PEFT does."""
    for pattern, value in (patterns or {}).items():
        if len(pattern) > LONGEST_PATTERN or len(re.findall(r"[*+?{]", pattern)) > 4 or re.search(r"\)[*+?{]", pattern):
            raise UserError(
                f"the pattern {pattern[:40]!r} in a LoRA's settings could take forever to match: patterns may have at "
                f"most {LONGEST_PATTERN} characters and 4 repetitions, none of a group. Use the layers' names"
            )
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", layer)
        except re.error:
            raise UserError(f"the pattern {pattern!r} in a LoRA's settings is invalid. {DAMAGED}") from None
        if fits:
            return value
    return default


def not_read(header: LoraHeader) -> list[str]:
    """List what stands in a file's names that reading leaves out."""
    return [*header.removed, *map(adapter_words, header.adapters)]


def adapter_words(name: str) -> str:
    return f"the adapter's name {name}"


def require_tensors(header: LoraHeader) -> None:
    """Refuse an empty file."""
    if not header.names:
        raise UserError(f"{header.file} is empty: it contains no tensors. Download or export it again")


def require_family(header: LoraHeader) -> None:
    """Refuse a LoRA for another model than ours."""
    if not header.family.is_known:
        model, shown, _ = header.family
        like = f": {resemblance(header.modules).words}" if model == UNKNOWN else ""
        raise UserError(f"{header.file} is a LoRA for {model} ({shown}){like}. Give one for {FAMILIES}")


def objectives_of(headers: Iterable[LoraHeader]) -> dict[str, list[str]]:
    """Return the names of files by what their headers say that they were trained by."""
    found: dict[str, list[str]] = {}
    for header in headers:
        if header.objective is not None:
            found.setdefault(header.objective, []).append(header.file.name)
    return found


def open_lora(file: Path) -> LoraHeader:
    """Open a LoRA for the denoiser of a known family and check everything that its header shows. Raises UserError if
    the file is not a LoRA, is for another model or method, is incomplete, or has keys that match no layer."""
    header = LoraHeader(file)
    require_tensors(header)
    if is_hypernetwork(header.names):
        raise UserError(
            f"{file} is a hypernetwork: a function of the attention's inputs, not an update of weights, so it cannot "
            "be merged, mixed, resized or written as a LoRA. Draw with it (--lora FILE), or use simpletune lora export "
            "FILE --format a1111"
        )
    if not header.is_lora:
        raise UserError(f"{file} is {kind_of(header.shapes) or unknown_kind(header)}. Give a LoRA for {FAMILIES}")
    require_family(header)
    if header.methods:
        method, keys = next(iter(header.methods.items()))
        raise UserError(f"{file} is {method}, which is not supported ({keys[0]}). {READ}")
    if len(header.adapters) > 1:
        raise UserError(
            f"{file} holds {plural(len(header.adapters), 'adapter')} of PEFT: {join_names(header.adapters, LISTED)}. "
            "Save one of them by itself: save_pretrained(FOLDER, selected_adapters=[NAME])"
        )
    if header.twice:
        raise UserError(f"{file} has two keys for one factor, {header.twice[0]} is the second. {DAMAGED}")
    if header.settings and header.settings.get("use_dora") and not set(header.kinds) <= set(DECOMPOSED.values()):
        raise UserError(f"{file} is DoRA according to its header, but lacks its magnitudes. {DAMAGED}")
    if header.layout is None and header.modules:
        by_start = {name.partition(".")[0].partition("_")[0]: name for name in header.modules}
        listed = ", ".join(list(by_start.values())[:LISTED])
        raise UserError(f"{file} mixes layouts: {listed}. Every key must have the same prefix")
    if header.unmatched:
        count, listed = len(header.unmatched), join_names(header.unmatched, LISTED)
        title = " or ".join(names.title for names in header.family.names) or "a text encoder"
        strays = [name for name, module in header.modules.items() if not module.layers]
        like = resemblance(strays, header.family.names)
        raise UserError(
            f"{file}: {count} of {len(header.names)} keys match no layer of {title}: {listed}"
            + (f". {like.remedy(file)}" if like.layout and like.cut != like.layout.prefix else "")
        )
    for module in header.all_modules:
        if module.kind == OFT and (roles := [role for role in DORA_ROLES if role in module.keys]):
            raise UserError(
                f"{file} is OFT with DoRA's magnitudes, which is not supported ({module.keys[roles[0]]}). {READ}"
            )
    if header.halves:
        raise UserError(f"{file}: {header.halves[0]} lacks one of its factors. {DAMAGED}")
    if header.odd_alphas:
        raise UserError(f"{file}: {header.odd_alphas[0]}. {DAMAGED}")
    _require_shapes(header)
    for module in header.all_modules:
        if module.kind == OFT and not 0 <= (module.alpha or 0) < math.inf:  # also refuses NaN
            raise UserError(
                f"{file}: {module.keys[ALPHA]} is {module.alpha:g}, and it limits OFT, so that it must be 0 or above. "
                f"{DAMAGED}"
            )
        scale = header.scale(module)
        if not abs(scale) <= LARGEST_SCALE:  # also refuses NaN
            raise UserError(
                f"{file}: {module.keys.get(ALPHA, module.name)} gives a scale of {scale:g}. A scale must be finite and "
                f"at most {LARGEST_SCALE:g}. {DAMAGED}"
            )
    return header


def _require_shapes(header: LoraHeader) -> None:
    for module in header.all_modules:
        shapes = {role: header.shapes[key] for role, key in module.factors.items()}
        if module.kind == OFT and any(len(shape) == 4 for shape in shapes.values()):
            raise UserError(f"{header.file} is BOFT, which is not supported ({module.name}). {READ}")
        for key in module.factors.values():
            if (dtype := header.entries[key]["dtype"]) not in FACTORS:
                raise UserError(f"{header.file}: {key} is in {dtype}, which is not supported. Use {', '.join(FACTORS)}")
        listed = " and ".join(str(list(shape)) for shape in shapes.values())
        factors = f"{header.file}: {module.name} has factors {listed}"
        larger = [shape[2:] for shape in shapes.values() if len(shape) == 4 and shape[2:] != (1, 1)]
        if larger and header.layout is not None and header.layout.names.convolutions is None:
            side = "x".join(map(str, larger[0]))
            raise UserError(
                f"{header.file}: {module.name} updates a {side} convolution, which is not supported. Train without it"
            )
        plain = {len(shape) for role, shape in shapes.items() if role not in DORA_ROLES}
        if module.kind in (LORA, DORA) and plain not in ({2}, {4}):
            raise UserError(f"{factors}; all must be matrices, or all of a convolution")
        size = update_shape(shapes)
        if size is None or size.outputs % (module.rows[0].of if module.rows else 1):
            raise UserError(f"{factors}, which do not match. {DAMAGED}")
        sides = max(size.outputs, size.inputs)
        if sides > MOST_SIDE * len(module.layers) or (size.rank or 0) > max(sides, MOST_RANK):
            raise UserError(
                f"{factors}: rank {size.rank or 1:,} for {size.inputs:,} inputs and {size.outputs:,} outputs. No layer "
                f"has more than {MOST_SIDE:,}, and no update a higher rank than its layer's larger side. {DAMAGED}"
            )
        if module.kind in (LOHA, DECOMPOSED[LOHA]) and (size.rank or 0) ** 2 > max(MOST_PRODUCTS, sides):
            raise UserError(
                f"{factors}: LoHa of rank {size.rank:,} equals a LoRA of rank {(size.rank or 0) ** 2:,}; at most "
                f"{max(MOST_PRODUCTS, sides):,} are read"
            )
        if len(module.layers) > 1 and header.is_by_input(module):
            raise UserError(
                f"{header.file} is {module.kind} with a magnitude for each input of a layer that fuses "
                f"{len(module.layers)} ({module.name}), which is not supported: one norm is of all of them together. "
                "Train it with magnitudes of the outputs (LyCORIS: wd_on_out)"
            )


def unknown_kind(header: LoraHeader) -> str:
    """Describe a file that is neither a known model nor a LoRA of a known method: its names, and what they are like."""
    like = resemblance(dict.fromkeys(key.rpartition(".")[0] for key in header.names))
    return f"an {like.words} (it contains {', '.join(header.names[:4])})"


def natural_sort_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts block 2 before block 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
