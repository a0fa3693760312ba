"""The layers of a hypernetwork and the names of its tensors, in the form of AUTOMATIC1111's web UI. Imports no torch.

For an attention input of width d: h(x) = x + strength MLP(x), with one network before the keys and one before the
values. Layers are numbered consecutively, including activations and dropout, as in the web UI's ``state_dict``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from simpletune.models.shared.model_config import Shape
from simpletune.system.options import UserError

Activation = Literal["linear", "relu", "leakyrelu", "elu", "swish", "tanh", "sigmoid"]
Kind = Literal["linear", "activation", "norm", "dropout"]

SIDES = ("k", "v")
KEY = re.compile(r"([1-9]\d{0,5})\.([kv])\.(linear\.\d+\.(?:weight|bias))")
"""A tensor's name in a file: width, side, and its name in the network."""
MARK = "simpletune_hypernetwork"
"""Header field that contains the structure as JSON."""
LARGEST_MULTIPLE = 16
LONGEST = 16


@dataclass(frozen=True)
class Structure:
    """Structure shared by all networks of a hypernetwork.

    Args:
        layer_structure: the width before and after each linear layer, as multiples of d; the first and last are 1.
        activation: activation after each linear layer but the last; ``linear`` means none.
        layer_norm: whether a layer norm follows each linear layer, after its activation.
        dropout: probability of dropout after each linear layer, its activation and norm; in training only.
    """

    layer_structure: tuple[float, ...]
    activation: Activation
    layer_norm: bool = False
    dropout: float = 0.0

    def stages(self, width: int) -> list[tuple[Kind, int, int]]:
        """Return the layers for an input of a given width, in order: kind, inputs and outputs."""
        widths = [int(width * multiple) for multiple in self.layer_structure]
        found, last = list[tuple[Kind, int, int]](), len(widths) - 2
        for number, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False)):
            found.append(("linear", inputs, outputs))
            if self.activation != "linear" and number < last:
                found.append(("activation", outputs, outputs))
            if self.layer_norm:
                found.append(("norm", outputs, outputs))
            if self.dropout and number < last:
                found.append(("dropout", outputs, outputs))
        return found

    def shapes(self, width: int) -> dict[str, Shape]:
        """Return the shapes of a network's parameters by name, such as ``linear.0.weight``."""
        found: dict[str, Shape] = {}
        for number, (kind, inputs, outputs) in enumerate(self.stages(width)):
            if kind in ("linear", "norm"):
                weight = (outputs, inputs) if kind == "linear" else (outputs,)
                found |= {f"linear.{number}.weight": weight, f"linear.{number}.bias": (outputs,)}
        return found

    def parameters(self, width: int) -> int:
        """Count the parameters of both networks of a width."""
        return len(SIDES) * sum(math.prod(shape) for shape in self.shapes(width).values())


def is_hypernetwork(names: Iterable[str]) -> bool:
    """Return whether any of these names is that of a tensor in a hypernetwork file."""
    return any(KEY.fullmatch(name) for name in names)


def widths_of(names: Iterable[str]) -> list[int]:
    """Return the widths of a file's networks."""
    return sorted({int(found[1]) for name in names if (found := KEY.fullmatch(name))})


def structure_of(place: object, metadata: Mapping[str, str], shapes: Mapping[str, Shape]) -> Structure:
    """Read the structure in the header of a file (``place``) and compare it with its tensors' shapes. Raises UserError
    if the header has no structure or a damaged one, or tensors are missing, superfluous or of other shapes."""
    remedy = "Download or export it again"
    if MARK not in metadata:
        raise UserError(
            f"{place} is a hypernetwork without {MARK} in its header, so its activation is unknown. Use a file that "
            "simpletune wrote"
        )
    try:
        read = json.loads(metadata[MARK])
        multiples = tuple(float(multiple) for multiple in read["layer_structure"])
        structure = Structure(multiples, read["activation"], read["layer_norm"] is True, float(read["dropout"]))
        known = structure.activation in get_args(Activation)
    except (ValueError, RecursionError, TypeError, KeyError):
        known = False
    if not known or not is_layer_structure(multiples) or not 0 <= structure.dropout < 1:
        raise UserError(f"{place}: {MARK} in its header is damaged. {remedy}")
    expected = {
        f"{width}.{side}.{name}": shape
        for width in widths_of(shapes)
        for side in SIDES
        for name, shape in structure.shapes(width).items()
    }
    wrong = [name for name in {**expected, **shapes} if expected.get(name) != shapes.get(name)]
    if wrong:
        name = wrong[0]
        found, asked = ("nothing" if each.get(name) is None else str(list(each[name])) for each in (shapes, expected))
        raise UserError(f"{place}: {name} is {found}, but its structure requires {asked}. {remedy}")
    return structure


def is_layer_structure(multiples: Iterable[float]) -> bool:
    """Return whether these multiples of d are valid: the output must be as wide as the input."""
    found = list(multiples)
    ends = len(found) > 1 and found[0] == found[-1] == 1
    return ends and len(found) <= LONGEST and all(0 < multiple <= LARGEST_MULTIPLE for multiple in found)
