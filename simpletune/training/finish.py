"""Finish a run after its last step: result, validation, summary, model card and report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from simpletune.engine.optim.ema import use_average
from simpletune.engine.profiling.traces import EpochTraces
from simpletune.runs import checkpoint
from simpletune.runs.attempts import setup_seconds, total_seconds
from simpletune.runs.best_checkpoint import choose_best
from simpletune.runs.estimate_record import beside_measured, lines
from simpletune.runs.folder import SUMMARY, read_first_validation
from simpletune.runs.model_card import shareable, write_card
from simpletune.runs.result import CHECKSUMS, export_result, result_checksums
from simpletune.runs.summary import RunMeasurements, drift_at, left_out, print_results, summarise
from simpletune.system.atomic import write_json
from simpletune.system.console import say
from simpletune.system.printable import describe_exception
from simpletune.training.run import DRAWING, EVALUATING, Run
from simpletune.training.run_profiler import add_memory


def finish(run: Run, traces: EpochTraces) -> None:
    """Export the result before the last validation, so that a failure there cannot lose it."""
    with run.stages.stage("save"), use_average(run.average):
        metadata = checkpoint.metadata_of(shareable(run.config), run.steps)
        output = export_result(run.config, run.denoiser, run.folder, metadata)
    eval_after = run.optional(EVALUATING, run.evaluate, run.steps)
    run.optional(DRAWING, run.validate, run.steps)
    run.attempt.update(ended="finished")
    attempts = run.attempt.all
    measured = RunMeasurements(run.device, attempts, run.prepared.plan.samples_per_step)
    summary = summarise(run.config, run.folder, run.steps, measured)
    summary |= {
        "attempts": len(attempts),
        "seconds_total": total_seconds(attempts),
        "seconds_setup": setup_seconds(attempts),
        "seconds_to_first_step": None if run.to_first_step is None else round(run.to_first_step, 2),
        "attention": run.attention,
        "trainable_parameters": sum(parameter.numel() for parameter in run.core.named.values()),
        "total_parameters": run.total,
        "steps_per_epoch": run.prepared.plan.steps_per_epoch,
        "eval_loss_before": read_first_validation(run.folder),
        "eval_loss_after": eval_after,
        **run.evaluated_on,
        "output": str(output),
        CHECKSUMS: result_checksums(run.config, run.folder),
    }
    summary |= left_out(run.folder, run.steps) | drift_at(run.folder, run.steps)
    if run.early is not None:
        asked = run.config.steps(run.prepared.plan.steps_per_epoch)
        summary |= {"stopped_early": True, "status": run.early, "steps_asked": asked}
    if (best := choose_best(run.folder)) is not None:
        summary["best"] = best.as_json()
    if run.predicted is not None:
        from simpletune.estimate.run_estimate import compare_with_measured

        summary["predicted"] = compare_with_measured(run.predicted, run.stages.as_json())
    if (timed := beside_measured(run.folder, summary)) is not None:
        summary["predicted_time"] = timed
    warnings = run.trackers.warnings
    # Written again below: a tracker may take minutes to close.
    write_json(run.folder / SUMMARY, summary | {"warnings": warnings, "complete": False})
    run.optional("the model card", write_card, run.folder, run.config, summary, run.prepared.plan.manifest())
    add_memory(run, traces)
    page, reported = write_page(run), len(warnings)
    places = {**page, **run.trackers.finish(summary)}
    write_json(run.folder / SUMMARY, summary | {"warnings": warnings, "complete": True})
    run.attempt.close()
    if page and len(warnings) > reported:
        write_page(run)
    print_results(run.config, summary, run.folder, traces.written, places)
    if run.predicted is not None:
        from simpletune.estimate.run_estimate import print_comparison

        print_comparison(summary["predicted"])
    for line in lines(timed) if timed is not None else ():
        say(line)


def write_page(run: Run) -> dict[str, str]:
    """Write the report into the run's folder; a failure is only a warning."""
    page = report_or_warning(run.folder, run.trackers.warn) if run.config.output.report else None
    if page is None:
        return {}
    run.trackers.report(page)
    return {"report": str(page)}


def report_or_warning(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """Write the report of a finished run; on failure, warn and return None."""
    try:
        from simpletune.runs.report import report_at_end

        return report_at_end(folder)
    except Exception as error:  # a report must not fail the run
        warn(f"the report failed ({describe_exception(error)})")
        return None
