"""Summarise a run in summary.json, its time and price beside the predicted ones; and print its data, its stop and its
results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from simpletune.config.schema import TrainConfig, profile_folder
from simpletune.config.validation_schedule import drift_words, loss_words
from simpletune.data.concept_plan import ConceptPlan
from simpletune.data.plan import GlobalBatch, steps_in_epoch
from simpletune.data.samples import samples_by_bucket
from simpletune.data.source_mix import source_lines
from simpletune.models.shared.buckets import upscaling
from simpletune.runs.attempts import (
    Attempt,
    median_seconds,
    merged_stages,
    read_attempts,
    total_seconds,
)
from simpletune.runs.best_checkpoint import LAST, BestCheckpoint, choose_best, lowest_held_out
from simpletune.runs.checkpoint import SavedState
from simpletune.runs.checkpoint_folders import TRAINABLE, list_checkpoints, saved_file
from simpletune.runs.folder import (
    EVALUATION,
    EVALUATIONS,
    OVERFLOWS,
    SKIPPED,
    overflow_words,
    predicted_time,
    read_json_or_none,
    read_metrics,
    read_parent,
    read_rows,
    read_stacked,
)
from simpletune.runs.repair import is_start
from simpletune.stages.prepared import PreparedData
from simpletune.system.console import detail, duration, say
from simpletune.system.options import Json, join_names, plural
from simpletune.system.printable import printable_name
from simpletune.system.safetensors_file import WeightReader
from simpletune.system.shell import quote_command
from simpletune.system.stage_timer import peak_of_stages, round_figure, stages_as_json


def summarise(run: Path, config: TrainConfig, steps: int, attempts: Sequence[Attempt], samples: float) -> Json:
    """Summarise what a run's files tell of its first ``steps`` steps; time and memory cover all attempts. ``samples``
    is those of a step in all processes, averaged over an epoch."""
    rows = [row for row in read_metrics(run) if row["step"] <= steps]
    per_step = median_seconds(rows, attempts)  # None, like the pace and the losses, if the rows were lost
    pace = samples / per_step if per_step else None
    summary: Json = {"name": config.name}
    if attempts:
        summary["device"] = attempts[-1].device
    summary["steps"] = steps
    summary |= {"seconds_per_step": round_figure(per_step), "samples_per_second": round_figure(pace)}
    if waited := [row["waited"] for row in rows if "waited" in row]:
        summary["seconds_waited_per_step"] = round_figure(statistics.fmean(waited))
    tenth = max(1, len(rows) // 10)
    for name, part in (("first_loss", rows[:tenth]), ("final_loss", rows[-tenth:])):
        summary[name] = statistics.fmean(row["loss"] for row in part) if part else None
    if attempts:
        stages = merged_stages(attempts)
        for peak in ("peak_allocated_gib", "peak_reserved_gib", "peak_rss_gib"):
            summary[peak] = round_figure(peak_of_stages(stages, peak))
        summary |= {"stages": stages_as_json(stages), "attempts": len(attempts)}
        summary["seconds_total"] = total_seconds(attempts)
        summary["seconds_setup"] = round(sum(attempt.seconds_setup for attempt in attempts), 2)
    for row in read_rows(run / EVALUATIONS):
        if is_start(row):
            summary["eval_loss_start"] = row["eval_loss"]
            summary |= {"drift_start": row["drift"]} if "drift" in row else {}
        elif row["step"] == steps and "drift" in row:
            summary["drift_after"] = row["drift"]
    overflows = [row for row in read_rows(run / OVERFLOWS) if row["step"] <= steps]
    mishaps = {
        "skipped_steps": sum(row["step"] <= steps for row in read_rows(run / SKIPPED)),
        "overflow_steps": len(overflows),
        "fp32_blocks": sorted({block for row in overflows for block in row.get("blocks", [])}),
    }
    summary |= {name: value for name, value in mishaps.items() if value}
    if (parent := read_parent(run)) is not None:
        summary["parent"] = parent
    if stacked := read_stacked(run):
        summary["on_top_of"] = stacked
    if (best := choose_best(run)) is not None:
        summary["best"] = asdict(best)
    if (lowest := lowest_held_out(run)) is not None:
        summary["lowest_held_out"] = {"step": lowest["step"], "eval_loss": lowest["eval_loss"]}
    if (timed := compare_with_measured(run, summary)) is not None:
        summary["predicted_time"] = timed
    return summary


def summary_at(run: Path, config: TrainConfig, saved: SavedState) -> Json:
    """Summarise a stopped run up to a checkpoint; the configuration has the model's folder resolved."""
    step = saved.step
    buckets = samples_by_bucket(saved.manifest)
    micros = saved.micro_batches or config.train.accumulation * saved.processes
    batch = GlobalBatch(config.train.micro_batch, micros)
    per_epoch = steps_in_epoch(buckets.values(), batch)
    asked = config.steps(per_epoch)
    summary = summarise(run, config, step, read_attempts(run), buckets.total() / per_epoch)
    summary |= {"steps_asked": asked, "steps_per_epoch": per_epoch}
    if step < asked:
        summary["status"] = f"finished early at step {step} of {asked}"
    trained = WeightReader([saved_file(saved.folder, TRAINABLE)])
    before: Json = read_json_or_none(run / EVALUATION) or {}
    evaluated = {row["step"]: row["eval_loss"] for row in read_rows(run / EVALUATIONS)}
    summary |= {
        "trainable_parameters": sum(trained.get(name).numel() for name in trained.names),
        "total_parameters": config.model.architecture.parameter_count(),
        "eval_loss_before": before.get("eval_loss"),
        "eval_loss_after": evaluated.get(step),
    }
    return summary | {key: value for key, value in before.items() if key in ("eval_loss_is", "held_out_pictures")}


def compare_with_measured(folder: Path, summary: Json) -> Json | None:
    """Compare the time and price predicted when the run started (``JobTime.as_json``) with what all its attempts took:
    ``predicted``, ``measured`` and ``ratio`` of a step, each stage, all of these stages, and the price; None without a
    prediction. Omits everything but the step if the run's length was not as planned.
    """
    time = predicted_time(folder)
    if time is None or not summary.get("seconds_per_step"):
        return None
    found: Json = {name: time.get(name) for name in ("device", "speeds", "seconds_per_step_range", "bound_by")}
    found["seconds_per_step"] = _pair(time["seconds_per_step"], summary["seconds_per_step"])
    measured = {name: stage["seconds"] for name, stage in summary.get("stages", {}).items()}
    stages = {
        name: _pair(seconds, measured[name])
        for name, seconds in time["seconds_by_stage"].items()
        if seconds and measured.get(name)  # a stage whose results were cached took no time
    }
    if summary["steps"] != time["steps"] or not stages:
        return found
    whole = _pair(*(sum(pair[side] for pair in stages.values()) for side in ("predicted", "measured")))
    found |= {"stages": stages, "seconds": whole}
    price = time.get("price")
    if price is not None:
        from simpletune.system.prices import cost_of_image

        # Starting the process costs money, too.
        costs = (
            cost_of_image(seconds, price["per_hour"]) for seconds in (whole["predicted"], summary["seconds_total"])
        )
        found |= {"cost": _pair(*costs), "price": price}
    return found


def _pair(predicted: float, measured: float) -> Json:
    return {"predicted": predicted, "measured": measured, "ratio": round(predicted / measured, 3)}


def time_lines(time: Mapping[str, Json]) -> Iterator[str]:
    """Format what ``compare_with_measured`` found as at most two lines."""
    step = time["seconds_per_step"]
    text = f"time    predicted {step['predicted']:.3g} s a step, measured {step['measured']:.3g} ({step['ratio']:.2f})"
    if "seconds" in time:
        whole = time["seconds"]
        names = ", ".join(time["stages"])
        text += f"; {duration(whole['predicted'])} of {duration(whole['measured'])} for {names} ({whole['ratio']:.2f})"
    yield text
    if "cost" in time:
        cost, currency = time["cost"], time["price"].get("currency") or ""
        yield f"        predicted {cost['predicted']:.4g} {currency}, with its start {cost['measured']:.4g}".rstrip()


def print_stopped(run: Path, steps: int) -> None:
    """Print what a stopped run of so many steps has saved, and how to use it."""
    found = list_checkpoints(run)
    if not found:
        say("stopped: no checkpoint was saved")
        return
    step, folder = found[-1]
    name = f"{run}@{step}"
    say(f"stopped: step {step} of {steps} is saved: {folder}")
    say(f"         to draw with it: {quote_command('simpletune', 'generate', '--run', name)}")
    say(f"         to make it the result: {quote_command('simpletune', 'control', run, '--finish')}")


def print_data(prepared: PreparedData) -> None:
    """Print the training data."""
    plan = prepared.plan
    shapes = sorted(plan.buckets, key=lambda size: -len(plan.buckets[size]))
    listed = join_names([f"{w}x{h} ({len(plan.buckets[w, h])})" for w, h in shapes], 6)
    an_epoch = f"{plural(len(plan.samples), 'sample')} and {plural(plan.steps_per_epoch, 'step')} per epoch"
    shares = plan.shares()
    if isinstance(plan, ConceptPlan):
        say(f"data    prompts alone, {plural(len(plan.concept.directions), 'direction')}, {an_epoch}: {listed}")
        for direction in plan.concept.directions:
            detail(f"        {direction.describe()}")
        return
    place = f"{printable_name(shares[0].path)}: " if len(shares) == 1 else ""
    say(f"data    {place}{plural(plan.images(), 'picture')}, {an_epoch}")
    alike = len(shares) == 1 and not (shares[0].masks or shares[0].holes or shares[0].weight != 1)
    for line in source_lines(shares):
        (detail if alike else say)(f"        {line}")
    if plan.held_out:
        say(f"        {plural(len(plan.held_out), 'picture')} held out from training for the validation loss")
    say(f"        captions from {prepared.captions}")
    detail(f"        {plural(len(shapes), 'bucket')}: {listed}")
    if plan.fillers:
        many = plural(plan.fillers, "filler row", "filler rows")
        say(f"        {many} per epoch without weight in the loss, to complete micro-batches")
    if plan.data.streamed:
        for note in prepared.notes:
            say(f"        {note}")
        return
    first = [sample for sample in plan.samples if sample.repeat == 0]
    if small := sum(upscaling(sample.image.size, sample.bucket) > 1 for sample in first):
        one, many = "picture is smaller than its bucket and is", "pictures are smaller than their bucket and are"
        say(f"        {plural(small, one, many)} scaled up")
    if too_long := prepared.text.truncated_prompts(plan.captions()):
        many = plural(len(too_long), "caption is", "captions are")
        say(f"        {many} {prepared.text.describe_truncation()}")


def print_results(config: TrainConfig, summary: Json, folder: Path, traces: list[Path], places: dict[str, str]) -> None:
    """Print the results of a run and their locations; ``places`` are the trackers'."""
    memory = f"peak memory of the process {summary['peak_rss_gib']:.2f} GiB"
    if summary["peak_allocated_gib"] is not None:
        memory = f"peak on the GPU {summary['peak_allocated_gib']:.2f} GiB of the whole job, {memory}"
    first = summary["seconds_to_first_step"]
    last = " of the last" if summary["attempts"] > 1 else ""
    if first is not None:
        detail(f"\nfirst step{last} after {first:.1f} s")
    took = duration(summary["seconds_total"])
    took += f" in {summary['attempts']} attempts" if summary["attempts"] > 1 else ""
    pace = summary["seconds_per_step"]
    paced = "" if pace is None else f"{pace:.3g} s per step, "
    if (waited := summary.get("seconds_waited_per_step")) is not None:
        paced += f"{waited:.2g} s of it waiting for the cache, "
    say(f"\ndone in {took}: {paced}{memory}")
    if losses := loss_words(summary):
        say(f"  {summary['eval_loss_is']}: {losses}")
    if drift := drift_words(summary):
        say(f"  drift from the base: {drift}")
    if undone := overflow_words(summary):
        say(f"  fp16: {undone}")
    best = summary.get("best")
    if best is not None and best["by"] == LAST and "lowest_held_out" not in summary:  # nothing was measured
        best = None
    rows = {
        "result": summary["output"],
        **({"best": BestCheckpoint(**best).describe(folder)} if best else {}),
        "pictures": "none (validation.prompts is empty)" if config.validation.prompts == [] else folder / "samples",
        **places,
    }
    for name, where in rows.items():
        say(f"  {name:<12} {where}")
    rest = {
        "model card": folder / "README.md",
        "figures": f"{folder}/summary.json, metrics.jsonl, config.json",
        "checkpoints": folder / "checkpoints",
        **({"traces": f"{len(traces)} under {profile_folder(config)} (TensorBoard shows them)"} if traces else {}),
    }
    for name, where in rest.items():
        detail(f"  {name:<12} {where}")


def print_next(run: Path, prompt: str) -> None:
    """Print what to do with a finished run's result, as commands to paste."""
    say("next")
    say(f"  {'compare':<12} {quote_command('simpletune', 'compare', '--run', run)}")
    say(f"  {'draw':<12} {quote_command('simpletune', 'generate', '--run', run, '--prompt', prompt)}")
