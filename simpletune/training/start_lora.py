"""The LoRA that ``adapter.start`` names, which a new run begins with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from simpletune.adapters.files.starting_point import require_startable, start_from
from simpletune.adapters.files.updates import Updates, without_other_input
from simpletune.adapters.methods.targets import TargetedMethod
from simpletune.config.schema import ResolvedConfig
from simpletune.models.text_layers import encoders_in
from simpletune.runs.stack import given_lora, require_elsewhere
from simpletune.system.console import say
from simpletune.system.options import Json, UserError, plural


@dataclass(frozen=True)
class Start:
    """Updates to begin with.

    Args:
        scale: their strength.
        trained: how many layers the run trains.
        about: the run's record of them: name, SHA-256, steps if known, and scale.
    """

    updates: Updates
    scale: float
    trained: int
    about: Json

    def begin(self, denoiser: nn.Module) -> None:
        """Give the updates to a model with fresh ones, and print how well they fit."""
        lost, given = start_from(denoiser, self.updates, self.scale), len(self.updates)
        fresh = f"; the other {self.trained - given} start from zero" if given < self.trained else ""
        error = f"; the lower rank leaves out {100 * lost:.2g}% of the norm of the updates" if lost > 1e-5 else ""
        say(f"start   from {self.about['name']}: {plural(given, 'layer')}{fresh}{error}")


def read_start(config: ResolvedConfig) -> Start | None:
    """Read what ``adapter.start`` names, if it does; the configuration has the model's folder resolved.

    Raises:
        UserError: nothing has that name, it is no LoRA, or not one that this run can start from.
    """
    method = config.adapter
    if not isinstance(method, TargetedMethod) or method.start is None:
        return None
    given = given_lora("adapter.start", method.start)
    require_elsewhere(given, config)
    updates, text = given.read()
    encoders = encoders_in(text, config.model.lora[0].names.encoders)
    if not updates:
        raise UserError(f"{given.place} updates only {encoders}. Give a LoRA of the denoiser")
    shapes = config.model.architecture.known_shapes()
    weights = {name.removesuffix(".weight"): shape for name, shape in shapes.items()}
    updates = without_other_input(given.place, updates, weights)
    require_startable(given.place, method, updates, shapes, given.scale)
    if text:
        say(f"start   leaves out {plural(len(text), 'layer')} of {encoders} in {given.name}")
    return Start(updates, given.scale, len(method.modules(shapes)), given.about())
