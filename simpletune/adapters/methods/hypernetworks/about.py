"""Describe a hypernetwork file for ``simpletune inspect``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from simpletune.adapters.methods.hypernetworks.structure import structure_of, widths_of
from simpletune.models.shared.model_config import Shape
from simpletune.system.options import Json, plural

EXPORTED = "after simpletune export --format a1111"


def about_hypernetwork(
    file: Path, metadata: Mapping[str, str], shapes: Mapping[str, Shape], families: Mapping[int, str]
) -> Json:
    """Describe a file as data.

    Args:
        file: the file, for messages.
        metadata: the strings of its header.
        shapes: the shapes of its tensors.
        families: names of models by the width of their prompt.

    Raises:
        UserError: it is damaged.
    """
    structure = structure_of(file, metadata, shapes)
    widths = widths_of(shapes)
    bent = structure.layer_norm and structure.activation != "linear"
    comfyui = ["wrongly, because it activates the last layer too, where a layer norm follows"] if bent else []
    return {
        "family": next((families[width] for width in widths if width in families), "a U-Net"),
        "widths": widths,
        "structure": asdict(structure),
        "parameters": sum(structure.parameters(width) for width in widths),
        "tools": [
            {"tool": "A1111", "loads": "no", "notes": [f"{EXPORTED}, from models/hypernetworks"]},
            {"tool": "ComfyUI", "loads": "no", "notes": [f"{EXPORTED}, by its node HypernetworkLoader", *comfyui]},
            {"tool": "diffusers", "loads": "no", "notes": ["has no hypernetworks"]},
            {"tool": "simpletune", "loads": "yes", "notes": ["at any strength"]},
        ],
    }


def hypernetwork_lines(about: Json) -> Iterator[tuple[str, str]]:
    """Return titles and texts for a terminal."""
    structure = about["structure"]
    multiples = ", ".join(f"{multiple:g}" for multiple in structure["layer_structure"])
    parts = [f"hypernetwork of structure {multiples}", f"activation {structure['activation']}"]
    parts += ["layer norm"] if structure["layer_norm"] else []
    parts += [f"dropout {structure['dropout']:g} in training"] if structure["dropout"] else []
    yield "what", f"{', '.join(parts)}, {plural(about['parameters'], 'parameter')}"
    yield "for", f"{about['family']} (attention inputs of width {', '.join(map(str, about['widths']))})"
    for verdict in about["tools"]:
        yield verdict["tool"], "; ".join([verdict["loads"], *verdict["notes"]])
