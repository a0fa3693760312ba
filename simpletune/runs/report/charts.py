"""Build a report's charts in Vega-Lite. Strings that begin with @ name colours of the page's theme."""

from __future__ import annotations

from simpletune.engine.memory.snapshot import KINDS
from simpletune.runs.report.content import ReportChart
from simpletune.system.options import Json

KIND_COLOURS = {kind: number for number, kind in enumerate(KINDS)}
PHASE_COLOURS = {"data": 6, "noise": 8, "forward": 0, "loss": 1, "backward": 4, "clip": 5, "optimizer": 3}
BAR = 26  # pixels per row
NARROWEST, LETTER, LANE, LANES = 280, 6.3, 14, 5  # pixels: plot on a phone, letter, row of labels; maximum of rows


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


def stacked(rows: list[Json], axis: str, colours: dict[str, int], format: str = ",.0f") -> Json:
    """Draw horizontal stacked bars.

    Args:
        rows: ``name``, ``part``, ``value``.
        axis: title of the values' axis.
        colours: by part, in order; a part has the same colour in all charts.
        format: the format of the values.

    Returns:
        The figure's specification in Vega-Lite.
    """
    shown = _shown(rows, colours)
    order = {part: number for number, part in enumerate(shown)}
    return {
        "height": (BAR + 6) * len({row["name"] for row in rows}),
        "data": {"values": [{**row, "order": order[row["part"]]} for row in rows]},
        "mark": {"type": "bar", "height": {"band": 0.68}, "stroke": "@card", "strokeWidth": 1},
        "encoding": {
            "y": {"field": "name", "type": "nominal", "sort": None, "title": None,
                  "axis": {"ticks": False, "domain": False}},
            "x": {"field": "value", "type": "quantitative", "title": axis, "axis": {"tickCount": 5}},
            "color": _part_colours(shown, colours),
            "order": {"field": "order"},
            "tooltip": [{"field": "name", "title": " "}, {"field": "part", "title": "part"},
                        {"field": "value", "title": axis, "format": format}],
        },
    }  # fmt: skip


def _shown(rows: list[Json], colours: dict[str, int]) -> list[str]:
    """List the parts that occur in rows, known ones first."""
    names = {row["part"] for row in rows}
    return [part for part in colours if part in names] + sorted(names - set(colours))


def _part_colours(shown: list[str], colours: dict[str, int]) -> Json:
    """Give each part its fixed colour in every chart; unknown parts share the last two."""
    scale = {
        "domain": shown,
        "range": [f"@part{colours.get(part, 7 + number % 2)}" for number, part in enumerate(shown)],
    }
    return {"field": "part", "type": "nominal", "scale": scale, "legend": {"orient": "top", "title": None}}


def timeline(rows: list[Json], phases: list[Json]) -> ReportChart:
    """Draw memory over one step, stacked by kind.

    Args:
        rows: ``ms``, ``part``, ``value`` in MiB.
        phases: ``name``, ``from`` and ``to`` in ms, ``peak`` in MiB.
    """
    shown = _shown(rows, KIND_COLOURS)
    order = {part: number for number, part in enumerate(shown)}
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
            "color": _part_colours(shown, KIND_COLOURS),
            "order": {"field": "order"},
            "tooltip": [{"field": "part", "title": "kind"}, {"field": "value", "title": "MiB", "format": ",.1f"},
                        {"field": "ms", "title": "ms", "format": ".1f"}, {"field": "phase", "title": "phase"}],
        },
    }  # fmt: skip
    borders = {
        "data": {"values": phases},
        "layer": [
            {"mark": {"type": "rule", "color": "@muted", "strokeDash": [3, 3]}, "encoding": {"x": {"field": "from",
             "type": "quantitative"}}},
            *(_labels(lane, named) for lane, named in lanes.items()),
        ],
    }  # fmt: skip
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


def _labels(lane: int, named: list[Json]) -> Json:
    """Draw one row of phase names."""
    mark = {"type": "text", "baseline": "top", "color": "@muted", "fontSize": 11, "dy": 2 + LANE * lane}
    encoding = {
        "x": {"field": "at", "type": "quantitative"}, "y": {"value": 0}, "text": {"field": "name"},
    }  # fmt: skip
    layers: list[Json] = []
    for end, side in ((False, {"align": "left", "dx": 4}), (True, {"align": "right", "dx": -2})):
        if rows := [row for row in named if row["end"] is end]:
            layers.append({"data": {"values": rows}, "mark": {**mark, **side}, "encoding": encoding})
    return {"layer": layers}


def line(name: str, title: str, field: str, axis: str, rows: list[Json], format: str) -> ReportChart:
    """Draw one value over the steps.

    Args:
        name: the chart's name.
        title: the title above the chart.
        field: the field of the rows.
        axis: title of the value's axis.
        rows: rows with ``step`` and the field.
        format: the format of the value in the tooltip.
    """
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
        "height": 300,
        "data": {"name": "loss", "values": []},
        "encoding": {"x": x, "color": colour},
        "layer": layers,
    }
    if evaluations:
        mark = {
            "type": "point",
            "shape": "diamond",
            "filled": True,
            "size": 170,
            "stroke": "@card",
            "opacity": 1,
            "clip": False,
        }
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
