"""What a family states of its text encoders' layers in LoRA files, and the names of CLIP's and T5's.

This package names a layer as diffusers' files do: the encoder's folder in a pipeline, then the layer's name in the
published checkpoint, as in ``text_encoder.text_model.encoder.layers.0.self_attn.q_proj``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

STYLES = ("diffusers", "kohya", "comfy")
"""Layouts of text encoders' keys: ``FOLDER.``, ``lora_teN_`` (OneTrainer's, too) and ``text_encoders.NAME.``."""

_PROJECTIONS = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}  # of old diffusers
_CLIP = re.compile(
    r"(?:text_model[._])?encoder[._]layers[._](\d+)[._](self_attn|mlp)[._]"
    r"((?:q|k|v|out)_proj|fc[12]|to_(?:q|k|v|out))"
)
_T5 = re.compile(r"encoder[._]block[._](\d+)[._]layer[._](\d+)[._](SelfAttention|DenseReluDense)[._](\w+)")


def clip_layer(rest: str) -> str | None:
    """Return CLIP's name of a layer from its name in any file, with dots or underscores; None: CLIP has none."""
    if rest == "text_projection":
        return rest
    found = _CLIP.fullmatch(rest)
    if found is None:
        return None
    number, part, leaf = found.groups()
    leaf = _PROJECTIONS.get(leaf, leaf)
    if (part == "mlp") != leaf.startswith("fc"):
        return None
    return f"text_model.encoder.layers.{number}.{part}.{leaf}"


def t5_layer(rest: str) -> str | None:
    """Return the same in T5."""
    found = _T5.fullmatch(rest)
    return f"encoder.block.{found[1]}.layer.{found[2]}.{found[3]}.{found[4]}" if found else None


@dataclass(frozen=True, eq=False)  # compared by identity: each family has its own
class LoraEncoder:
    """One text encoder of a family in LoRA files."""

    folder: str  # in a pipeline, and the prefix of its layers' names in this package
    title: str  # for messages
    kohya: str  # its number in kohya's keys, ``lora_teN_``; empty for the only one of a model
    comfy: tuple[str, ...]  # its names in ComfyUI's keys; the first is written, all are read
    layer: Callable[[str], str | None]
    """A layer's name in it, from a name with dots or underscores; None: it has no such layer."""
    read_by: Mapping[str, tuple[str, ...]]
    """The styles of its keys that each tool reads, the one to export to first."""

    @cached_property
    def prefix(self) -> re.Pattern[str]:
        """The prefix of its modules in files of any layout."""
        names = "|".join(map(re.escape, self.comfy))
        return re.compile(
            rf"{re.escape(self.folder)}\.|lora_te{self.kohya}_|(text_encoders\.)?({names})\.(transformer\.)?"
        )
