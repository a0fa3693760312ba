"""The meaning of a LoRA file's keys: layouts, roles, and each module's kind and size. Imports no torch.

Readers must take LoKr's shapes from the tensors: tools order and choose its factors differently.

A convolution's factors: LoRA's A [r, i, kh, kw] and B [o, r, 1, 1]; LoKr's W2 [k, q, kh, kw], or [k, r] and
[r, q kh kw]; LoHa's [o, r] and [r, i kh kw]. In Tucker form (LyCORIS: use_tucker) they are those of a 1x1 convolution,
LoKr's and LoHa's with ranks first, and a core [r, r, kh, kw] stands between two factors.

Shapes: o outputs, i inputs, r rank, kh x kw kernel; LoKr: o = l k, i = m q, W1 [l, m], W2 [k, q].
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from simpletune.models.lora_registry import LAYOUTS
from simpletune.models.shared.lora_layout import (
    ALPHA,
    DORA_SCALE,
    DOWN,
    MAGNITUDE,
    MID,
    OFT_BLOCKS,
    UP,
    Layout,
    LoraNames,
)
from simpletune.models.text_layers import TEXT_KEY

LORA, LOKR, LOHA, OFT = "LoRA", "LoKr", "LoHa", "OFT"
DORA, DOKR, DOHA = "DoRA", "DoKr", "DoHa"  # LoRA, LoKr and LoHa with magnitudes
DECOMPOSED = {LORA: DORA, LOKR: DOKR, LOHA: DOHA}
"""The kinds whose weight has a direction and magnitudes (arXiv:2402.09353), by those of the update of the direction."""
LOKR_ROLES = tuple(f"lokr_w{n}{part}" for n in (1, 2) for part in ("", "_a", "_b"))
LOHA_ROLES = tuple(f"hada_w{n}{part}" for n in (1, 2) for part in ("_a", "_b"))
DORA_ROLES = (MAGNITUDE, DORA_SCALE)
CORES = {"hada_t1": "hada_w1", "hada_t2": "hada_w2", "lokr_t2": "lokr_w2"}
"""The cores of the Tucker form, with the matrix whose two factors each stands between; LoRA's is ``MID``."""
KERNELS = (DOWN, "lokr_w2")
"""The factors of a convolution that have its kernel as dimensions."""
Shape = tuple[int, ...]
ROLES = {
    "lora_A.weight": DOWN,
    "lora_B.weight": UP,
    "lora_down.weight": DOWN,
    "lora_up.weight": UP,
    "lora_mid.weight": MID,
    "lora.down.weight": DOWN,
    "lora.up.weight": UP,
    "lora_linear_layer.down.weight": DOWN,
    "lora_linear_layer.up.weight": UP,
    "alpha": ALPHA,
    "lora_magnitude_vector": MAGNITUDE,
    "lora_magnitude_vector.weight": MAGNITUDE,
    "dora_scale": DORA_SCALE,
    OFT_BLOCKS: OFT_BLOCKS,
    **{role: role for role in (*LOKR_ROLES, *LOHA_ROLES, *CORES)},
}
PREFIXED = re.compile(
    "|".join(re.escape(each.prefix) for layouts in LAYOUTS.values() for each in layouts if each.prefix)
    + f"|{TEXT_KEY.pattern.removeprefix('^')}"
)
OLD_ROLES = {"_lora.down.weight": DOWN, "_lora.up.weight": UP}  # as in attention processors of old diffusers versions
TITLES = {
    "kohya": "kohya",
    "comfy": "ComfyUI native",
    "peft": "PEFT",
    "onetrainer": "OneTrainer",
    "original": "original names",
    "lycoris": "LyCORIS",
}


WRAPPERS = re.compile(r"(?<![^._])_orig_mod[._]|(?<![^.])module\.")
"""What torch.compile and DataParallel put into the names of a model that they wrap."""
PEFT = "base_model.model."
ADAPTER = re.compile(
    r"(?<=\.)(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|oft_R|(?:lokr|hada)_[wt][12](?:_[ab])?)"
    r"\.(?!weight$|bias$)([^.]+)(?=$|\.weight$|\.bias$)"
)
"""A factor and the name of its adapter, which PEFT's own files leave out."""


class PlainKey(NamedTuple):
    """A key without what wrapping a model put into it."""

    key: str
    removed: tuple[str, ...] = ()  # words of wrappers
    adapter: str = ""  # PEFT's name of the adapter


def plain_key(key: str) -> PlainKey:
    """Take the words of wrappers and the name of PEFT's adapter out of a key.

    ``base_model.model.`` stays where it is all that precedes a layer: PEFT's own layout, whose files have no other
    prefix.
    """
    adapter = ADAPTER.search(key)
    plain = key[: adapter.end(1)] + key[adapter.end() :] if adapter else key
    removed = dict.fromkeys(word[:-1] + "." for word in WRAPPERS.findall(plain))
    plain = WRAPPERS.sub("", plain)
    while (place := plain.find(PEFT)) > 0 or place == 0 and PREFIXED.match(plain, len(PEFT)):
        plain = plain[:place] + plain[place + len(PEFT) :]
        removed[PEFT] = None
    return PlainKey(plain, tuple(removed), adapter[2] if adapter else "")


def split_key(key: str) -> tuple[str, str] | None:
    """Split a key into its module (with prefix) and role; None if it is not a LoRA key."""
    for ending, role in ROLES.items():
        if key.endswith("." + ending):
            return key.removesuffix("." + ending), role
    for ending, role in OLD_ROLES.items():
        if key.endswith(ending):
            return key.removesuffix(ending), role
    return None


def layout_of(modules: list[str], model: str = "", families: Collection[LoraNames] = ()) -> Layout | None:
    """Return the layout of modules (with prefixes); None if they have no common layout.

    Families share prefixes and names, so this is the layout with the prefix that knows most of the modules; of several,
    that of the family of ``model``, then one of ``families``, then the one of a family's results.
    """
    known = [layout for layouts in LAYOUTS.values() for layout in layouts]
    prefixes = {layout.prefix for layout in known if layout.prefix}
    common = {prefix for prefix in prefixes if all(module.startswith(prefix) for module in modules)}
    if not common and not any(module.startswith(tuple(prefixes)) for module in modules):
        common = {""}
    fitting = [layout for layout in known if layout.prefix in common] if modules else []

    def fitness(layout: Layout) -> tuple[int, bool, bool, bool]:
        count, names = sum(bool(layout.layers(module)) for module in modules), layout.names
        return count, names.has_model(model), names in families, count > 0 and layout is LAYOUTS[names][0]

    return max(fitting, key=fitness, default=None)


class UpdateShape(NamedTuple):
    """The size of a module's update.

    Args:
        outputs: o.
        inputs: i, of a convolution i kh kw.
        rank: what readers divide alpha by; None: they ignore alpha, because both of LoKr's factors are whole.
        factors: LoKr's factors in words, otherwise empty.
    """

    outputs: int
    inputs: int
    rank: int | None
    factors: str = ""

    def __str__(self) -> str:
        rank = "whole" if self.rank is None else str(self.rank)
        return f"{rank} ({self.factors})" if self.factors else rank


def module_kind(roles: Collection[str]) -> str:
    """Return the kind of a module with these roles; LoRA if they do not tell."""
    telling = {LOKR: LOKR_ROLES, LOHA: LOHA_ROLES, OFT: (OFT_BLOCKS,)}
    kind = next((kind for kind, own in telling.items() if any(role in own for role in roles)), LORA)
    return DECOMPOSED.get(kind, kind) if any(role in DORA_ROLES for role in roles) else kind


def is_whole(roles: Collection[str]) -> bool:
    """Return whether a module has every factor of its kind, and none of another."""
    found, kind = set(roles) - {ALPHA}, module_kind(roles)
    if any(not {f"{matrix}_a", f"{matrix}_b"} <= found for core, matrix in CORES.items() if core in found):
        return False
    found -= CORES.keys()
    if kind in (LORA, DORA):
        return found >= {DOWN, UP}
    if kind == OFT:
        return found == {OFT_BLOCKS}
    found -= set(DORA_ROLES)
    if kind in (LOHA, DOHA):
        return found == set(LOHA_ROLES)
    ways = [({f"lokr_w{n}"}, {f"lokr_w{n}_a", f"lokr_w{n}_b"}) for n in (1, 2)]
    return any(found == one | other for one in ways[0] for other in ways[1])


def update_shape(shapes: Mapping[str, Shape]) -> UpdateShape | None:
    """Return the size of a complete module's update, from its factors' shapes by role; None if they do not match."""
    if OFT_BLOCKS in shapes:  # do not tell the inputs, which are set to the outputs
        blocks = shapes[OFT_BLOCKS]
        if len(blocks) != 3 or blocks[1] != blocks[2] or 0 in blocks:
            return None
        return UpdateShape(blocks[0] * blocks[1], blocks[0] * blocks[1], None, f"blocks of {blocks[1]}")
    magnitudes = {role: shapes[role] for role in DORA_ROLES if role in shapes}
    plain = _without_cores({role: shape for role, shape in shapes.items() if role not in DORA_ROLES})
    if plain is None or any(len(shape) not in (2, 4) or 0 in shape for shape in plain.values()):
        return None
    if any(shape[2:] not in ((), (1, 1)) for role, shape in plain.items() if role not in KERNELS):
        return None
    flat = {role: (shape[0], math.prod(shape[1:])) for role, shape in plain.items()}
    kind = module_kind(flat)
    if kind == LOKR:
        size = _lokr(flat)
    elif kind == LOHA:
        (o, r), (other_r, i), *others = (flat[role] for role in LOHA_ROLES)
        size = UpdateShape(o, i, r) if r == other_r and others == [(o, r), (r, i)] else None
    else:
        (rank, inputs), (outputs, columns) = flat[DOWN], flat[UP]
        size = UpdateShape(outputs, inputs, rank) if rank == columns else None
    if size is None:
        return None
    channels = plain[DOWN][1] if kind == LORA else None  # other factors do not tell them from the kernel
    fits = (
        is_by_output(role, shape, size.outputs) or role == DORA_SCALE and is_by_input(shape, size.inputs, channels)
        for role, shape in magnitudes.items()
    )
    return size if all(fits) else None


def _without_cores(shapes: Mapping[str, Shape]) -> Mapping[str, Shape] | None:
    """Return the shapes of the factors that ``plain_factors`` makes of these; None if a core does not match them."""
    found = {role: shape for role, shape in shapes.items() if role != MID and role not in CORES}
    for core in shapes.keys() - found.keys():
        matrix = CORES.get(core)
        before, after = (f"{matrix}_a", f"{matrix}_b") if matrix else (UP, DOWN)
        if len(shapes[core]) != 4:
            return None
        (*sides, height, width), a, b = (shapes[role] if len(shapes[role]) == 4 else (*shapes[role], 1, 1)
                                         for role in (core, before, after))  # fmt: skip
        ranks = [a[0] if matrix else a[1], b[0]]
        if sides != ranks or len(set(ranks)) > 1 or b[2:] != (1, 1):
            return None
        found[after] = (ranks[0], b[1], height, width) if matrix is None else (ranks[0], b[1] * height * width)
        if matrix:
            found[before] = (a[1], a[0])
    return found


def is_by_output(role: str, shape: Shape, outputs: int) -> bool:
    """Return whether DoRA's magnitude is one per output: [o], [o, 1], [o, 1, 1, 1], or PEFT's [1, o, 1, 1]."""
    if role == MAGNITUDE and shape == (1, outputs, 1, 1):
        return True
    return shape[:1] == (outputs,) and all(side == 1 for side in shape[1:])


def is_by_input(shape: Shape, inputs: int, channels: int | None = None) -> bool:
    """Return whether DoRA's magnitude is one per input channel: [1, i] or [1, i, 1, 1]; ``inputs``: i kh kw."""
    if len(shape) < 2 or shape[0] != 1 or any(side != 1 for side in shape[2:]):
        return False
    return shape[1] == channels if channels is not None else shape[1] > 0 and inputs % shape[1] == 0


def _lokr(shapes: Mapping[str, Shape]) -> UpdateShape | None:
    sides: list[Shape] = []
    rank = None
    for name in ("lokr_w1", "lokr_w2"):
        if name in shapes:
            sides.append(shapes[name])
            continue
        (tall, r), (other_r, wide) = shapes[f"{name}_a"], shapes[f"{name}_b"]
        if r != other_r:
            return None
        sides.append((tall, wide))
        rank = r  # rank of the second factor if both are decomposed, as in ComfyUI and LyCORIS
    (left, right), (below, beyond) = sides
    return UpdateShape(left * below, right * beyond, rank, f"{left}x{right} and {below}x{beyond}")
