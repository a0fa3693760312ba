"""Check what the model's family requires of other options, by its capabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simpletune.options import Json, Problem

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
    sides = {"data.resolution": config.data.resolution}
    sides |= {f"validation.{side}": getattr(config.validation, side) for side in ("width", "height")}
    for path, side in sides.items():
        if side is not None and side % model.multiple:
            low = side // model.multiple * model.multiple
            near = f"{low} or {low + model.multiple}" if low else str(model.multiple)
            yield Problem(path, f"{side} is not a multiple of {model.multiple}, which {model.title} needs. Use {near}")


def with_objective(given: object, objectives: dict[str, str]) -> object:
    """Fill in the objective of the family in a configuration that names none.

    Args:
        given: the configuration as JSON; anything else is returned unchanged, for the validation to report.
        objectives: the objective of each family.
    """
    if not isinstance(given, dict):
        return given
    model, objective = given.get("model", {}), given.get("objective", {})
    if not isinstance(model, dict) or not isinstance(objective, dict) or "name" in objective:
        return given
    family = model.get("family", next(iter(objectives)))
    filled: Json = {"name": objectives[family], **objective} if family in objectives else objective
    return {**given, "objective": filled}
