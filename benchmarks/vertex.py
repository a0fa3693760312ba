"""``vertex``: compare the tables of Vertex Model Garden's Stable Diffusion 1.5 report with our predictions.

The report fine-tuned SD 1.5 by DreamBooth, in full and by LoRA on ``to_q`` and ``to_v``, on an A100 with 40 GB, with
diffusers' scripts. Counts follow from shapes and must equal the published ones. Memory is predicted by executing our
step without values; nothing here ran on a card. Speed and cost are in ``hours``.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.table import Results, command_of
from simpletune.config.load import read_config
from simpletune.config.schema import TrainConfig
from simpletune.estimate.job_estimate import estimate, needed_bytes
from simpletune.runs.report import write_report
from simpletune.runs.report.content import Fact, Report, ReportChart, ReportSection, ReportTable
from simpletune.system.gpus import Card, find_card
from simpletune.system.options import Json

CONFIG = Path("configs/sd15_lora.json")
TITLE = "Stable Diffusion 1.5: the tables of the Vertex report"
LEAD = (
    "Published: Stable Diffusion v1-5 by DreamBooth and DreamBooth with LoRA on Vertex Model Garden (A100 40 GB, batch "
    "4, rank 8, 512 px unless said). Counted: from the model's shapes. Predicted: our own training step run without "
    f"values, on no card. Command: {command_of('vertex')}."
)
MIB = 2**20
GB = 1e9

COUNTS = {4: (398_592, 859_919_556, 1.57), 8: (797_184, 860_318_148, 3.09), 16: (1_594_368, 861_115_332, 6.13),
          32: (3_188_736, 862_709_700, 12.21)}  # fmt: skip
"""Published by rank: trainable parameters, all parameters, MiB of the file."""

BASE = ("data.resolution=512", "train.batch_size=4", "adapter.targets=attention_qv", "adapter.rank=8")
PLAIN = ("memory.checkpointing=none",)
CHECKPOINTED = ("memory.checkpointing=all",)
FULL = ("adapter.method=full", "precision.weights=fp32", "precision.compute=bf16", "optimizer.name=adamw")


@dataclass(frozen=True)
class Peak:
    """A row of the memory table.

    Args:
        name: what is trained and how.
        published: peak in GB (10^9), as the report's charts label it; None if it has no such row.
        overrides: of ``CONFIG``.
        charted: whether the chart shows it beside the table.
    """

    name: str
    published: float | None
    overrides: tuple[str, ...]
    charted: bool = True


PEAKS = (
    Peak("DreamBooth (full)", 25.09, ("data.resolution=512", "train.batch_size=4", *FULL, *PLAIN)),
    Peak("DreamBooth with LoRA r8", 14.45, (*BASE, *PLAIN)),
    Peak("with LoRA r4, checkpointing", 9.98, (*BASE, *CHECKPOINTED, "adapter.rank=4")),
    Peak("with LoRA r8, checkpointing", 9.98, (*BASE, *CHECKPOINTED)),
    Peak("with LoRA r16, checkpointing", 9.99, (*BASE, *CHECKPOINTED, "adapter.rank=16")),
    Peak("LoRA r8, checkpointing, batch 1", None, (*BASE, *CHECKPOINTED, "train.batch_size=1")),
    *(Peak(f"LoRA r8, checkpointing, batch {batch}", None, (*BASE, *CHECKPOINTED, f"train.batch_size={batch}"), False)
      for batch in (2, 8, 16, 32)),
    *(Peak(f"LoRA r8, checkpointing, {side} px", None, (*BASE, *CHECKPOINTED, f"data.resolution={side}"), False)
      for side in (256, 1024, 2048)),
    Peak("LoRA r8, int8, checkpointing, batch 1", None,
         (*BASE, *CHECKPOINTED, "train.batch_size=1", "precision.weights=int8")),
    Peak("LoRA r8, int8, streamed, batch 1", None,
         (*BASE, *CHECKPOINTED, "train.batch_size=1", "precision.weights=int8", "memory.resident_blocks=0")),
)  # fmt: skip
LARGEST = {
    ("A100-40GB", 256): 128, ("A100-40GB", 512): 32, ("A100-40GB", 1024): 8, ("A100-40GB", 2048): 2,
    ("V100-16GB", 256): 32, ("V100-16GB", 512): 8, ("V100-16GB", 1024): 2, ("V100-16GB", 2048): None,
}  # fmt: skip
"""Published: the suggested largest batch by card and side in pixels."""
WHY = [
    "The report's scripts hold the text encoder and the autoencoder on the card while they train, and encode every "
    "picture in every step; here the text and latents stages come first and free their models, so the training stage "
    "holds the UNet alone.",
    "The full row predicted here keeps fp32 weights and AdamW states, 16 bytes a parameter; the LoRA rows keep bf16 "
    "weights. The report does not say what its scripts kept. Attention that stores its scores would account for part "
    "of the difference; flash attention does not.",
    "Predicted figures are what our step allocates. The allocator's fragmentation and the CUDA context, which the "
    "report's charts include, come on top: the last column has them. cuDNN's convolution workspaces are an allowance.",
]


def run(folder: Path, minutes: float, only: str) -> Path:
    """Predict the rows that are missing, then write the page; its Markdown version is beside it."""
    results = Results(folder / "vertex", {})
    results.measure({name: partial(timed, row) for name, row in rows().items()}, minutes, only)
    return write_report(page(results.rows), folder / "vertex.html")[0]


def timed(row: Callable[[], Json]) -> Json:
    """Compute a row, and how long that takes."""
    began = time.perf_counter()
    return {**row(), "seconds": round(time.perf_counter() - began, 1)}


def rows() -> dict[str, Callable[[], Json]]:
    """Name every row and what computes it."""
    found: dict[str, Callable[[], Json]] = {}
    for rank in COUNTS:
        found[f"rank {rank}"] = partial(counts, rank)
    for peak in PEAKS:
        found[f"peak: {peak.name}"] = partial(peak_row, peak)
    for card, side in LARGEST:
        found[f"largest batch: {card}, {side} px"] = partial(largest_row, card, side)
    return found


def config_of(*overrides: str) -> TrainConfig:
    """Configure a row; ``BASE`` holds unless overridden."""
    return read_config(CONFIG, [*overrides, "validation.prompts=[]", "validation.loss_samples=0"], needs_data=False)[0]


def counts(rank: int) -> Json:
    """Count a LoRA's parameters from shapes, and the bytes of the file that a run would write."""
    config = config_of(*BASE, f"adapter.rank={rank}")
    shapes = config.model.architecture.known_shapes()
    trained = config.adapter.trainable(shapes)
    total = sum(math.prod(shape) for shape in shapes.values()) + trained
    return {"trained": trained, "total": total, "tensor_bytes": 4 * trained, "file_bytes": file_bytes(config)}


def file_bytes(config: TrainConfig) -> int:
    """Return the size of the LoRA file that a run of this configuration exports."""
    import torch

    model = config.model.architecture.empty_model(config.model.files.known_config())
    config.adapter.attach(model, seed=0)
    for name, parameter in list(model.named_parameters()):
        if parameter.requires_grad:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(torch.zeros(parameter.shape)))
    with tempfile.TemporaryDirectory() as folder:
        return config.adapter.export(model, Path(folder), {}).stat().st_size


def peak_row(peak: Peak) -> Json:
    """Predict the peak of a row's training stage, and what an A100 must have for the whole job."""
    config, card = config_of(*peak.overrides), find_card("A100-40GB")
    found = estimate(config, card.capability)
    stages = {name: round(snapshot.bytes / MIB, 1) for name, snapshot in found.stages.items()}
    return {"stages_mib": stages, "train_mib": stages["train"], "job_mib": max(stages.values()),
            "needed_mib": round(found.needed_bytes() / MIB, 1), "published_gb": peak.published}  # fmt: skip


def largest_row(name: str, side: int) -> Json:
    """Find the largest batch whose predicted job fits on a card: LoRA r8 with checkpointing."""
    card = find_card(name)
    compute = "auto" if card.has_bf16 else "fp16"

    def job(batch: int) -> int:
        overrides = [*BASE, *CHECKPOINTED, f"data.resolution={side}", f"train.batch_size={batch}"]
        return estimate(config_of(*overrides, f"precision.compute={compute}"), card.capability).peak.bytes

    return {"largest": largest_batch(job, card), "published": LARGEST[name, side]}


def largest_batch(job: Callable[[int], int], card: Card) -> int:
    """Find the largest batch whose job fits on a card, with few predictions; 0 if none does.

    Args:
        job: predicts the peak in bytes for a batch; rises with it, and beyond some batch by the same for each sample.
        card: to fit on.
    """
    known: dict[int, int] = {}

    def fits(batch: int) -> bool:
        if batch not in known:
            known[batch] = job(batch)
        return needed_bytes(known[batch]) <= card.bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        rise = (known[high] - known[low]) / (high - low)
        room = (card.bytes - needed_bytes(known[low])) / 1.05
        guess = low + int(room / rise) if rise > 0 else (low + high) // 2
        middle = min(max(guess, low + 1), high - 1)
        if fits(middle):
            low = middle
            if low + 1 < high and not fits(low + 1):
                high = low + 1
        else:
            high = middle
    return low


def page(found: dict[str, Json]) -> Report:
    """Lay out the page from the rows that exist."""
    ranks = [rank for rank in COUNTS if f"rank {rank}" in found]
    facts = [Fact("trainable at rank 8", f"{found['rank 8']['trained']:,}", "published 797,184")] if 8 in ranks else []
    lean = found.get("peak: LoRA r8, checkpointing, batch 1")
    if lean is not None:
        facts.append(
            Fact("LoRA r8, 512 px, batch 1", f"{lean['train_mib']:,.0f} MiB", "predicted training stage, bf16")
        )
    sections = [counts_section(found, ranks), memory_section(found), batch_section(found), speed_section()]
    return Report(TITLE, LEAD, "", [], facts, sections, data={"losses": []})


def counts_section(found: dict[str, Json], ranks: list[int]) -> ReportSection:
    """Trainable parameters and file size by rank."""
    body = []
    for rank in ranks:
        row, (trained, total, size) = found[f"rank {rank}"], COUNTS[rank]
        tensors, file = row["tensor_bytes"], row["file_bytes"]
        body.append((
            str(rank), f"{row['trained']:,}", f"{trained:,}", f"{row['total']:,}", f"{total:,}",
            f"{tensors / MIB:.2f}", f"{file / MIB:.2f}", f"{size:.2f}",
        ))  # fmt: skip
    head = ("rank", "trainable, counted", "published", "all, counted", "published", "tensors, MiB", "our file, MiB",
            "published file, MiB")  # fmt: skip
    notes = ["LoRA on to_q and to_v of every attention (adapter.targets attention_qv): 99,648 parameters a rank. The "
             "published files hold the same fp32 tensors and a longer header."]  # fmt: skip
    return ReportSection("counts", "Trainable parameters and files", notes, tables=[ReportTable("By rank", head, body)])


def memory_section(found: dict[str, Json]) -> ReportSection:
    """Peak memory by algorithm and rank."""
    body, bars = [], []
    for peak in PEAKS:
        row = found.get(f"peak: {peak.name}")
        if row is None:
            continue
        train, job, need = (row[key] for key in ("train_mib", "job_mib", "needed_mib"))
        published = "" if peak.published is None else f"{peak.published:.2f} GB"
        body.append(
            (peak.name, published, f"{train * MIB / GB:.2f} GB", f"{train:,.0f}", f"{job:,.0f}", f"{need:,.0f}")
        )
        if peak.charted:
            bars += [{"row": peak.name, "source": "predicted here", "GB": round(train * MIB / GB, 2)}]
        bars += [] if peak.published is None else [{"row": peak.name, "source": "published", "GB": peak.published}]
    head = ("row", "published peak", "training stage, predicted", "the same, MiB", "whole job, MiB",
            "with allowances, MiB")  # fmt: skip
    names = [str(bar["row"]) for bar in bars]
    charts = [bar_chart(bars, list(dict.fromkeys(names)))] if bars else []
    return ReportSection(
        "memory",
        "Peak memory",
        WHY,
        charts=charts,
        tables=[ReportTable("A100 40 GB; batch 4 and 512 px unless said", head, body)],
    )


def bar_chart(bars: list[Json], order: list[str]) -> ReportChart:
    """Bars of published and predicted peaks."""
    spec = {
        "data": {"values": bars},
        "mark": {"type": "bar", "tooltip": True},
        "encoding": {
            "y": {"field": "row", "type": "nominal", "sort": order, "title": None, "axis": {"labelLimit": 260}},
            "yOffset": {"field": "source", "sort": ["published", "predicted here"]},
            "x": {"field": "GB", "type": "quantitative", "title": "peak, GB (10^9 bytes)"},
            "color": {"field": "source", "type": "nominal", "title": None, "legend": {"orient": "bottom"}},
        },
        "height": {"step": 14},
        "width": "container",
    }
    says = "; ".join(f"{bar['row']}, {bar['source']}: {bar['GB']} GB" for bar in bars)
    return ReportChart("peaks", "Peak memory, published and predicted", says, spec)


def batch_section(found: dict[str, Json]) -> ReportSection:
    """The largest batch by card and size."""
    body: list[tuple[str, ...]] = []
    for (card, side), published in LARGEST.items():
        row = found.get(f"largest batch: {card}, {side} px")
        if row is not None:
            body.append((f"{card}, {side} px", "-" if published is None else str(published), str(row["largest"])))
    notes = [
        "LoRA r8 with checkpointing, bf16 weights on the A100 and fp16 products on the V100. Published figures are "
        "powers of two that the report suggests; ours is the largest batch predicted to fit."
    ]
    return ReportSection(
        "batch",
        "Largest batch",
        notes,
        tables=[ReportTable("By card and size", ("job", "published", "predicted"), body)],
    )


def speed_section() -> ReportSection:
    """Point to the tables of speed and cost."""
    notes = ["hours.md beside this page has the report's iterations, costs and serving seconds beside predicted ones."]
    return ReportSection("speed", "Speed and cost", notes)
