"""The page of ``scaling``: what was measured on processes of this machine, and what is predicted for many cards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from benchmarks.cluster import DATA, FABRICS, MACHINE
from benchmarks.table import command_of
from simpletune.runs.report.content import Fact, Report, ReportChart, ReportSection, ReportTable
from simpletune.system.options import Json

if TYPE_CHECKING:
    from benchmarks.scaling_plans import Plan

TITLE = "Training on several cards: measured here, predicted, published"
LEAD = (
    "Measured: processes of this machine's CPU, one thread each. Predicted: from the operations of our own step, each "
    "card's stated figures and stated bandwidths; on no card. Published: by others. Nothing was fitted to a published "
    f"figure. Command: {command_of('scaling')}."
)
HEAD = ("cards", "global batch", "micro-batch x passes", "pictures/s", "a card", "efficiency", "update sharded",
        "exchange exposed", "bound by", "days", "card-hours", "cost", "published pictures/s", "its efficiency",
        "predicted / published")  # fmt: skip
MEASURED = ("processes", "global batch", "micro-batch x passes", "s a step", "pictures/s", "efficiency",
            "predicted s a step", "predicted / measured")  # fmt: skip
BASE = 8  # cards whose rate per card counts as an efficiency of 100%, as in the published tables


def page(found: Mapping[str, Json], plans: Mapping[str, Plan]) -> Report:
    """Lay out the page from the rows that exist."""
    sections = [section for section in (measured_section(found), *predicted_sections(found, plans)) if section.tables]
    return Report(TITLE, LEAD, "", [], list(facts(found, plans)), sections, data={"losses": []})


def facts(found: Mapping[str, Json], plans: Mapping[str, Plan]) -> Iterable[Fact]:
    """How close predicted efficiencies are to published ones, with our update and with a sharded one."""
    pairs = [pair for name, plan in plans.items() for pair in efficiencies(name, plan, found) if pair[0] > BASE]
    for column, title in ((1, "efficiency within 5 points"), (2, "the same, update sharded")):
        if pairs:
            near = sum(abs(pair[column] - pair[3]) <= 0.05 for pair in pairs)
            furthest = max(pairs, key=lambda pair: abs(pair[column] - pair[3]))
            words = f"furthest: {furthest[column]:.0%} predicted, {furthest[3]:.0%} published, {furthest[0]} cards"
            yield Fact(title, f"{near} of {len(pairs)}", words)


def efficiencies(name: str, plan: Plan, found: Mapping[str, Json]) -> Iterable[tuple[int, float, float, float]]:
    """Cards; efficiency against 8 cards predicted, predicted with a sharded update, and published."""
    rows = {cards: found[key(name, plan, cards)] for cards in all_cards(found, name, plan)}
    for cards, rate in plan.published.items():
        if cards in rows and BASE in rows:
            theirs = rate / cards / (plan.published[BASE] / BASE)
            yield cards, efficiency(cards, rows), efficiency(cards, rows, sharded=True), theirs


def efficiency(cards: int, rows: Mapping[int, Json], sharded: bool = False) -> float:
    """Pictures per second and card, relative to ``BASE`` cards; ``sharded``: each card updates only its part."""
    update = update_of(rows) if sharded else 0.0
    rates = [rows[n]["batch"] / n / (rows[n]["seconds"] - update * (1 - 1 / n)) for n in (cards, BASE)]
    return rates[0] / rates[1]


def update_of(rows: Mapping[int, Json]) -> float:
    """Seconds of the optimizer's update: a step without its passes, from two rows with different numbers of passes."""
    alike = [row for row in rows.values() if row["micro"] == max(each["micro"] for each in rows.values())]
    few, many = (pick(alike, key=lambda row: row["passes"]) for pick in (min, max))
    if few["passes"] == many["passes"]:
        return 0.0
    busy = [row["seconds"] - row["exposed"] for row in (few, many)]
    each = (busy[1] - busy[0]) / (many["passes"] - few["passes"])
    return busy[0] - few["passes"] * each


def key(name: str, plan: Plan, cards: int) -> str:
    """The row of a plan for a number of cards."""
    return f"{name}, {cards} {plan.card}"


def measured_section(found: Mapping[str, Json]) -> ReportSection:
    """Processes of this machine, with a prediction from the run of one process and the measured exchange."""
    tables = []
    for method in ("LoRA", "full"):
        rows = [row for name, row in found.items() if name.startswith(f"measured: {method}") and "rate" in row]
        exchange = found.get(f"measured: {method}, exchange of 2 on the CPU")
        if rows:
            body = [measured_cells(row, rows[0], exchange) for row in rows]
            tables.append(ReportTable(f"The tiny SD3, {'LoRA r16' if method == 'LoRA' else 'all weights'}, fp32, 64 px",
                                MEASURED, body))  # fmt: skip
    notes = [
        "Predicted: the seconds of one process times its share of the micro-batches, and the measured all-reduce of "
        "the gradients, none of it hidden. Processes of one machine also share its memory and caches."
    ]
    return ReportSection("measured", "Measured on this machine", notes, tables=tables)


def measured_cells(row: Json, one: Json, exchange: Json | None) -> tuple[str, ...]:
    """One measured row."""
    efficiency = row["rate"] / (row["processes"] * one["rate"])
    cells = (str(row["processes"]), f"{row['batch']:.0f}", f"{row['micro']} x {row['passes']}",
             f"{row['seconds']:.3f}", f"{row['rate']:.1f}", f"{efficiency:.0%}")  # fmt: skip
    if row["processes"] == 1 or exchange is None or row["processes"] != exchange["processes"]:
        return (*cells, "", "")
    predicted = one["seconds"] * row["passes"] / one["passes"] + exchange["seconds"]
    return (*cells, f"{predicted:.3f}", f"{predicted / row['seconds']:.2f}")


def predicted_sections(found: Mapping[str, Json], plans: Mapping[str, Plan]) -> Iterable[ReportSection]:
    """A section for each training."""
    for number, (name, plan) in enumerate(plans.items()):
        rows = {cards: found[key(name, plan, cards)] for cards in all_cards(found, name, plan)}
        if BASE not in rows:
            continue
        body = [predicted_cells(cards, rows, plan) for cards in rows]
        section = ReportSection(
            f"plan-{number}", name, [about(plan)], tables=[ReportTable(f"On {plan.card}", HEAD, body)]
        )
        section.charts.append(
            ReportChart(f"plan-{number}", "Efficiency by cards", name, chart(name, plan, found, rows))
        )
        yield section


def all_cards(found: Mapping[str, Json], name: str, plan: Plan) -> list[int]:
    """The numbers of cards that have rows."""
    start, end = f"{name}, ", f" {plan.card}"
    named = [row.removeprefix(start).removesuffix(end) for row in found if row.startswith(start) and row.endswith(end)]
    return sorted(int(cards) for cards in named if cards.isdigit())


def about(plan: Plan) -> str:
    """What the rows of a plan assume."""
    images = f"Days, card-hours and cost are of {plan.images / 1e6:,.1f} million pictures"
    price = f"at ${plan.price:g} a card and hour" + (", the source's price" if plan.source else "")
    source = f" Published by {plan.source}." if plan.source else " No published figure."
    return (
        f"{images}, {price}. Efficiency is that of a card, against {MACHINE} cards; update sharded: if each card "
        "updated its part of the weights alone, by arithmetic; of our trainings train.fsdp=full does so, which these "
        f"rows do not use.{source} "
        f"Gradients: {FABRICS[plan.card].source}. Samples are read at {DATA / 1e9:g} GB/s a machine (assumed)."
    )


def predicted_cells(cards: int, rows: Mapping[int, Json], plan: Plan) -> tuple[str, ...]:
    """One predicted row."""
    row = rows[cards]
    days = plan.images / row["rate"] / 86400
    rounded = f"{days:,.1f}" if days >= 1 else f"{days:.2g}"
    rate = f"{row['rate']:,.0f}" if row["rate"] >= 10 else f"{row['rate']:.2f}"
    cells = (str(cards), f"{row['batch']:,}", f"{row['micro']} x {row['passes']}", rate, f"{row['rate'] / cards:.3g}",
             f"{efficiency(cards, rows):.0%}", f"{efficiency(cards, rows, sharded=True):.0%}",
             f"{row['exposed']:.2g} of {row['seconds']:.3g} s", row["bound"], rounded,
             f"{24 * days * cards:,.0f}", f"${24 * days * cards * plan.price:,.0f}")  # fmt: skip
    published = plan.published.get(cards)
    if published is None:
        return (*cells, "", "", "")
    theirs = published / cards / (plan.published[BASE] / BASE)
    return (*cells, f"{published:,g}", f"{theirs:.0%}", f"{row['rate'] / published:.2f}")


def chart(name: str, plan: Plan, found: Mapping[str, Json], rows: Mapping[int, Json]) -> Json:
    """Efficiency over cards, predicted and published."""
    values = [{"cards": cards, "efficiency": round(efficiency(cards, rows, sharded), 4), "of": of}
              for of, sharded in (("predicted", False), ("predicted, update sharded", True))
              for cards in rows if cards >= BASE]  # fmt: skip
    values += [{"cards": cards, "efficiency": round(theirs, 4), "of": "published"}
               for cards, _, _, theirs in efficiencies(name, plan, found)]  # fmt: skip
    return {"data": {"values": values}, "mark": {"type": "line", "point": True}, "width": "container", "height": 180,
            "encoding": {"x": {"field": "cards", "type": "quantitative", "scale": {"type": "log", "base": 2}},
                         "y": {"field": "efficiency", "type": "quantitative", "axis": {"format": "%"}},
                         "color": {"field": "of", "type": "nominal", "title": None}}}  # fmt: skip
