"""Write the shapes that ship with the package (``make shapes``): see ``simpletune/models/shared/parameter_shapes.py``.

    python -m benchmarks.stored_shapes

They are those of every Hub name whose configurations ship, also as an inpainting model, and of the demos.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

from simpletune.data.demo import MODELS
from simpletune.models.families import FAMILIES, family_of
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parameter_shapes import STORED, empty_model, settings_of
from simpletune.system.atomic import write_text


def shipped() -> Iterator[tuple[str, ModelConfig]]:
    """The class and configuration of every model that ships."""
    demos = [family_of(str(folder)).model_copy(update={"pretrained": str(folder)}) for folder in MODELS.values()]  # type: ignore[union-attr]
    known = [family.model_copy(update={"pretrained": name}) for family in FAMILIES for name in family.files.hub_names]
    for family in [*known, *demos]:
        widened = [family.model_copy(update={"inpainting": True})] if "inpainting" in type(family).model_fields else []
        for each in [family, *widened]:
            yield family.architecture.diffusers_class, each.files.known_config()


def stored() -> str:
    """The text of the file. Equal modules, such as a model's blocks, are stored once."""
    import diffusers

    trees: dict[str, int] = {}

    def tree_of(shapes: dict[str, list[int]]) -> int:
        parts: dict[str, Any] = {}
        for name, shape in shapes.items():
            module, _, rest = name.partition(".")
            parts.setdefault(module, {})[rest] = shape
        tree = {module: below[""] if "" in below else tree_of(below) for module, below in parts.items()}
        return trees.setdefault(json.dumps(tree), len(trees))

    models = list(shipped())
    defaults = {
        model: {
            name: setting.default
            for name, setting in inspect.signature(getattr(diffusers, model).__init__).parameters.items()
            if name != "self"
        }
        for model, _ in models
    }
    defaults = json.loads(json.dumps(defaults))
    roots = {
        f"{model} {settings_of(config, defaults[model])}": tree_of(
            {name: list(value.shape) for name, value in empty_model(model, config).named_parameters()}
        )
        for model, config in models
    }
    lines = ["{", f'"defaults": {json.dumps(defaults)},', '"models": {']
    lines += [",\n".join(f"{json.dumps(model)}: {root}" for model, root in roots.items())]
    return "\n".join([*lines, "},", '"trees": [', ",\n".join(trees), "]", "}", ""])


if __name__ == "__main__":
    write_text(STORED, stored())
