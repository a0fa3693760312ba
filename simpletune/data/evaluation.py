"""The names of the evaluation loss: on screens and pages, in the run's files and in trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simpletune.options import Json, plural

if TYPE_CHECKING:
    from simpletune.data.plan import Plan

ON_TRAINING = "loss on training pictures at fixed noise"


def loss_name(seen: int, held_out: int) -> str:
    """The name that users see.

    Args:
        seen: how many held-out pictures the loss is computed on.
        held_out: how many pictures are held out; 0 without a split.
    """
    if not held_out:
        return ON_TRAINING
    of = f"{seen:,} of " if seen < held_out else ""
    return f"validation loss ({of}{plural(held_out, 'held-out picture')})"


def evaluated_on(plan: Plan, count: int) -> Json:
    """The fields in the run's files that describe its evaluation loss.

    Args:
        plan: the run's plan.
        count: ``validation.eval_samples``.
    """
    held_out = len(plan.held_out)
    return {"eval_loss_is": loss_name(min(count, held_out), held_out), "held_out_pictures": held_out}


def scalar_name(plan: Plan) -> str:
    """The name in trackers, where runs with and without a split must not share a curve."""
    return "validation_loss" if plan.held_out else "training_loss_fixed_noise"
