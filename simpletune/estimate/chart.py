"""Draw estimates as stacked bars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from simpletune.engine.memory.snapshot import KINDS
from simpletune.estimate.job_estimate import Estimate
from simpletune.system.gpus import Card
from simpletune.system.options import UserError

COLOURS = ("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#b279a2", "#9d9da1")  # in the order of KINDS
GB = 10**9


def write_picture(file: Path, estimates: Mapping[str, Estimate], card: Card | None = None) -> Path:
    """Draw the peak memory of several runs by kind, as stacked bars in GB of 10^9 bytes.

    Args:
        file: ``.svg`` or ``.png``.
        estimates: estimates by name.
        card: card whose memory is drawn as a line.

    Raises:
        UserError: the file has another suffix.
    """
    import vl_convert

    spec = stacked_bars(estimates, card)
    if file.suffix == ".svg":
        file.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
    elif file.suffix == ".png":
        file.write_bytes(vl_convert.vegalite_to_png(spec, scale=2))
    else:
        raise UserError(f"--picture: {file} has the suffix {file.suffix or '(none)'}. Use .svg or .png")
    return file


def stacked_bars(estimates: Mapping[str, Estimate], card: Card | None) -> dict[str, object]:
    """Build the chart's Vega-Lite specification."""
    present = [kind for kind in KINDS if any(each.peak.by_kind.get(kind) for each in estimates.values())]
    rows = [
        {"name": name, "kind": kind, "order": order, "gb": each.peak.by_kind.get(kind, 0) / GB}
        for name, each in estimates.items()
        for order, kind in enumerate(present)
    ]
    tops = [{"name": name, "gb": each.peak.bytes / GB} for name, each in estimates.items()]
    x = {"field": "name", "type": "nominal", "sort": list(estimates), "title": None, "axis": {"labelAngle": -25}}
    y = {"field": "gb", "type": "quantitative", "title": "predicted peak memory, GB"}
    colour = {
        "field": "kind", "type": "nominal", "title": None,
        "scale": {"domain": present, "range": [COLOURS[KINDS.index(kind)] for kind in present]},
    }  # fmt: skip
    layer: list[dict[str, object]] = [
        {"data": {"values": rows}, "mark": "bar",
         "encoding": {"x": x, "y": y, "color": colour, "order": {"field": "order"}}},
        {"data": {"values": tops}, "mark": {"type": "text", "dy": -7},
         "encoding": {"x": x, "y": y, "text": {"field": "gb", "format": ".2f"}}},
    ]  # fmt: skip
    if card is not None:
        line = [{"gb": card.bytes / GB, "text": f"{card.name}: {card.bytes / GB:.1f} GB"}]
        rule = {"mark": {"type": "rule", "strokeDash": [6, 4]}, "encoding": {"y": y}}
        text = {
            "mark": {"type": "text", "align": "left", "x": 4, "dy": -6},
            "encoding": {"y": y, "text": {"field": "text"}},
        }
        layer.append({"data": {"values": line}, "layer": [rule, text]})
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": max(260, 110 * len(estimates)), "height": 320, "background": "white", "layer": layer,
        "title": "Peak memory of the whole job",
    }  # fmt: skip
