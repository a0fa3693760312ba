"""Read and write hypernetworks as safetensors; write the ``.pt`` files of AUTOMATIC1111's web UI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from simpletune.adapters.methods.formulas import require_numbers
from simpletune.adapters.methods.hypernetwork_layer import Network, Pair
from simpletune.adapters.methods.hypernetwork_structure import MARK, SIDES, Structure, structure_of, widths_of
from simpletune.system.atomic import atomic_file
from simpletune.system.safetensors_file import WeightReader, read_header, write_safetensors


@dataclass(frozen=True)
class HypernetworkFile:
    """Content of a hypernetwork file: the structure of all its networks, tensors by name, such as
    ``768.k.linear.0.weight``, and the strings of its header."""

    structure: Structure
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    def state(self, width: int, side: str) -> dict[str, Tensor]:
        """Return the fp32 tensors of one network, by their names in it, in the order of its layers."""
        return {name: self.tensors[f"{width}.{side}.{name}"].float() for name in self.structure.shapes(width)}

    def pairs(self) -> dict[int, Pair]:
        """Return the networks by width, in fp32, frozen and without dropout."""
        found = {}
        for width in widths_of(self.tensors):
            k, v = (Network(width, self.structure) for _ in SIDES)
            for side, network in zip(SIDES, (k, v), strict=True):
                network.load_state_dict(self.state(width, side))
                network.requires_grad_(False)
                for module in network.linear:
                    if isinstance(module, torch.nn.Dropout):
                        module.p = 0.0
            found[width] = Pair(k, v)
        return found


def write_hypernetwork(
    pairs: Mapping[int, Pair], structure: Structure, file: Path, metadata: Mapping[str, str]
) -> Path:
    """Write networks under names such as ``768.k.linear.0.weight``, with their structure in the header."""
    tensors = {
        f"{width}.{side}.{name}": tensor.detach()
        for width, pair in pairs.items()
        for side, network in zip(SIDES, pair, strict=True)
        for name, tensor in network.named_parameters()
    }
    return write_safetensors(tensors, file, {**metadata, MARK: json.dumps(asdict(structure))})


def read_hypernetwork(file: Path) -> HypernetworkFile:
    """Read a file that ``write_hypernetwork`` wrote. Raises UserError if it is damaged, or values are not finite."""
    header = read_header(file)
    metadata = header.pop("__metadata__", None) or {}
    structure = structure_of(file, metadata, {name: tuple(entry["shape"]) for name, entry in header.items()})
    tensors = WeightReader([file]).get_all()
    for name, tensor in tensors.items():
        require_numbers(f"{file}: {name}", tensor)
    return HypernetworkFile(structure, tensors, metadata)


def write_a1111(source: HypernetworkFile, file: Path, title: str, steps: int | None, base: str | None) -> Path:
    """Write the ``.pt`` that AUTOMATIC1111's web UI and ComfyUI read from ``models/hypernetworks``: plain fp32 tensors,
    the ``title`` that the web UI shows, and ``steps`` and the base's name if known."""
    structure = replace(source.structure, dropout=0.0)  # ComfyUI would apply dropout layers during inference
    multiples = [int(multiple) if multiple == int(multiple) else multiple for multiple in structure.layer_structure]
    content: dict[int | str, object] = {
        width: tuple(
            dict(zip(structure.shapes(width), source.state(width, side).values(), strict=True)) for side in SIDES
        )
        for width in widths_of(source.tensors)
    }
    content |= {
        "step": steps or 0,
        "name": title,
        "layer_structure": multiples,
        "activation_func": structure.activation,
        "is_layer_norm": structure.layer_norm,
        "weight_initialization": "Normal",
        "use_dropout": False,
        "sd_checkpoint": None,  # the start of the file's hash; a folder has none
        "sd_checkpoint_name": base,
        "activate_output": False,
        "last_layer_dropout": False,
    }
    with atomic_file(file, sum(tensor.numel() * 4 for tensor in source.tensors.values()), shared=True) as part:
        # the format from before torch 1.6: the web UI refuses entries that newer torch adds to its zip archives
        torch.save(content, part, _use_new_zipfile_serialization=False)
    return file
