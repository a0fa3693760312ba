"""The LoRA that ``adapter.start`` names, which a new run begins with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from simpletune.adapters.files.header import open_lora
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.start import require_startable, start_from
from simpletune.adapters.files.updates import Updates
from simpletune.adapters.methods.targets import TargetedMethod
from simpletune.config.schema import TrainConfig, run_folder
from simpletune.models.shared.text_layers import encoders_in, split_text
from simpletune.runs.model_card import public_name
from simpletune.runs.weights_names import find_lora
from simpletune.system.checksums import sha256_of
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


def read_start(config: TrainConfig) -> Start | None:
    """Read what ``adapter.start`` names, if it does; the configuration has the model's folder resolved.

    Raises:
        UserError: nothing has that name, it is no LoRA, or not one that this run can start from.
    """
    method = config.adapter
    if not isinstance(method, TargetedMethod) or method.start is None:
        return None
    named = find_lora(method.start, "adapter.start: ")
    assert named.lora is not None
    place, scale = f"adapter.start: {named.name}", 1.0 if named.scale is None else named.scale
    own = run_folder(config)
    if own.resolve() in named.lora.resolve().parents:
        raise UserError(f"{place} lies in {own}, which a new run of this name moves aside. Give this run another name")
    try:
        header = open_lora(named.lora)
        updates, text = split_text(read_lora(header))
    except UserError as error:
        raise UserError(f"adapter.start: {error}", error.code) from None
    if not updates:
        raise UserError(f"{place} updates only {encoders_in(text)}. Give a LoRA of the denoiser")
    shapes = config.model.known_shapes()
    require_startable(place, method, updates, shapes, scale)
    if text:
        say(f"start   leaves out {plural(len(text), 'layer')} of {encoders_in(text)} in {named.name}")
    steps = header.metadata.get("simpletune_step", header.metadata.get("ss_steps", ""))
    about = {
        "name": public_name(named.name),
        "sha256": sha256_of(named.lora),
        "steps": int(steps) if steps.isdecimal() else None,
        "scale": scale,
    }
    return Start(updates, scale, len(method.modules(shapes)), about)
