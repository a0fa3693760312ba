"""What a run was: the figures of summary.json, and what is said before and after."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simpletune.config.schema import TrainConfig
from simpletune.data.plan import Sample
from simpletune.models.buckets import upscaling
from simpletune.options import Json, shortened
from simpletune.pipeline.encode import Prepared
from simpletune.runs.attempts import Attempt, median_seconds, merged_stages
from simpletune.runs.folder import read_metrics
from simpletune.system.console import duration, say
from simpletune.system.stage_timer import largest_peak, rounded, stages_as_json


@dataclass(frozen=True)
class Measured:
    """What was measured of a run.

    Args:
        device: in words.
        attempts: time and memory by stage, of each attempt.
        samples: of a step, in all processes; the mean over an epoch.
    """

    device: str
    attempts: Sequence[Attempt]
    samples: float


def summarise(config: TrainConfig, folder: Path, steps: int, measured: Measured) -> Json:
    """The measured figures of a run.

    Args:
        config: of the run.
        folder: of the run; its metrics hold every step's loss and time, also those before a resume.
        steps: of the whole run.
        measured: over all of its attempts.
    """
    rows, stages = read_metrics(folder), merged_stages(measured.attempts)
    losses = [row["loss"] for row in rows]
    tenth = max(1, len(losses) // 10)
    per_step = median_seconds(rows, measured.attempts)  # None: the rows were lost
    return {
        "name": config.name,
        "device": measured.device,
        "steps": steps,
        "seconds_per_step": rounded(per_step),
        "samples_per_second": rounded(measured.samples / per_step if per_step else None),
        "peak_allocated_gib": rounded(largest_peak(stages, "peak_allocated_gib")),
        "peak_reserved_gib": rounded(largest_peak(stages, "peak_reserved_gib")),
        "peak_rss_gib": rounded(largest_peak(stages, "peak_rss_gib")),
        "stages": stages_as_json(stages),
        "first_loss": statistics.fmean(losses[:tenth]) if losses else None,
        "final_loss": statistics.fmean(losses[-tenth:]) if losses else None,
    }


def print_data(prepared: Prepared) -> None:
    """Say what the run learns from."""
    plan = prepared.plan
    pictures = {sample.picture.name for sample in plan.samples}
    shapes = sorted(plan.buckets, key=lambda size: -len(plan.buckets[size]))
    listed = shortened([f"{w}x{h} ({len(plan.buckets[w, h])})" for w, h in shapes], 6)
    say(
        f"data    {len(pictures)} pictures, {len(plan.samples)} samples an epoch, {plan.steps_per_epoch} steps an epoch"
    )
    say(f"        captions from {prepared.captions}")
    say(f"        {len(shapes)} bucket{'s' if len(shapes) != 1 else ''}: {listed}")
    if plan.fillers:
        say(f"        {plan.fillers} rows an epoch are fillers: they complete micro-batches, and count nothing")
    small = sum(_scaled_up(sample) and sample.repeat == 0 for sample in plan.samples)
    if small:
        say(f"        {small} pictures are smaller than their bucket and are scaled up")
    too_long = prepared.text.too_long(plan.captions())
    if too_long:
        say(f"        {len(too_long)} captions are longer than 77 tokens: the CLIP encoders see only their beginning")


def _scaled_up(sample: Sample) -> bool:
    return upscaling(sample.picture.size, sample.bucket) > 1


def print_results(summary: Json, folder: Path, profiles: Path, traces: list[Path], places: dict[str, str]) -> None:
    """Say how the run went and where everything is; ``places`` are the trackers'."""
    memory = f"peak memory of the process {summary['peak_rss_gib']:.2f} GiB"
    if summary["peak_allocated_gib"] is not None:
        memory = f"peak on the GPU {summary['peak_allocated_gib']:.2f} GiB of the whole job, {memory}"
    first = summary["seconds_to_first_step"]
    last = " of the last" if summary["attempts"] > 1 else ""
    begun = "" if first is None else f", the first step{last} after {first:.1f} s"
    took = duration(summary["seconds_total"])
    took += f" in {summary['attempts']} attempts" if summary["attempts"] > 1 else ""
    pace = summary["seconds_per_step"]
    paced = "" if pace is None else f"{pace:.3g} s a step, "
    say(f"\ndone in {took}{begun}: {paced}{memory}")
    if summary["eval_loss_after"] is not None and summary["eval_loss_before"] is not None:
        say(f"  evaluation loss {summary['eval_loss_before']:.4f} before, {summary['eval_loss_after']:.4f} after")
    rows = {
        "result": summary["output"],
        "model card": folder / "README.md",
        "pictures": folder / "samples",
        "figures": f"{folder}/summary.json, metrics.jsonl, config.json",
        "checkpoints": folder / "checkpoints",
        **({"traces": f"{len(traces)} under {profiles} (TensorBoard shows them)"} if traces else {}),
        **places,
    }
    for name, where in rows.items():
        say(f"  {name:<12} {where}")
