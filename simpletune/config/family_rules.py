"""Check what the model's family requires of other options, by its capabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simpletune.families import Model
from simpletune.models.family import Family
from simpletune.options import Json, Problem, option_classes, tag_values

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig


def family_rules(config: TrainConfig) -> Iterator[Problem]:
    """Report an objective that the family's models were not trained with, and sizes that they cannot process."""
    model, name = config.model, config.objective.name
    if name != model.objective:
        yield Problem(
            "objective.name",
            f"{name}, but {model.title} models are trained with {model.objective}. Leave it out, or use "
            f"{model.objective}",
        )
    yield from config.objective.rules()
    sides = {"data.resolution": config.data.resolution}
    sides |= {f"validation.{side}": getattr(config.validation, side) for side in ("width", "height")}
    for path, side in sides.items():
        if side is not None and side % model.multiple:
            low = side // model.multiple * model.multiple
            near = f"{low} or {low + model.multiple}" if low else str(model.multiple)
            yield Problem(path, f"{side} is not a multiple of {model.multiple}, which {model.title} needs. Use {near}")


def with_objective(data: Json) -> Json:
    """Fill in the family's objective in a configuration, as JSON, that names none; validation reports what is wrong."""
    families = {tag: option for option in option_classes(Model) for tag in tag_values(option, "family")}
    model, objective = data.get("model", {}), data.get("objective", {})
    if not isinstance(model, dict) or not isinstance(objective, dict) or "name" in objective:
        return data
    family = families.get(model.get("family", next(iter(families))))
    if family is None or not issubclass(family, Family):
        return data
    return {**data, "objective": {"name": family.objective, **objective}}
