"""Finish a run after its last step: result, validation, summary, model card and report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from simpletune.engine.optim.ema import use_average
from simpletune.engine.profiling.traces import EpochTraces
from simpletune.runs import checkpoint
from simpletune.runs.figure_sums import FIGURES, figure_sums
from simpletune.runs.folder import EVALUATION, SUMMARY
from simpletune.runs.model_card import write_card
from simpletune.runs.repair import NUMBER, read_own
from simpletune.runs.result import CHECKSUMS, export_result, result_checksums
from simpletune.runs.summary import print_next, print_results, summarise, time_lines
from simpletune.system.atomic import write_json
from simpletune.system.console import say, working
from simpletune.system.devices import capability_of
from simpletune.system.printable import describe_exception
from simpletune.training.trainer import Trainer


def finish(trainer: Trainer, traces: EpochTraces) -> None:
    """Export the result before the last validation, so that a failure there cannot lose it."""
    job, config, folder, steps = trainer.job, trainer.config, trainer.folder, trainer.steps
    core, plan, trackers, validator = trainer.core, trainer.plan, trainer.trackers, trainer.validator
    with trainer.stages.stage("save"), use_average(core.average), working("saving the result"):
        metadata = checkpoint.metadata_of(folder, config, steps)
        output = export_result(config, core.denoiser, folder, metadata)
    eval_after = validator.try_to_evaluate(steps)
    validator.try_to_generate(steps)
    trainer.attempt.update(ended="finished")
    attempts = trainer.attempt.all
    summary = summarise(folder, config, steps, attempts, plan.samples_per_step)
    to_first_step = trainer.metrics.to_first_step
    before = read_own(folder / EVALUATION, {"eval_loss": (*NUMBER, type(None))}) or {}
    summary |= {
        "seconds_to_first_step": None if to_first_step is None else round(to_first_step, 2),
        "attention": job.attention,
        "trainable_parameters": sum(parameter.numel() for parameter in core.named.values()),
        "total_parameters": core.config.model.architecture.parameter_count(),
        "steps_per_epoch": plan.steps_per_epoch,
        "eval_loss_before": before.get("eval_loss"),
        "eval_loss_after": eval_after,
        **validator.evaluated_on,
        "output": str(output),
        CHECKSUMS: result_checksums(config, folder),
        FIGURES: figure_sums(folder),
    }
    if trainer.early is not None:
        asked = config.steps(plan.steps_per_epoch)
        summary |= {"stopped_early": True, "status": trainer.early, "steps_asked": asked}
    if job.predicted is not None:
        from simpletune.estimate.run_estimate import compare_with_measured

        summary["predicted"] = compare_with_measured(job.predicted, trainer.stages.as_json())
    warnings = trackers.warnings
    # Written again below: a tracker may take minutes to close.
    write_json(folder / SUMMARY, summary | {"warnings": warnings, "complete": False})
    trainer.tasks.run("the model card", write_card, folder, config, summary, plan.manifest())
    from simpletune.estimate.simulate.simulate import snapshots_of_step

    traces.add_memory(lambda: snapshots_of_step(core.config, plan.largest(), capability_of(core.device)))
    page, reported = write_page(trainer), len(warnings)
    places = {**page, **trackers.finish(summary)}
    write_json(folder / SUMMARY, summary | {"warnings": warnings, "complete": True})
    trainer.attempt.close()
    if page and len(warnings) > reported:
        write_page(trainer)
    print_results(config, summary, folder, traces.written, places)
    if job.predicted is not None:
        from simpletune.estimate.run_estimate import print_comparison

        print_comparison(summary["predicted"])
    if timed := summary.get("predicted_time"):
        for line in time_lines(timed):
            say(line)
    requests = validator.previews.requests
    print_next(folder, requests[0].prompt if requests else plan.prompt(plan.samples[0], 0))


def write_page(trainer: Trainer) -> dict[str, str]:
    """Write the report into the run's folder; a failure is only a warning."""
    trackers = trainer.trackers
    page = None
    if trainer.config.output.report:
        with working("writing the report"):
            page = report_or_warning(trainer.folder, trackers.warn)
    if page is None:
        return {}
    trackers.report(page)
    return {"report": str(page)}


def report_or_warning(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """Write the report of a finished run; on failure, warn and return None."""
    try:
        from simpletune.runs.report import report_at_end

        return report_at_end(folder)
    except Exception as error:  # a report must not fail the run
        warn(f"the report failed ({describe_exception(error)})")
        return None
