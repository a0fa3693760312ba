"""Checks by training: a few steps of each precision on the demo model."""

from __future__ import annotations

import math
from collections.abc import Iterator

from simpletune.commands.doctor.finding import OK, PROBLEM, WARNING, Finding, Level
from simpletune.commands.doctor.machine import Machine
from simpletune.system.options import plural

PRECISIONS = ("bf16", "int8", "nf4", "fp32")
ALLOWED, ALLOWED_MIB = 0.05, 64.0  # a measured peak may exceed the prediction by the larger of both


def steps(machine: Machine, weights: str, count: int) -> Iterator[Finding]:
    """Train in one precision, and judge the steps by their losses and memory."""
    name = f"{plural(count, 'step')}, {weights} weights"
    answer = machine.ask(f"steps {weights} {count}")
    if "error" in answer:
        yield Finding(name, PROBLEM, answer["error"], f"Training with precision.weights={weights} fails here",
                      "See the checks above; report it with this file attached")  # fmt: skip
        return
    losses = answer["losses"]
    value = (
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}, {answer['seconds_per_step']:.4f} s a step in {answer['compute']}"
    )
    excess = 0.0
    if answer.get("measured_mib") is None:
        value += ", memory is measured on a card only"
    else:
        predicted, measured, reserved = (answer[f"{which}_mib"] for which in ("predicted", "measured", "reserved"))
        value += f", peak {predicted:.1f} MiB predicted, {measured:.1f} measured ({reserved:.0f} reserved)"
        excess = measured - predicted - max(ALLOWED * predicted, ALLOWED_MIB)
    level: Level = OK
    why = remedy = ""
    if not all(map(math.isfinite, losses)):
        level, why = PROBLEM, "A loss is not finite: this precision does not train here"
        remedy = "Try another precision, and report it with this file attached"
    elif not any(losses):
        level, why = PROBLEM, "Every loss is 0: the device returns zeros instead of results"
        remedy = "Check the driver, then report it with this file attached"
    elif excess > 0:
        level, why = WARNING, "More memory was used than predicted, so predictions for this card are too low"
        remedy = "Leave room with --reserve, and report it with this file attached"
    yield Finding(name, level, value, why, remedy)
