"""Every chart of the package: others give it data.

- In Vega-Lite, for pages that contain Vega (reports) and for files (``image``); strings that begin with @ name
  colours of the page's theme.
- As SVG without scripts, for the page of a run that trains (``svg_lines``).
- As text, for terminals and Markdown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from simpletune.engine.memory.snapshot import KINDS
from simpletune.runs.report.content import ReportChart
from simpletune.system.options import Json
from simpletune.system.package import ASSETS

KIND_COLOURS = {kind: number for number, kind in enumerate(KINDS)}
PHASE_COLOURS = {"data": 6, "noise": 8, "forward": 0, "loss": 1, "backward": 4, "clip": 5, "optimizer": 3}
BAR = 26  # pixels per row
NARROWEST, LETTER, LANE, LANES = 280, 6.3, 14, 5  # pixels: plot on a phone, letter, row of labels; maximum of rows
MODEL = 40  # pixels of a model's picture in a scatter plot
RUN_PARTS = (0, 1, 2, 3, 5, 4, 7, 8, 6)  # of the theme, for @runs; page.js has the same order


def bars(rows: list[Json], axis: str, colour: str = "@first", marks: str = "") -> Json:
    """Draw horizontal bars labelled with their values.

    Args:
        rows: ``name``, ``value``, ``label``; ``mark``: a second value, drawn as a tick.
        axis: name of the values.
        colour: the colour of the bars; ``@runs``: one per run.
        marks: name of the ticks; empty: draw none.

    Returns:
        The figure's specification in Vega-Lite.
    """
    y = {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": {"ticks": False, "domain": False}}
    top = max((max(row["value"] or 0, row.get("mark") or 0) for row in rows), default=0)
    scale = {"domainMin": 0, "domainMax": 1.35 * top or 1}
    x = {"field": "value", "type": "quantitative", "axis": None, "scale": scale}
    rows = [{**row, "label_at": max(row["value"] or 0, row.get("mark") or 0)} for row in rows]
    tooltip = [{"field": "name", "title": " "}, {"field": "label", "title": axis}]
    fill: Json = {"value": colour}
    if colour == "@runs":
        names = [row["name"] for row in rows]
        fill = {"field": "name", "type": "nominal", "legend": None, "scale": {"domain": names, "range": "@runs"}}
    layers: list[Json] = [
        {"mark": {"type": "bar", "cornerRadiusEnd": 3, "height": {"band": 0.68}},
         "encoding": {"x": x, "color": fill, "tooltip": tooltip}},
        {"mark": {"type": "text", "align": "left", "dx": 6, "color": "@ink"},
         "encoding": {"x": {**x, "field": "label_at"}, "text": {"field": "label"}}},
    ]  # fmt: skip
    if marks:
        mark = {"type": "tick", "thickness": 2, "size": 22, "color": "@ink"}
        on_tick = [{"field": "name", "title": " "}, {"field": "mark_label", "title": marks}]
        layers.insert(1, {"mark": mark, "encoding": {"x": {**x, "field": "mark"}, "tooltip": on_tick}})
    return {"height": BAR * len(rows), "data": {"values": rows}, "encoding": {"y": y}, "layer": layers}


def stacked_bars(
    rows: list[Json],
    axis: str,
    colours: dict[str, int],
    format: str = ",.0f",
    totals: bool = False,
    limit: tuple[str, float] | None = None,
) -> Json:
    """Draw horizontal stacked bars.

    Args:
        rows: ``name``, ``part``, ``value``.
        axis: title of the values' axis.
        colours: by part, in order; a part has the same colour in all charts.
        format: the format of the values.
        totals: whether each bar ends with its sum.
        limit: name and value of a line across the bars.

    Returns:
        The figure's specification in Vega-Lite.
    """
    order, colour = _parts(rows, colours)
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["name"]] = sums.get(row["name"], 0) + row["value"]
    height = {"height": (BAR + 6) * len(sums)}
    bars: Json = {
        "data": {"values": [{**row, "order": order[row["part"]]} for row in rows]},
        "mark": {"type": "bar", "height": {"band": 0.68}, "stroke": "@card", "strokeWidth": 1},
        "encoding": {
            "y": {"field": "name", "type": "nominal", "sort": None, "title": None,
                  "axis": {"ticks": False, "domain": False}},
            "x": {"field": "value", "type": "quantitative", "title": axis, "axis": {"tickCount": 5}},
            "color": colour,
            "order": {"field": "order"},
            "tooltip": [{"field": "name", "title": " "}, {"field": "part", "title": "part"},
                        {"field": "value", "title": axis, "format": format}],
        },
    }  # fmt: skip
    if not totals and limit is None:
        return height | bars
    layer, x, y = [bars], bars["encoding"]["x"], bars["encoding"]["y"]
    if totals:
        values = [{"name": name, "value": value} for name, value in sums.items()]
        layer += [{"data": {"values": values}, "mark": {"type": "text", "align": "left", "dx": 5, "color": "@ink"},
                   "encoding": {"x": x, "y": y, "text": {"field": "value", "format": format}}}]  # fmt: skip
    if limit is not None:
        label = {"type": "text", "align": "right", "baseline": "bottom", "y": -3, "color": "@ink"}
        layer += [{"data": {"values": [{"text": limit[0], "value": limit[1]}]}, "encoding": {"x": x}, "layer": [
            {"mark": {"type": "rule", "strokeDash": [6, 4], "color": "@ink"}},
            {"mark": label, "encoding": {"text": {"field": "text"}}},
        ]}]  # fmt: skip
    return height | {"layer": layer}


def _parts(rows: list[Json], colours: dict[str, int]) -> tuple[dict[str, int], Json]:
    """Return number the parts that occur in rows, known ones first, and encode their colours, the same in every
    chart."""
    names = {row["part"] for row in rows}
    shown = [part for part in colours if part in names] + sorted(names - set(colours))
    order = {part: number for number, part in enumerate(shown)}
    # Parts without a colour share the last two.
    scale = {"domain": shown, "range": [f"@part{colours.get(part, 7 + number % 2)}" for part, number in order.items()]}
    return order, {"field": "part", "type": "nominal", "scale": scale, "legend": {"orient": "top", "title": None}}


def timeline(rows: list[Json], phases: list[Json]) -> ReportChart:
    """Draw memory over one step, stacked by kind.

    Args:
        rows: ``ms``, ``part``, ``value`` in MiB.
        phases: ``name``, ``from`` and ``to`` in ms, ``peak`` in MiB.
    """
    order, colour = _parts(rows, KIND_COLOURS)
    top = max((phase["peak"] for phase in phases), default=0)
    lanes = label_lanes(phases)
    room = 1 + max(0.15, LANE * (1 + max(lanes, default=0)) / 200)  # the labels are above the areas
    end = max((phase["to"] for phase in phases), default=0)
    x = {
        "field": "ms",
        "type": "quantitative",
        "title": "ms into the step",
        "axis": {"tickCount": 6, "grid": False},
        "scale": {"domain": [0, end or 1], "nice": False},
    }
    area = {
        "data": {"values": [{**row, "order": order[row["part"]]} for row in rows]},
        "mark": {"type": "area", "interpolate": "step-after", "opacity": 0.92},
        "encoding": {
            "x": x,
            "y": {"field": "value", "type": "quantitative", "stack": "zero", "title": "MiB", "axis": {"tickCount": 5},
                  "scale": {"domainMax": room * top or 1}},
            "color": colour,
            "order": {"field": "order"},
            "tooltip": [{"field": "part", "title": "kind"}, {"field": "value", "title": "MiB", "format": ",.1f"},
                        {"field": "ms", "title": "ms", "format": ".1f"}, {"field": "phase", "title": "phase"}],
        },
    }  # fmt: skip
    start = {"x": {"field": "from", "type": "quantitative"}}
    layers: list[Json] = [{"mark": {"type": "rule", "color": "@muted", "strokeDash": [3, 3]}, "encoding": start}]
    at = {"x": {"field": "at", "type": "quantitative"}, "y": {"value": 0}, "text": {"field": "name"}}
    for lane, named in lanes.items():
        mark = {"type": "text", "baseline": "top", "color": "@muted", "fontSize": 11, "dy": 2 + LANE * lane}
        labels: list[Json] = []
        for ends, side in ((False, {"align": "left", "dx": 4}), (True, {"align": "right", "dx": -2})):
            if there := [row for row in named if row["end"] is ends]:
                labels.append({"data": {"values": there}, "mark": {**mark, **side}, "encoding": at})
        layers.append({"layer": labels})
    borders = {"data": {"values": phases}, "layer": layers}
    spec = {"height": 240, "layer": [area, borders]}
    says = "Memory in MiB over the milliseconds of one training step, stacked by kind, divided into phases"
    return ReportChart("timeline", "Memory over one step", says, spec)


def label_lanes(phases: list[Json]) -> dict[int, list[Json]]:
    """Assign phase names to rows so that none overlap on a phone; leave out names that do not fit.

    Args:
        phases: ``name``, ``from`` and ``to`` in ms.

    Returns:
        By row from the top: ``name``, ``at`` in ms, and ``end``: whether the name is right-aligned there.
    """
    scale = NARROWEST / (max((phase["to"] for phase in phases), default=0) or 1)
    taken: dict[int, float] = {}
    found: dict[int, list[Json]] = {}
    for phase in phases:
        width = LETTER * len(phase["name"]) + 8
        ends = phase["from"] * scale + width > NARROWEST
        left = phase["to"] * scale - width if ends else phase["from"] * scale
        lane = next((lane for lane in range(LANES) if taken.get(lane, 0.0) <= left), None)
        if lane is not None and phase["name"]:
            taken[lane] = left + width
            found.setdefault(lane, []).append(
                {"name": phase["name"], "at": phase["to" if ends else "from"], "end": ends}
            )
    return found


def line(name: str, title: str, field: str, axis: str, rows: list[Json], format: str) -> ReportChart:
    """Draw one field of the rows over their steps; the axis' name and the format are for the tooltip."""
    x = {"field": "step", "type": "quantitative", "title": "step", "axis": {"tickCount": 5, "grid": False}}
    y = {
        "field": field, "type": "quantitative", "title": None, "scale": {"zero": False},
        "axis": {"tickCount": 4, "format": "~g" if field != "lr" else "~e"},
    }  # fmt: skip
    tooltip = [{"field": "step", "title": "step"}, {"field": field, "title": axis, "format": format}]
    spec = {
        "height": 130,
        "data": {"values": [{"step": row["step"], field: row[field]} for row in rows]},
        "encoding": {"x": x},
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 1.5, "color": "@first"}, "encoding": {"y": y}},
            _hover(y, tooltip),
        ],
    }  # fmt: skip
    return ReportChart(name, title, f"{title} over the training steps", spec)


def _hover(y: Json, tooltip: list[Json]) -> Json:
    """Show a point and a tooltip for the step nearest to the pointer."""
    return {
        "params": [{"name": "hover", "select": {"type": "point", "fields": ["step"], "nearest": True,
                                                "on": "pointerover", "clear": "pointerout"}}],
        "mark": {"type": "point", "filled": True, "size": 60, "color": "@first"},
        "encoding": {
            "y": y,
            "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0},
            "tooltip": tooltip,
        },
    }  # fmt: skip


def loss(runs: list[str], evaluations: list[Json], fields: list[str], title: str) -> ReportChart:
    """Draw the raw and the smoothed loss; the page's script supplies and smooths the data set ``loss``.

    Args:
        runs: names; the raw loss is drawn only if there is one run.
        evaluations: ``run``, ``step``, ``eval_loss``.
        fields: further fields for the tooltip.
        title: name of the validation loss.
    """
    several, points_are = len(runs) > 1, f"; diamonds: {title}" if evaluations else ""
    colours = {"domain": runs, "range": "@runs"}
    legend = {"orient": "top", "title": None} if several else None
    colour = {"field": "run", "type": "nominal", "scale": colours, "legend": legend}
    x = {"field": "step", "type": "quantitative", "title": "step", "axis": {"tickCount": 6, "grid": False}}
    scale = {"zero": False, "nice": True}
    y = {"field": "loss", "type": "quantitative", "title": "loss", "scale": scale, "axis": {"tickCount": 5}}
    smooth = {**y, "field": "smoothed"}
    tooltip = [{"field": "run", "title": "run"}] if several else []
    formats = {"loss": ".4f", "smoothed": ".4f", "lr": ".3~e", "grad_norm": ".4~g", "seconds": ".3~g"}
    titles = {"lr": "learning rate", "grad_norm": "gradient norm", "seconds": "s/step"}
    tooltip += [{"field": "step", "title": "step"}]
    tooltip += [
        {"field": field, "title": titles.get(field, field), **({"format": formats[field]} if field in formats else {})}
        for field in ("loss", "smoothed", *fields)
    ]
    layers: list[Json] = []
    if not several:
        layers += [{"mark": {"type": "line", "strokeWidth": 1, "opacity": 0.35}, "encoding": {"y": y}}]
    layers += [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"y": smooth}},
        {**_hover(smooth, tooltip), "mark": {"type": "point", "filled": True, "size": 70}},
    ]
    spec: Json = {
        "height": 300, "data": {"name": "loss", "values": []}, "encoding": {"x": x, "color": colour}, "layer": layers,
    }  # fmt: skip
    if evaluations:
        mark = {
            "type": "point", "shape": "diamond", "filled": True, "size": 170, "stroke": "@card", "opacity": 1,
            "clip": False,
        }  # fmt: skip
        points: Json = {
            "data": {"values": evaluations},
            "mark": mark,
            "encoding": {
                "x": x, "y": {**y, "field": "eval_loss"},
                "color": colour if several else {"value": "@second"},
                "tooltip": [*tooltip[:1], *([{"field": "step", "title": "step"}] if several else []),
                            {"field": "eval_loss", "title": title, "format": ".4f"}],
            },
        }  # fmt: skip
        spec["layer"].append(points)
    return ReportChart("loss", "Loss", f"Loss of every step (faint) and smoothed loss{points_are}", spec)


def drift(points: list[Json], says: str) -> ReportChart:
    """Draw the drift of groups of prompts over the steps: ``step``, ``prompts``, ``drift``, ``low``, ``high``."""
    groups = list(dict.fromkeys(point["prompts"] for point in points))
    axis = {"tickCount": 5, "format": "~%"}
    y: Json = {"field": "drift", "type": "quantitative", "title": "drift", "axis": axis}
    error = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    tooltip = [
        {"field": "prompts", "title": "prompts"},
        {"field": "step", "title": "step"},
        {"field": "drift", "title": "drift", "format": ".3~%"},
    ]
    spec: Json = {
        "height": 200,
        "data": {"values": points},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "title": "step", "axis": {"tickCount": 6, "grid": False}},
            "color": {
                "field": "prompts", "type": "nominal", "scale": {"domain": groups, "range": "@runs"},
                "legend": {"orient": "top", "title": None},
            },
        },
        "layer": [
            {"mark": {"type": "rule", "opacity": 0.6}, "encoding": error},
            {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"y": y}},
            {"mark": {"type": "point", "filled": True, "size": 60}, "encoding": {"y": y, "tooltip": tooltip}},
        ],
    }  # fmt: skip
    return ReportChart("drift", "Drift from the base", says, spec)


def scatter(x: str, axis: str, points: list[Json], several: bool) -> ReportChart:
    """Draw subject fidelity against another figure, with intervals, a picture and the name of each model.

    Args:
        x: the other figure's field, with ``_low`` and ``_high``.
        axis: its title.
        points: ``run``, ``title``, ``subject``, ``image``, ``place`` in the order of steps, and the other field.
        several: whether they belong to several runs, distinguished by colour.
    """
    scale: Json = {"zero": False, "padding": 36}
    up: Json = {"field": "subject", "type": "quantitative", "title": "subject fidelity", "scale": scale}
    across = {**up, "field": x, "title": axis, "axis": {"format": "~%" if x == "drift" else "~g", "tickCount": 5}}
    names = list(dict.fromkeys(point["run"] for point in points))
    colour: Json = {"value": "@first"}
    if several:
        runs = {"domain": names, "range": "@runs"}
        colour = {"field": "run", "type": "nominal", "scale": runs, "legend": {"orient": "top", "title": None}}
    tooltip = [
        {"field": "title", "title": "model"},
        {"field": x, "title": axis, "format": ".1%" if x == "drift" else ".3f"},
        {"field": "subject", "title": "subject fidelity", "format": ".3f"},
    ]
    wide = {"x": {**across, "field": f"{x}_low"}, "x2": {"field": f"{x}_high"}, "y": up}
    high = {"x": across, "y": {**up, "field": "subject_low"}, "y2": {"field": "subject_high"}}
    place = {"x": across, "y": up}
    text = {"type": "text", "dx": MODEL // 2 + 4, "align": "left", "fontSize": 11, "color": "@ink"}
    spec: Json = {
        "height": 360,
        "data": {"values": points},
        "encoding": {"color": colour},
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 1, "opacity": 0.5},
             "encoding": {**place, "order": {"field": "place"}}},
            {"mark": {"type": "rule", "opacity": 0.7}, "encoding": wide},
            {"mark": {"type": "rule", "opacity": 0.7}, "encoding": high},
            {"mark": {"type": "image", "width": MODEL, "height": MODEL},
             "encoding": {**place, "url": {"field": "picture"}, "tooltip": tooltip}},
            {"mark": text, "encoding": {**place, "text": {"field": "title"}, "color": {"value": "@ink"}}},
        ],
    }  # fmt: skip
    said = "; ".join(f"{point['title']} {point['subject']:.3f} at {point[x]:.3f}" for point in points if x in point)
    return ReportChart(
        f"fidelity-{x}", f"Subject fidelity against {axis}", f"Subject fidelity against {axis}: {said}", spec
    )


# Pictures in files


def image(spec: Json, suffix: str = ".png") -> bytes:
    """Draw a chart in Vega-Lite on white, as ``.svg``, or ``.png`` with twice its pixels."""
    import vl_convert

    css = (ASSETS / "pages.css").read_text(encoding="utf-8")
    light: Json = dict(re.findall(r"--([\w-]+): light-dark\((#\w+)", css))
    light["runs"] = [light[f"part{number}"] for number in RUN_PARTS]

    def coloured(value: Any) -> Any:  # replaces @NAME, as page.js does
        if isinstance(value, list):
            return [coloured(each) for each in value]
        if isinstance(value, dict):
            return {key: inner if key == "values" else coloured(inner) for key, inner in value.items()}
        return light[value[1:]] if isinstance(value, str) and value.startswith("@") else value

    schema = "https://vega.github.io/schema/vega-lite/v5.json"
    whole = {"$schema": schema, "background": "white", **coloured(spec)}
    return (
        vl_convert.vegalite_to_svg(whole).encode() if suffix == ".svg" else vl_convert.vegalite_to_png(whole, scale=2)
    )


# SVG for a page that changes while it is looked at

WIDTH, HEIGHT = 480, 200  # size of the drawing; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 10, 30
LEAST = 1e-30


@dataclass(frozen=True)
class ChartLine:
    name: str  # in the legend; empty: none
    dots: Sequence[tuple[float, float]]  # step and value
    kind: str  # its class in app.css: raw, smooth, held or part0 to part5
    errors: Sequence[float] = ()  # half the length of the bar through each dot; empty: no bars and no dots


def svg_lines(title: str, lines: Sequence[ChartLine], steps: int | None = None) -> str:
    """Draw lines over the steps as a figure of HTML; empty if no line has two dots.

    By hand, because a run's four charts are drawn anew as it trains: 3 ms, whereas Vega takes 60 ms, 930 ms at first,
    and 130 MiB of the page's process (2 CPU cores, November 2026). Without scripts and styles, which the page's content
    policy forbids; the lines have their values as data, which chart.js shows.

    Args:
        title: what it shows.
        lines: in the order in which they are drawn.
        steps: last step of the axis; None: the lines' last step.
    """
    plotted = [line for line in lines if line.dots]
    if max((len(line.dots) for line in plotted), default=0) < 2:
        return ""
    last = max(max(dot[0] for line in plotted for dot in line.dots), steps or 0) or 1
    low, high = limits(plotted)

    def x(step: float) -> float:
        return round(LEFT + step / last * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        share = min(max((value - low) / (high - low), 0.0), 1.0)  # a line stays in its frame
        return round(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP), 1)

    name = escape(title)
    ends = [f"{each.name or title} {each.dots[-1][1]:.4g} at step {each.dots[-1][0]:,.0f}" for each in plotted]
    keys = [f' <span class="key {line.kind}">{escape(line.name)}</span>' for line in plotted if line.name]
    parts = [
        f'<figure class="chart">\n<figcaption><b>{name}</b>{"".join(keys)} <output></output></figcaption>',
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{name} by step: '
        f'{escape(", ".join(ends))}" data-left="{LEFT}" data-right="{WIDTH - RIGHT}" data-last="{last:g}">',
    ]
    for value in ticks(low, high):
        parts += [
            f'<line class="grid-line" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>'
            f'<text x="{LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value:.4g}</text>'
        ]
    for step in ticks(0, last, most=6):
        parts += [f'<text x="{x(step)}" y="{HEIGHT - 10}" text-anchor="middle">{step:,.0f}</text>']
    for line in plotted:
        points = " ".join(f"{x(step)},{y(value)}" for step, value in line.dots)
        values = " ".join(f"{step:g}:{value:.6g}" for step, value in line.dots)
        own = f'data-name="{escape(line.name)}" data-values="{values}"'
        parts += [f'<polyline class="{line.kind}" fill="none" points="{points}" {own}/>']
        for (step, value), error in zip(line.dots, line.errors, strict=False):
            ends_at = f'y1="{y(value - error)}" y2="{y(value + error)}"'
            parts += [
                f'<line class="{line.kind}" x1="{x(step)}" x2="{x(step)}" {ends_at}/>'
                f'<circle class="{line.kind}" cx="{x(step)}" cy="{y(value)}" r="3"/>'
            ]
    return "\n".join([*parts, "</svg>", "</figure>", ""])


def limits(lines: Sequence[ChartLine]) -> tuple[float, float]:
    """Return the range of values of a chart, without the most extreme hundredth of a line on either side."""
    found: list[float] = []
    for line in lines:
        values = sorted(dot[1] for dot in line.dots)
        cut = len(values) // 100
        found += [values[cut], values[-1 - cut]]
        for (_, value), error in zip(line.dots, line.errors, strict=False):
            found += [value - error, value + error]
    low, high = min(found), max(found)
    edge = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return low - edge, high + edge


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers between two values, spaced by 1, 2 or 5 times a power of ten."""
    span = max(high - low, LEAST)
    power = 10.0 ** math.floor(math.log10(span / most))
    apart = next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= most)
    return [number * apart for number in range(math.ceil(low / apart), math.floor(high / apart) + 1)]


# Text

STEEP = "▁▂▃▄▅▆▇█"


def text_bar(parts: Sequence[float], most: float, width: int, signs: str = "█") -> str:
    """Draw a bar of characters: parts, each in its own sign; a bar of the value ``most`` has ``width`` characters."""
    total, upto, plotted = sum(parts), 0.0, ""
    length = round(width * total / (most or 1))
    for part, sign in zip(parts, signs, strict=True):
        upto += part
        plotted += sign * (round(length * upto / (total or 1)) - len(plotted))
    return plotted


def sparkline(values: list[float], width: int = 60) -> str:
    """Draw values as a line of block characters, each showing the mean of its part."""
    many = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for part in (values[at : at + many] for at in range(0, len(values), many))]
    low, high = min(means), max(means)
    return "".join(STEEP[round((mean - low) / ((high - low) or 1) * (len(STEEP) - 1))] for mean in means)
