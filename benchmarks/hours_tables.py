"""The tables of ``hours``: predicted and published figures, and what the predictions say about cost and other cards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks import vertex
from benchmarks.published import (
    IMAGES,
    MOSAIC_BLOG,
    PER_HOUR,
    RATE,
    SOURCES,
    VERTEX,
    Row,
    costs,
)
from simpletune.runs.report.content import ReportSection, ReportTable
from simpletune.system.options import Json
from simpletune.system.prices import card_prices, cost_of_image

TITLES = {
    "study": "Four runs of SD3 Medium on an L4",
    "sweep": "A peer's sweep: LoRA in bf16, its timings after warm-up",
    "vertex": "Vertex: Stable Diffusion 1.5, LoRA r8, all blocks checkpointed",
    "serving": "Vertex: four pictures of 512 px served",
    "mosaic": "From scratch: Stable Diffusion 2 on 8 A100",
}
WHY = {
    "study": [
        "Int8 by quanto, as there. The plot calls its times seconds per epoch; rank 16 takes 40% longer in it than "
        "rank 64 and rank 1, and its full fine-tuning could not be repeated: no goal. In the full step our optimizer "
        "updates a weight by one kernel, which theirs does not.",
    ],
    "sweep": [
        "Settings of its examples sd3.peft-lora and sd1x-dreamshaper.peft-lora: SD3.5 Medium (its default in the "
        "family), LoRA on to_q, to_k, to_v and to_out.0, r128, batch 3, 1024 px, 154 T5 tokens; SD 1.x r16, batch 1, "
        "512 px. Rows of other quantisers are left out.",
        "SD3.5 Medium on an L40S: 19 to 22% are left, the same in all rows; its own adapter and optimizer come into "
        "question, since the blocks are diffusers' on both sides. The page "
        "does not say which H100 it used, and both are predicted: by the data sheet of the PCI "
        "Express card the rows are within 13%, by that of the SXM card they are not.",
        "SD 1.x takes as long on an H100 as on an L40S, which has a quarter to a half of its bandwidth: the host "
        "bounds it, as predicted. Missed: see the explanation below the table.",
    ],
    "vertex": [
        "Its scripts encode pictures and prompts in every step, which is added (the column of encoding). The charts "
        "include warm-up: from batch 2 to 16 their seconds rise by 0.025 a sample, on top of 0.76 s that belong to no "
        "sample; predicted are 0.031 a sample and 0.056 s. The costs of 100 and 1000 steps give the pace without a "
        "start, 0.63 s.",
        "The report does not name its precision. The last row is the same step in fp32, with convolutions in TF32 as "
        "torch does by default.",
    ],
    "serving": [
        "One batch of four with guidance, fp16 (bf16 on the A100), without text encoder, safety checker and network. "
        "Plain: 50 steps, and the traffic of attention that stores its scores, added by arithmetic. Optimised: 25 "
        "steps with attention that does not, so half of its gain is fewer steps.",
    ],
    "mosaic": [
        "Full fine-tuning of the U-Net of Stable Diffusion 2 base: fp32 weights, fp16 products, AdamW, 256 pictures a "
        "card and step in micro-batches of 16, as in its files. The exchange of gradients between cards is not counted "
        "(3.5 GB for each 2048 pictures).",
        f"The row with encoding is of earlier code ({MOSAIC_BLOG}), here with micro-batches of 4. Its encoders are "
        "predicted in fp32, as a run with fp32 weights takes them; they are 17 of 26 s.",
    ],
}  # fmt: skip
OUTSIDE = {
    "sweep: SD 1.x": "The host's part is ours. diffusers' blocks and PEFT's LoRA cost the host 1.15 times as much "
    "without checkpointing and 1.4 times with it (host.md, SD 1.5 with LoRA in fp32), which the slowest core of the "
    "range does not make up. Inferred, because an H100 is no faster than an L40S: the rest is its trainer's own work "
    "on the host.",
    "vertex: batch ": "By their rise with the batch, 0.76 s of each step belong to no sample; the rise itself, "
    "0.025 s, is within the predicted range. Part is the start (see steps 100 to 1000), the rest is not explained.",
    "vertex: 256 px": "0.76 s of each step belong to no sample, as in the rows by batch.",
    "vertex: 1024 px": "Not explained: beyond the 0.76 s it takes five times the prediction, but in fp32 at least "
    "5.6 s are predicted.",
    "vertex: batch 4, steps 100 to 1000, A": "Without a start, 0.47 s of each step are left. Not explained.",
    "vertex: batch 4, steps 100 to 1000, if": "Its precision was not fp32: in fp32 at least 2.5 s are predicted for "
    "batch 16, published as 1.149 s.",
    "mosaic: 512 px, encoding": "Inferred: encoders in half precision, the default of the published code "
    "(encode_latents_in_fp16). They would take 4 s instead of 17, and the row 160 pictures/s.",
}
"""Why a published figure is outside the predicted range, by the beginning of its rows' keys; the longest one counts."""
HEAD = ("row", "card", "published", "predicted (range)", "within", "of it encoding", "predicted / published seconds",
        "goal 25%", "bound by")  # fmt: skip
RUN = 800  # pictures of a run whose cost the report gives


def ratio_of(row: Row, found: Json) -> float:
    """Predicted over published seconds."""
    return row.value / found["predicted"] if row.unit == RATE else found["predicted"] / row.value


def is_within(row: Row, found: Json) -> bool:
    """Whether the published figure is within the predicted range."""
    low, high = found["range"]
    return bool(low <= row.value <= high)


def why_outside(row: Row) -> str:
    """The explanation of a row outside its range."""
    return OUTSIDE[max((begin for begin in OUTSIDE if row.key.startswith(begin)), key=len)]


def ranged(predicted: float, ends: Iterable[float], form: str) -> str:
    """A prediction with its range: ``0.16 (0.11 to 0.32)``."""
    low, high = sorted(ends)
    return f"{predicted:{form}} ({low:{form}} to {high:{form}})"


def beside_sections(beside: Sequence[Row], found: dict[str, Json]) -> list[ReportSection]:
    """A section for each source, with predicted and published figures."""
    sections = []
    for group, title in TITLES.items():
        rows = [row for row in beside if row.group == group]
        if rows:
            tables = [ReportTable(f"Published by {SOURCES[group]}", HEAD, [cells(row, found[row.key]) for row in rows])]
            outside: dict[str, list[str]] = {}
            for row in rows:
                if not is_within(row, found[row.key]):
                    outside.setdefault(why_outside(row), []).append(f"{row.name}, {row.card}")
            if outside:
                body = [("; ".join(names), why) for why, names in outside.items()]
                tables.append(ReportTable("Outside the range", ("rows", "explanation"), body))
            sections.append(ReportSection(group, title, WHY[group], tables=tables))
    return sections


def cells(row: Row, found: Json) -> tuple[str, ...]:
    """One row of a table."""
    ratio = ratio_of(row, found)
    goal = "" if not row.goal else "met" if 0.8 <= ratio <= 1.25 else "missed"
    unit = {IMAGES: "s", RATE: "pictures/s"}.get(row.unit, "s")
    published = f"{row.value:.4g} {unit}" + (f" ({row.text})" if row.text else "")
    encoding = f"{found['inside']:.3f} s" if row.inside else ""
    predicted = ranged(found["predicted"], found["range"], ",.0f" if row.unit == RATE else ".3g")
    return (row.name, row.card, published, f"{predicted} {unit}", "yes" if is_within(row, found) else "no", encoding,
            f"{ratio:.2f}", goal, found["bound"])  # fmt: skip


def cost_section(found: dict[str, Json]) -> ReportSection:
    """What a run of 800 pictures and a served picture cost, at the report's prices."""
    runs: list[tuple[str, ...]] = []
    for method, card, batch, dollars, _, _ in costs():
        row = found.get(f"cost: {method}, {card}, batch {batch}")
        if row is not None:
            predicted, *ends = (
                cost_of_image(RUN / batch * seconds, PER_HOUR[card]) for seconds in (row["step"], *row["range"])
            )
            runs.append((f"{method}, {card}, batch {batch}", f"{dollars:.2f}", ranged(predicted, ends, ".3f"),
                         f"{dollars - predicted:.2f}"))  # fmt: skip
    served: list[tuple[str, ...]] = []
    for name, published in {"plain, 50 steps": (0.00080, 0.00174, 0.00123),
                            "optimised, 25 steps": (0.00035, 0.00081, 0.00050)}.items():  # fmt: skip
        for (card, hour), dollars in zip(PER_HOUR.items(), published, strict=True):
            row = found.get(f"serving: {name}, {card}")
            if row is not None:
                predicted, *ends = (cost_of_image(each / 4, hour) for each in (row["predicted"], *row["range"]))
                served.append((name, card, f"{dollars:.5f}", ranged(predicted, ends, ".5f")))
    notes = [
        "At the report's prices: T4 $0.4025, V100 $2.852, A100 $4.2245 an hour. Predicted: the steps alone, latents "
        "and prompts prepared. For LoRA on the A100 the rest is about 70 s a run and 0.21 s a step (by the rows of "
        "batch 1 and 8): a start, which the report's costs include, and what its steps do besides. That batches of 16 "
        "and 32 cost more again than 8, no step explains."
    ]
    tables = [
        ReportTable(
            f"Dollars of a run of {RUN} pictures (800 / batch steps)",
            ("run", "published", "steps, predicted (range)", "rest"),
            runs,
        ),
        ReportTable("Dollars of a picture served", ("server", "card", "published", "predicted (range)"), served),
    ]
    return ReportSection("cost", "Cost at the report's prices", notes, tables=tables)


def card_section(found: dict[str, Json], cards: Sequence[str], sides: Sequence[int]) -> ReportSection:
    """The same training on the cards that have a price today."""
    prices = card_prices()
    speed: list[tuple[str, ...]] = []
    cost: list[tuple[str, ...]] = []
    for card in cards:
        rows = [found.get(f"card: {card}, {side} px") for side in sides]
        if None in rows:
            continue
        steps, ends = ([row[key] for row in rows if row is not None] for key in ("step", "range"))
        rates = [ranged(1 / step, (1 / end for end in each), ".2f") for step, each in zip(steps, ends, strict=True)]
        price = prices[card.lower()]
        speed.append((card, *rates, *(f"{4 / step:.1f}" for step in steps)))
        dollars = []
        for place, count in ((1, 10), (1, 100), (1, 1000), (2, 1000)):
            one, *both = (cost_of_image(count * each, price.per_hour) for each in (steps[place], *ends[place]))
            dollars.append(ranged(one, both, ".4f" if place == 1 else ".3f"))
        cost.append((card, *dollars, price.words))
    head = ("card", *(f"{side} px, steps/s" for side in sides), *(f"{side} px, samples/s" for side in sides))
    notes = [
        "Stable Diffusion 1.5, LoRA r8 on to_q and to_v, batch 4, all blocks checkpointed, bf16 (fp16 on a T4), "
        "latents and prompts prepared. Predicted only; prices are second-hand, with their dates."
    ]
    tables = [
        ReportTable("Predicted speed (range)", head, speed),
        ReportTable(
            "Predicted dollars (range)",
            ("card", "10 steps, 512 px", "100 steps", "1000 steps", "1000 steps, 1024 px", "price"),
            cost,
        ),
    ]
    return ReportSection("cards", "By card, today", notes, tables=tables)


def largest_section(found: dict[str, Json]) -> ReportSection:
    """The largest batch by card and size."""
    section = vertex.batch_section(found)
    section.notes.append(f"Published by {VERTEX}.")
    return section


def scratch_section(found: dict[str, Json]) -> ReportSection:
    """Days and dollars of the whole training on 8 cards, from the rows with prepared latents."""
    images = {256: 1126.4e6, 512: 1740.8e6}
    rates: dict[str, dict[int, float]] = {"published": {256: 1100.0, 512: 290.0}}
    known = {side: found.get(f"mosaic: {side} px, latents prepared, A100-40GB") for side in images}
    if None not in known.values():
        rates["predicted"] = {side: row["predicted"] for side, row in known.items() if row is not None}
        for place, name in enumerate(("slow end", "fast end")):
            rates[name] = {side: row["range"][place] for side, row in known.items() if row is not None}
    body: list[tuple[str, ...]] = []
    for name, by_side in rates.items():
        days = sum(count / by_side[side] for side, count in images.items()) / 86400
        speeds = (f"{by_side[side]:,.0f} pictures/s" for side in images)
        body.append((name, *speeds, f"{days:.1f}", f"${days * 24 * 8 * 2:,.0f}"))
    head = ("8 A100-40GB", "256 px", "512 px", "days", "cost at $2 a card and hour")
    notes = ["1,126.4 million pictures at 256 px, then 1,740.8 million at 512 px, latents prepared. Days and cost "
             "follow from the pictures a second; the source gives 81.33 days and $31,230."]  # fmt: skip
    return ReportSection(
        "scratch", "Days and cost of the whole training", notes, tables=[ReportTable("On 8 cards", head, body)]
    )
