"""What a run was: the figures of summary.json, and what is said before and after."""

from __future__ import annotations

import math
import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path

from simpletune.config.schema import TrainConfig
from simpletune.data.plan import Sample
from simpletune.models.buckets import upscaling
from simpletune.options import Json, shortened
from simpletune.pipeline.encode import Prepared
from simpletune.runs.checkpoint import SavedState
from simpletune.runs.checkpoint_folders import TRAINABLE, list_checkpoints
from simpletune.runs.folder import EVALUATION, EVALUATIONS, SKIPPED, read_json_or_none, read_metrics, read_rows
from simpletune.system.console import duration, say
from simpletune.system.safetensors_file import WeightReader
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
    # A run that was killed after its last step has no step to do again.
    seconds = measured.seconds or [row["seconds"] for row in rows]
    return {
        "name": config.name,
        "device": measured.device,
        "steps": steps,
        **_paced(seconds, config, measured.processes),
        "peak_allocated_gib": rounded(stages.peak("peak_allocated_gib")),
        "peak_reserved_gib": rounded(stages.peak("peak_reserved_gib")),
        "peak_rss_gib": rounded(stages.peak("peak_rss_gib")),
        "stages": stages.as_json(),
        **_first_and_final([row["loss"] for row in rows]),
    }


def summary_at(run: Path, config: TrainConfig, saved: SavedState) -> Json:
    """What is known of a stopped run up to a checkpoint: times by stage and peaks were its process's, and are not.

    Args:
        run: its folder.
        config: of the run; the model's folder is resolved.
        saved: the checkpoint.
    """
    step = saved.step
    per_epoch = math.ceil(len(saved.manifest) / _batch(config, saved.processes))
    asked = config.steps(per_epoch)
    summary: Json = {"name": config.name, "steps": step, "steps_asked": asked, "steps_per_epoch": per_epoch}
    if step < asked:
        summary["status"] = f"finished early at step {step} of {asked}"
    rows = [row for row in read_metrics(run) if row["step"] <= step]
    if rows:
        summary |= _paced([row["seconds"] for row in rows], config, saved.processes)
        summary |= _first_and_final([row["loss"] for row in rows])
    trained = WeightReader([saved.folder / TRAINABLE])
    evaluated = {row["step"]: row["eval_loss"] for row in read_rows(run / EVALUATIONS)}
    summary |= {
        "trainable_parameters": sum(trained.get(name).numel() for name in trained.names),
        "total_parameters": config.model.parameter_count(),
        "eval_loss_before": (read_json_or_none(run / EVALUATION) or {}).get("eval_loss"),
        "eval_loss_after": evaluated.get(step),
    }
    if skipped := sum(row["step"] <= step for row in read_rows(run / SKIPPED)):
        summary["skipped_steps"] = skipped
    return summary


def _batch(config: TrainConfig, processes: int) -> int:
    """Samples of a step."""
    return config.train.batch_size * config.train.gradient_accumulation * processes


def _paced(seconds: list[float], config: TrainConfig, processes: int) -> Json:
    """The pace of a run, from the seconds of its steps."""
    per_step = statistics.median(seconds[WARM_UP:] or seconds)
    pace = _batch(config, processes) / per_step
    return {"seconds_per_step": rounded(per_step), "samples_per_second": rounded(pace)}


def _first_and_final(losses: list[float]) -> Json:
    """Means over the first and the last tenth of the steps."""
    tenth = max(1, len(losses) // 10)
    return {"first_loss": statistics.fmean(losses[:tenth]), "final_loss": statistics.fmean(losses[-tenth:])}


def print_stopped(run: Path, steps: int) -> None:
    """Say what a run that was asked to stop has kept, and what can be done with it.

    Args:
        run: its folder.
        steps: of the whole run.
    """
    found = list_checkpoints(run)
    if not found:
        say("stopped: before the first step")
        return
    step, folder = found[-1]
    name = f"{run}@{step}"
    say(f"stopped: step {step} of {steps} is saved: {folder}")
    say(f"         to draw with it: {shlex.join(['simpletune', 'generate', '--run', name])}")
    say(f"         to make it the result: {shlex.join(['simpletune', 'finish', str(run)])}")


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
    begun = "" if first is None else f", the first step after {first:.1f} s"
    say(f"\ndone in {duration(summary['seconds_total'])}{begun}: {summary['seconds_per_step']:.3g} s a step, {memory}")
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
