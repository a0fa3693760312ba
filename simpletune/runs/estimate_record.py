"""A run's predicted time and price, stored when it starts (``JobTime.as_json``), beside what it took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from simpletune.runs.folder import PREDICTED
from simpletune.runs.repair import NUMBER, read_own
from simpletune.system.console import duration
from simpletune.system.options import Json


def beside_measured(folder: Path, summary: Json) -> Json | None:
    """Compare the prediction made when the run started with what all its attempts took.

    Returns:
        The fields ``predicted``, ``measured`` and ``ratio`` (predicted / measured) for a step, each stage, all of these
        stages, and the price; None without a prediction. Omits a stage that took no time because its results were
        cached, and everything but the step if the run's length was not as planned.
    """
    time = read_own(folder / PREDICTED, {"seconds_per_step": NUMBER, "seconds_by_stage": (dict,), "steps": (int,)})
    if time is None or not summary.get("seconds_per_step"):
        return None
    found: Json = {name: time.get(name) for name in ("device", "speeds", "seconds_per_step_range", "bound_by")}
    found["seconds_per_step"] = _pair(time["seconds_per_step"], summary["seconds_per_step"])
    measured = {name: stage["seconds"] for name, stage in summary.get("stages", {}).items()}
    stages = {
        name: _pair(seconds, measured[name])
        for name, seconds in time["seconds_by_stage"].items()
        if seconds and measured.get(name)
    }
    if summary["steps"] != time["steps"] or not stages:
        return found
    whole = _pair(*(sum(pair[side] for pair in stages.values()) for side in ("predicted", "measured")))
    found |= {"stages": stages, "seconds": whole}
    price = time.get("price")
    if price is not None:
        from simpletune.system.prices import cost_of_picture

        # Starting the process costs money, too.
        costs = (
            cost_of_picture(seconds, price["per_hour"]) for seconds in (whole["predicted"], summary["seconds_total"])
        )
        found |= {"cost": _pair(*costs), "price": price}
    return found


def _pair(predicted: float, measured: float) -> Json:
    return {"predicted": predicted, "measured": measured, "ratio": round(predicted / measured, 3)}


def lines(time: Mapping[str, Json]) -> Iterator[str]:
    """Format what ``beside_measured`` found as at most two lines."""
    step = time["seconds_per_step"]
    text = f"time    predicted {step['predicted']:.3g} s a step, measured {step['measured']:.3g} ({step['ratio']:.2f})"
    if "seconds" in time:
        whole = time["seconds"]
        names = ", ".join(time["stages"])
        text += f"; {duration(whole['predicted'])} of {duration(whole['measured'])} for {names} ({whole['ratio']:.2f})"
    yield text
    if "cost" in time:
        cost, currency = time["cost"], time["price"].get("currency") or ""
        yield f"        predicted {cost['predicted']:.4g} {currency}, with its start {cost['measured']:.4g}".rstrip()
