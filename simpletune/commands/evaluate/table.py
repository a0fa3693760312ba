"""The result of an evaluation: ``evaluation.json`` in the run's folder, and a table on the screen. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from simpletune.system.options import Json

VERSION = 1
SUBJECT, PROMPT = "subject_fidelity", "prompt_fidelity"
COLUMNS = (
    (SUBJECT, "subject"), (PROMPT, "prompt"), ("diversity", "diversity"), ("pres", "PRES"), ("copying", "copied"),
    ("cmmd", "CMMD"), ("kid", "KID"),
)  # fmt: skip
"""Scores in the table, with their headings."""


def main_encoders(encoders: Sequence[Json]) -> dict[str, str | None]:
    """Choose the encoder for each fidelity: for the subject, the first that reads only pictures, otherwise the first;
    for prompts, the first that reads prompts.

    Args:
        encoders: entries with ``title`` and ``reads_prompts``, in the given order.
    """
    pictures = [each["title"] for each in encoders if not each["reads_prompts"]]
    prompts = [each["title"] for each in encoders if each["reads_prompts"]]
    return {SUBJECT: (pictures or prompts)[0], PROMPT: prompts[0] if prompts else None}


def lines(result: Json) -> list[str]:
    """Format one table for each encoder: value and half the width of its interval, by point."""
    found: list[str] = []
    for encoder in result["encoders"]:
        title = encoder["title"]
        shown = [(score, name) for score, name in COLUMNS if title in result["points"][0]["scores"].get(score, {})]
        width = max(len(point["title"]) for point in result["points"])
        found.append(f"{title} ({encoder['kind']}), {result['prompts']['slice']}")
        found.append(f"  {'':<{width}}" + "".join(f"{name:>16}" for _, name in shown))
        for point in result["points"]:
            cells = [format_interval(point["scores"][score][title]) for score, _ in shown]
            found.append(f"  {point['title']:<{width}}" + "".join(f"{each:>16}" for each in cells))
        counts = {name: result["points"][0]["scores"][score][title]["n"] for score, name in shown}
        found.append(f"  {'n':<{width}}" + "".join(f"{count:>16}" for count in counts.values()))
    return found


def format_interval(value: Json) -> str:
    """Format a value with its 95% interval: ``0.712 ±0.021``."""
    shown = f"{value['value']:.3f}"
    return shown if value["low"] is None else f"{shown} ±{(value['high'] - value['low']) / 2:.3f}"
