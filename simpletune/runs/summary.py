"""What a run was: the figures of summary.json, and what is said before and after."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from simpletune.config.schema import TrainConfig, profile_folder
from simpletune.data.plan import Sample
from simpletune.models.buckets import upscaling
from simpletune.options import Json, plural, shortened
from simpletune.pipeline.encode import Prepared
from simpletune.runs.folder import read_metrics
from simpletune.system.console import duration, say
from simpletune.system.stage_timer import StageTimer, rounded

WARM_UP = 2  # steps that are left out of the median: allocators and caches fill


@dataclass(frozen=True)
class Measured:
    """What one process measured of a run.

    Args:
        device: in words.
        stages: time and memory by stage.
        seconds: of each step done by this process.
        processes: how many train together, each at this pace.
    """

    device: str
    stages: StageTimer
    seconds: list[float]
    processes: int = 1


def summarise(config: TrainConfig, folder: Path, steps: int, measured: Measured) -> Json:
    """The measured figures of a run.

    Args:
        config: of the run.
        folder: of the run; its metrics hold every step's loss, also those before a resume.
        steps: of the whole run.
        measured: by this process.
    """
    rows, stages = read_metrics(folder), measured.stages
    losses = [row["loss"] for row in rows]
    # A run that was killed after its last step has no step to do again.
    seconds = measured.seconds or [row["seconds"] for row in rows]
    tenth = max(1, len(losses) // 10)
    per_step = statistics.median(seconds[WARM_UP:] or seconds)
    batch = config.train.batch_size * config.train.gradient_accumulation * measured.processes
    return {
        "name": config.name,
        "device": measured.device,
        "steps": steps,
        "seconds_per_step": rounded(per_step),
        "samples_per_second": rounded(batch / per_step),
        "peak_allocated_gib": rounded(stages.peak("peak_allocated_gib")),
        "peak_reserved_gib": rounded(stages.peak("peak_reserved_gib")),
        "peak_rss_gib": rounded(stages.peak("peak_rss_gib")),
        "stages": stages.as_json(),
        "first_loss": statistics.fmean(losses[:tenth]),
        "final_loss": statistics.fmean(losses[-tenth:]),
    }


def print_data(prepared: Prepared) -> None:
    """Say what the run learns from."""
    plan = prepared.plan
    pictures = {sample.picture.name for sample in plan.samples}
    shapes = sorted(plan.buckets, key=lambda size: -len(plan.buckets[size]))
    listed = shortened([f"{w}x{h} ({len(plan.buckets[w, h])})" for w, h in shapes], 6)
    an_epoch = f"{plural(len(plan.samples), 'sample')} an epoch, {plural(plan.steps_per_epoch, 'step')} an epoch"
    say(f"data    {plural(len(pictures), 'picture')}, {an_epoch}")
    if plan.held_out:
        say(f"        {plural(len(plan.held_out), 'picture')} held out of training, for the validation loss")
    say(f"        captions from {prepared.captions}")
    say(f"        {plural(len(shapes), 'bucket')}: {listed}")
    small = sum(_scaled_up(sample) and sample.repeat == 0 for sample in plan.samples)
    if small:
        one, many = "picture is smaller than its bucket and is", "pictures are smaller than their bucket and are"
        say(f"        {plural(small, one, many)} scaled up")
    too_long = prepared.text.too_long(plan.captions())
    if too_long:
        many = plural(len(too_long), "caption is", "captions are")
        say(f"        {many} longer than 77 tokens: the CLIP encoders see only the beginning")


def _scaled_up(sample: Sample) -> bool:
    return upscaling(sample.picture.size, sample.bucket) > 1


def print_results(config: TrainConfig, summary: Json, folder: Path, traces: list[Path], places: dict[str, str]) -> None:
    """Say how the run went and where everything is; ``places`` are the trackers'."""
    memory = f"peak memory of the process {summary['peak_rss_gib']:.2f} GiB"
    if summary["peak_allocated_gib"] is not None:
        memory = f"peak on the GPU {summary['peak_allocated_gib']:.2f} GiB of the whole job, {memory}"
    first = summary["seconds_to_first_step"]
    begun = "" if first is None else f", the first step after {first:.1f} s"
    say(f"\ndone in {duration(summary['seconds_total'])}{begun}: {summary['seconds_per_step']:.3g} s a step, {memory}")
    if summary["eval_loss_after"] is not None and summary["eval_loss_before"] is not None:
        before, after = summary["eval_loss_before"], summary["eval_loss_after"]
        say(f"  {summary['eval_loss_is']}: {before:.4f} before, {after:.4f} after")
    rows = {
        "result": summary["output"],
        "model card": folder / "README.md",
        "pictures": "none (validation.prompts is empty)" if config.validation.prompts == [] else folder / "samples",
        "figures": f"{folder}/summary.json, metrics.jsonl, config.json",
        "checkpoints": folder / "checkpoints",
        **({"traces": f"{len(traces)} under {profile_folder(config)} (TensorBoard shows them)"} if traces else {}),
        **places,
    }
    for name, where in rows.items():
        say(f"  {name:<12} {where}")
