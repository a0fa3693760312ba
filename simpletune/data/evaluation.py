"""What a run's evaluation loss is of: its name wherever a person meets it, and what says so in the run's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simpletune.options import Json, plural

if TYPE_CHECKING:
    from simpletune.data.plan import Plan

ON_TRAINING = "loss on training pictures at fixed noise"


def loss_name(seen: int, held_out: int) -> str:
    """The figure's name.

    Args:
        seen: held-out pictures that it is computed on.
        held_out: all of them; 0: there is no split.
    """
    if not held_out:
        return ON_TRAINING
    of = f"{seen:,} of " if seen < held_out else ""
    return f"validation loss ({of}{plural(held_out, 'held-out picture')})"


def evaluated_on(plan: Plan, count: int) -> Json:
    """The fields that stand beside an evaluation loss and say what it is of.

    Args:
        plan: of the run.
        count: ``validation.eval_samples``.
    """
    held_out = len(plan.held_out)
    return {"eval_loss_is": loss_name(min(count, held_out), held_out), "held_out_pictures": held_out}


def scalar_name(plan: Plan) -> str:
    """The figure's name in trackers: runs with and without a split do not share a curve."""
    return "validation_loss" if plan.held_out else "training_loss_fixed_noise"
