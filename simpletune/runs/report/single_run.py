"""The report of one run."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path

from simpletune.runs.folder import overflow_words
from simpletune.runs.report import charts, pictures
from simpletune.runs.report.best_checkpoint import choice_sections
from simpletune.runs.report.checkpoints import checkpoint_sections
from simpletune.runs.report.content import Fact, Report, ReportSection, ReportTable, format_gib, seconds
from simpletune.runs.report.fidelity import fidelity_sections
from simpletune.runs.report.losses import loss_data, loss_section
from simpletune.runs.report.outcome import attempts_section, resumes
from simpletune.runs.report.peaks import memory_section
from simpletune.runs.report.profile import profile_sections
from simpletune.runs.report.run_data import Json, RunData
from simpletune.runs.report.settings import Setting, plain_settings, settings_of
from simpletune.runs.report.sources import source_sections, text_sections
from simpletune.runs.report.time_and_price import time_sections
from simpletune.system.console import duration
from simpletune.system.options import plural

STEPS_SHOWN = 12  # maximum of steps whose pictures are on the page


def single_run_report(run: RunData, price: float | None) -> Report:
    """Build the report of one run.

    Args:
        run: the run, read from its folder.
        price: the machine's price in dollars per hour, if known.
    """
    settings = settings_of(run.config) if run.config else plain_settings(run.settings)
    settings = [row for row in settings if row.path != "about"]  # shown under the title
    found = list(pictures.validation_pictures(run.folder, run.notes))
    warned, attempts = warnings_section(run), attempts_section(run)
    sections = [
        *([warned] if run.summary.get("warnings") else []),  # first, if there are any
        picture_section(run, found),
        *checkpoint_sections(run.folder, run.config, sorted({picture.step for picture in found} - {0})),
        loss_section([run]),
        *choice_sections(run),
        *source_sections(run),
        *text_sections(run),
        *fidelity_sections([run]),
        step_section(run),
        memory_section(run),
        *time_sections(run),
        *([attempts] if attempts else []),
        *profile_sections(run.profiles),
        settings_section(settings, known=run.config is not None),
        environment_section(run),
        *([] if run.summary.get("warnings") else [warned]),
        files_section(run),
    ]
    data = {"losses": [loss_data(run)], "pictures": picture_data(found), "settings": settings}
    return Report(
        run.name,
        summary_sentence(run),
        str(run.settings.get("about", "")),
        run.notes,
        headline(run),
        sections,
        price,
        priced_parts(run),
        data,
    )


def summary_sentence(run: RunData) -> str:
    """Describe the run in a sentence."""
    config = run.config
    if config is None:
        return plural(run.steps_done, "step")
    base = config.model.weights_from
    base = base if not os.path.isabs(base) else os.path.basename(base)
    rank = getattr(config.adapter, "rank", None)
    method = config.adapter.method if rank is None else f"{config.adapter.title} r{rank}"
    return (
        f"{method} on {base}, {config.precision.weights} weights, "
        f"{config.data.resolution} px, batch {config.train.micro_batch}"
        + (f" × {config.train.accumulation}" if config.train.accumulation > 1 else "")
        + f", {config.optimizer.name}, {plural(run.steps_done, 'step')}"
    )


def headline(run: RunData) -> list[Fact]:
    """Return the key figures."""
    unknown = "not known"
    peak = f"{run.peak_words}, in stage {run.peak_stage}" if run.peak else "not recorded"
    pace = "median, without warm-up, validation and saving"
    rate = f"{run.samples_per_second:.3g}" if run.samples_per_second else unknown
    facts = [
        Fact("Peak of the whole job", format_gib(run.peak) or unknown, peak),
        Fact("Seconds per step", seconds(run.seconds_per_step) or unknown, pace),
        Fact("Samples per second", rate, "training pictures per second at this pace"),
    ]
    if run.share is not None:
        trained, total = run.summary["trainable_parameters"], run.summary["total_parameters"]
        facts.append(Fact("Trained share", f"{100 * run.share:.3g}%", f"{trained:,} of {total:,} parameters"))
    facts += _losses(run)
    if undone := overflow_words(run.summary):
        facts.append(Fact("fp16", undone, "gradients or activations exceeded fp16"))
    if run.seconds_total is not None:
        setup = run.seconds_setup
        parts = [f"{duration(setup)} before the first step" if setup is not None else "", resumes(run)]
        name = "Whole job" if run.summary else "Time so far"
        facts.append(Fact(name, duration(run.seconds_total), "; ".join(part for part in parts if part)))
    return facts


def _losses(run: RunData) -> Iterator[Fact]:
    if len(run.evaluations) > 1:
        (_, before), (step, after) = run.evaluations[0], run.evaluations[-1]
        change = f" {after / before - 1:+.1%}," if before else ""
        note = f"{before:.4f} before,{change} at step {step:,}"
        yield Fact(run.loss_is[0].upper() + run.loss_is[1:], f"{after:.4f}", note)
    elif run.metrics:
        tenth = run.metrics[-max(1, len(run.metrics) // 10) :]
        mean = sum(row["loss"] for row in tenth) / len(tenth)
        last = "of the last step" if len(tenth) == 1 else f"mean of the last {len(tenth):,} steps"
        yield Fact("Loss", f"{mean:.4f}", last)


def priced_parts(run: RunData) -> list[tuple[str, float]]:
    """List what costs money: (item, seconds)."""
    found = []
    if run.seconds_per_step:
        found += [("the steps", run.seconds_per_step * run.steps_done), ("1,000 steps", run.seconds_per_step * 1000)]
    if run.seconds_total is not None:
        found.append(("the whole job" if run.summary else "the time so far", run.seconds_total))
    return found


def step_section(run: RunData) -> ReportSection:
    """Chart learning rate, gradient norm and seconds per step."""
    section = ReportSection("steps", "Over the steps")
    wanted = {
        "lr": ("Learning rate", "learning rate", ".3~e"),
        "grad_norm": ("Gradient norm", "gradient norm", ".4~g"),
        "seconds": ("Seconds per step", "s", ".3~g"),
    }
    thin = thin_rows(run.metrics, 800)
    for field, (title, axis, form) in wanted.items():
        rows = [row for row in thin if isinstance(row.get(field), int | float)]
        if rows:
            section.charts.append(charts.line(field.replace("_", "-"), title, field, axis, rows, form))
    ranges = [
        (title, *(f"{value:.3g}" for value in (values[0], statistics.median(values), max(values), values[-1])))
        for field, (title, *_) in wanted.items()
        if (values := [row[field] for row in run.metrics if isinstance(row.get(field), int | float)])
    ]
    if ranges:
        section.tables.append(
            ReportTable("Range of values", ("value", "first", "median", "largest", "last"), ranges, folded=True)
        )
    if not section.charts:
        section.notes.append("No step was recorded.")
    elif len(thin) < len(run.metrics):
        section.notes.append(f"Every {-(-len(run.metrics) // 800)}th step is drawn.")
    return section


def thin_rows(rows: list[Json], room: int) -> list[Json]:
    """Take every n-th row, so that at most ``room`` are left."""
    return rows[:: max(1, -(-len(rows) // room))]


def picture_data(found: list[pictures.ValidationPicture]) -> list[Json]:
    """Return pictures by prompt as data URIs: the base's, and those of at most ``STEPS_SHOWN`` steps."""
    steps = sorted({picture.step for picture in found})
    shown = {0, *pictures.spread_steps([step for step in steps if step], STEPS_SHOWN)} & set(steps)
    kept = [picture for picture in found if picture.step in shown]
    side = pictures.side_for(len(kept))
    prompts: dict[str, Json] = {}
    for picture in kept:
        row = prompts.setdefault(picture.file.name, {"prompt": picture.prompt, "seed": picture.seed, "steps": {}})
        row["steps"][picture.step] = pictures.data_uri(picture.file, side)
    return [row for row in prompts.values() if any(row["steps"])]


def picture_section(run: RunData, found: list[pictures.ValidationPicture]) -> ReportSection:
    """Compare the base with the tuned model over the steps."""
    section = ReportSection("pictures", "Base and tuned model", block="pictures")
    if not found:
        section.block = ""
        section.notes.append("This run drew no validation pictures (validation.prompts).")
        return section
    if not any(picture.step for picture in found):
        section.block = ""
        section.notes.append("Only the base has been drawn so far.")
        return section
    steps = sorted({picture.step for picture in found})
    shown = pictures.spread_steps([step for step in steps if step], STEPS_SHOWN)
    choose = " Choose the step with the slider." if len(shown) > 1 else ""
    section.notes.append(f"Both are drawn from the same noise. Drag the line to compare.{choose}")
    if len(shown) < len([step for step in steps if step]):
        section.notes.append(f"{len(shown)} of {len(steps) - 1} steps are shown; all are in samples/.")
    side = pictures.side_for(len([p for p in found if p.step in {0, *shown}]))
    if any(max(_size(picture.file)) > side for picture in found[:1]):
        section.notes.append(f"Scaled down to {side} px and compressed; the originals are in samples/.")
    if (run.folder / "samples" / "grid.png").exists():
        section.lines.append("![Base and tuned model, one row per prompt, one column per step](samples/grid.png)")
    return section


def _size(file: Path) -> tuple[int, int]:
    with pictures.Image.open(file) as image:
        return image.size


def settings_section(settings: list[Setting], known: bool) -> ReportSection:
    """Show the whole configuration."""
    section = ReportSection("settings", "Configuration", block="settings")
    changed = [row for row in settings if row.changed]
    if known:
        section.notes.append(f"{len(changed)} of {len(settings)} values differ from the defaults.")
        rows = [(row.path, row.value, row.default or "(none, required)") for row in changed]
        section.tables.append(ReportTable("Changed settings", ("setting", "value", "default"), rows, folded=True))
    elif settings:
        section.notes.append("Another version of the tool wrote this configuration, so the defaults are not known.")
        section.tables.append(
            ReportTable("Settings", ("setting", "value"), [(r.path, r.value) for r in settings], folded=True)
        )
    else:
        section.block = ""
        section.notes.append("No configuration was found.")
    return section


def environment_section(run: RunData) -> ReportSection:
    """List machine and versions."""
    section = ReportSection("environment", "Environment")
    rows = [("run on", str(run.summary["device"]))] if run.summary.get("device") else []
    for name, value in run.environment.items():
        if name == "versions":
            rows += [(word.rpartition(" ")[0], word.rpartition(" ")[2]) for word in str(value).split(", ")]
        else:
            rows.append((name, str(value)))
    if rows:
        section.tables.append(ReportTable("Machine and versions", ("item", "value"), rows))
    else:
        section.notes.append("Machine and versions were not recorded.")
    return section


def warnings_section(run: RunData) -> ReportSection:
    """List the run's warnings."""
    section = ReportSection("warnings", "Warnings")
    warnings = [str(text) for text in run.summary.get("warnings", [])]
    section.notes += warnings or (["None."] if run.summary else ["Warnings are recorded when a run finishes."])
    return section


def files_section(run: RunData) -> ReportSection:
    """List the run's files with their sizes."""
    section = ReportSection("files", "Files")
    rows = []
    for path in sorted(run.folder.iterdir(), key=lambda path: (path.is_file(), path.name)):
        if path.name.startswith(".") or path.name.startswith("report."):
            continue
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        rows.append((path.name + ("" if path.is_file() else "/"), str(len(files)), _size_words(size)))
    section.tables.append(ReportTable("In the run's folder", ("name", "files", "size"), rows))
    return section


def _size_words(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
