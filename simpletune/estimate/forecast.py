"""Predict a run's memory before it starts, and compare the prediction with the measurement at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypedDict

import torch

from simpletune.cards import Card, card_named_by_driver
from simpletune.config.schema import TrainConfig
from simpletune.estimate.levers import LEVERS, changed, differing
from simpletune.estimate.planning import Search
from simpletune.estimate.predict import CONTEXT, MIB, Estimate, SnapshotJson, estimate, snapshot_json
from simpletune.estimate.terminal import place
from simpletune.models.buckets import Size
from simpletune.options import UserError
from simpletune.system.console import say

WITHOUT_GPU = (8, 9)  # if there is no GPU, count the library workspaces of this capability
Measured = Mapping[str, Mapping[str, float | None]]


def forecast(config: TrainConfig, device: torch.device, size: Size, force: bool = False) -> Estimate:
    """Predict a run, print the prediction, and refuse a run that does not fit on the device.

    Args:
        config: with folders resolved.
        device: where it will run; a run on the CPU is never refused.
        size: width and height in pixels of its largest bucket.
        force: warn instead of refusing.

    Raises:
        UserError: the run does not fit.
    """
    if device.type != "cuda":
        prediction = estimate(config, WITHOUT_GPU, size)
        _print(prediction, None)
        return prediction
    card, held = card_at_hand(device)
    prediction = estimate(config, card.capability, size)
    _print(prediction, card)
    if prediction.fits(card, held):
        return prediction
    lacking = (prediction.needed() + held - card.bytes) / MIB
    if force:
        say(f"memory  {lacking:,.0f} MiB are missing: the run may stop out of memory (--force)")
        return prediction
    raise UserError("\n".join(_refusal(config, prediction, card, held, size)))


def card_at_hand(device: torch.device) -> tuple[Card, int]:
    """Return the CUDA device as a card, and how many of its bytes other programs use."""
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    held = max(0, total - free - torch.cuda.memory_reserved(device) - _own_context())
    return card_named_by_driver(properties.name, total, (properties.major, properties.minor)), held


def _own_context() -> int:
    """Return the bytes that this process's own CUDA context already takes; the allowances count them."""
    return CONTEXT if torch.cuda.is_initialized() else 0


def _print(prediction: Estimate, card: Card | None) -> None:
    on = "" if card is None else f", {prediction.needed() / MIB:,.0f} with allowances, of {card.bytes / MIB:,.0f} MiB"
    peak = prediction.peak
    say(f"memory  predicted peak {peak.bytes / MIB:,.0f} MiB ({prediction.peak_stage}: {place(peak)}){on}")


def _refusal(config: TrainConfig, prediction: Estimate, card: Card, held: int, size: Size) -> Iterator[str]:
    """Say why a run was refused, and what would make it fit."""
    others = f", {held / MIB:,.0f} of them in use by other programs" if held else ""
    yield (
        f"memory: this run needs {prediction.needed() / MIB:,.0f} MiB "
        f"and {card.name} has {card.bytes / MIB:,.0f}{others}"
    )
    change = cheapest_change(config, card, held, size)
    if change is not None:
        overrides, costs, needed = change
        yield f"  the cheapest change that fits: {' '.join(overrides)} (needs {needed / MIB:,.0f} MiB; {costs})"
    else:
        yield f"  no single change fits. Try simpletune plan CONFIG --device {card.gib:.0f}GiB"
    yield "  --force starts it anyway"


def cheapest_change(
    config: TrainConfig, card: Card, held: int, size: Size | None = None
) -> tuple[tuple[str, ...], str, int] | None:
    """Find the cheapest lever with which a run fits; if no single one does, the settings that a plan finds.

    Returns:
        The overrides, what they cost, and the bytes that the card must then have; None if nothing fits.
    """
    for lever in LEVERS:
        new = changed(config, lever.overrides)
        if new is None or new.data.resolution != config.data.resolution:
            continue
        prediction = estimate(new, card.capability, size)
        if prediction.fits(card, held):
            return lever.overrides, lever.costs, prediction.needed()
    try:
        best = Search(config, card, held).fastest()[0]
    except UserError:
        return None
    overrides = differing(config, best.choice.config, best.choice.overrides)
    return tuple(overrides), best.choice.about, best.estimate.needed()


class Comparison(TypedDict):
    """A prediction beside the measurement, as in the run's summary."""

    stages: dict[str, SnapshotJson]
    peak_allocated_mib: float


def compare_with_measured(estimate: Estimate, measured: Measured) -> Comparison:
    """Return the prediction and the measurement in the form of the run's summary.

    Args:
        estimate: the prediction.
        measured: figures by stage, with ``peak_allocated_gib``, which is None without CUDA. A stage that allocated
            nothing (0.0), because everything was cached, is not compared.
    """
    stages = {name: snapshot_json(snapshot) for name, snapshot in estimate.stages.items()}
    for name, stage in stages.items():
        mib = (measured.get(name, {}).get("peak_allocated_gib") or 0.0) * 1024
        if mib > 0:
            stage["measured_mib"] = round(mib, 1)
            stage["error"] = round(stage["peak_allocated_mib"] / mib - 1, 4)
    return {"stages": stages, "peak_allocated_mib": round(estimate.peak.bytes / MIB, 1)}


def print_comparison(predicted: Comparison) -> None:
    """Print predicted and measured memory for every stage that was measured."""
    rows = [(name, stage) for name, stage in predicted["stages"].items() if "measured_mib" in stage]
    if rows:
        say("memory on the GPU, MiB: predicted, measured")
    for name, stage in rows:
        predicted_mib, measured_mib = stage["peak_allocated_mib"], stage["measured_mib"]
        say(f"  {name:<10} {predicted_mib:>9,.0f} {measured_mib:>9,.0f}  {stage['error']:+.1%}")
