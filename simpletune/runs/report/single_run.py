"""The report of one run."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator

from PIL import Image

from simpletune.adapters.files.describe import describe
from simpletune.adapters.methods.adapter import OUTPUT as LORA_FILE
from simpletune.adapters.methods.targets import TargetedMethod
from simpletune.adapters.text.embedding_files import embeddings_in
from simpletune.data.source_mix import SOURCE_COLUMNS, SourceShare, source_rows
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.folder import DATA, SAMPLES, STRENGTHS, overflow_words, pictures_at
from simpletune.runs.model_card import parent_words
from simpletune.runs.report import charts, image_rows
from simpletune.runs.report.content import Fact, Report, ReportSection, ReportTable, format_gib, seconds
from simpletune.runs.report.evaluations import choice_sections, fidelity_sections
from simpletune.runs.report.losses import loss_data, loss_section
from simpletune.runs.report.run_data import Json, RunData, read_object, resumes, without_folders
from simpletune.runs.report.settings import Setting, settings_of, without_parents
from simpletune.runs.report.time_and_memory import memory_section, profile_sections, time_sections
from simpletune.system.console import duration
from simpletune.system.options import UserError, join_names, plural
from simpletune.system.sheets import spread_steps
from simpletune.system.stage_timer import peak_of_stages

IMAGE_STEPS = 12  # maximum of steps whose pictures are on the page
POINTS = 800  # maximum of points of a line


def single_run_report(run: RunData, price: float | None) -> Report:
    """Build the report of one run; the price is in dollars per hour."""
    settings = [row for row in settings_of(run.config, run.settings) if row.path != "about"]  # shown under the title
    found = list(image_rows.validation_images(run.folder, run.notes))
    shown, shown_images = image_section(run, found)
    strengths, strips = strength_section(run, found)
    warnings = [str(text) for text in run.summary.get("warnings", [])]
    none = "None." if run.summary else "Warnings are recorded when a run finishes."
    warned = ReportSection("warnings", "Warnings", notes=warnings or [none])
    sections = [
        *([warned] if warnings else []),  # first, if there are any
        shown,
        *strengths,
        *checkpoint_sections(run, sorted({each.step for each in found} - {0})),
        loss_section([run]),
        *choice_sections(run),
        *source_sections(run),
        *text_sections(run),
        *fidelity_sections([run]),
        step_section(run),
        memory_section(run),
        *time_sections(run),
        *attempts_sections(run),
        *profile_sections(run.profiles),
        settings_section(settings, known=run.config is not None),
        environment_section(run),
        *([] if warnings else [warned]),
        files_section(run),
    ]
    priced = []
    if run.seconds_per_step:
        priced += [("the steps", run.seconds_per_step * run.steps_done), ("1,000 steps", run.seconds_per_step * 1000)]
    if run.seconds_total is not None:
        priced.append(("the whole job" if run.summary else "the time so far", run.seconds_total))
    data = {"losses": [loss_data(run)], "pictures": shown_images, "strengths": strips, "settings": settings}
    about = str(run.settings.get("about", ""))
    return Report(run.name, summary_sentence(run), about, run.notes, headline(run), sections, price, priced, data)


def summary_sentence(run: RunData) -> str:
    """Describe the run in a sentence."""
    config = run.config
    if config is None:
        return plural(run.steps_of_result, "step")
    base = config.model.files.weights_from
    base = base if not os.path.isabs(base) else os.path.basename(base)
    rank = getattr(config.adapter, "rank", None)
    method = config.adapter.method if rank is None else f"{config.adapter.title} r{rank}"
    if (conv_rank := getattr(config.adapter, "conv_rank", None)) is not None:
        method += f" (convolutions r{conv_rank})"
    varied = isinstance(config.adapter, TargetedMethod) and config.adapter.layers
    method += " (other settings in some layers)" if varied else ""
    return (
        f"{method} on {base}, {config.precision.weights} weights, "
        f"{config.resolution} px, batch {config.train.micro_batch}"
        + (f" × {config.train.accumulation}" if config.train.accumulation > 1 else "")
        + f", {config.optimizer.name}, {plural(run.steps_of_result, 'step')}"
    )


def headline(run: RunData) -> list[Fact]:
    """Return the key figures."""
    unknown, peak = "not known", "not recorded"
    if run.peak:
        by_stage = {name: figures.get(run.peak_key) or 0.0 for name, figures in run.stages.items()}
        peak = f"{run.peak_words}, in stage {max(by_stage, key=lambda name: by_stage[name], default='')}"
    pace = "median, without warm-up, validation and saving"
    rate = f"{run.samples_per_second:.3g}" if run.samples_per_second else unknown
    of_what = "training pictures" if run.config is None or run.config.concept is None else "drawings"
    facts = [
        Fact("Peak of the whole job", format_gib(run.peak) or unknown, peak),
        Fact("Seconds per step", seconds(run.seconds_per_step) or unknown, pace),
        Fact("Samples per second", rate, f"{of_what} per second at this pace"),
    ]
    if run.share is not None:
        trained, total = run.summary["trainable_parameters"], run.summary["total_parameters"]
        facts.append(Fact("Trained share", f"{100 * run.share:.3g}%", f"{trained:,} of {total:,} parameters"))
    if (parent := run.summary.get("parent")) is not None:
        facts.append(Fact("Started from", parent["name"], parent_words(parent)))
    facts += [Fact("On top of", lora["name"], parent_words(lora)) for lora in run.summary.get("on_top_of", [])]
    if len(run.evaluations) > 1:
        (_, before), (step, after) = run.evaluations[0], run.evaluations[-1]
        change = f" {after / before - 1:+.1%}," if before else ""
        note = f"{before:.4f} before,{change} at step {step:,}"
        facts.append(Fact(run.loss_is[0].upper() + run.loss_is[1:], f"{after:.4f}", note))
    elif seen := [row for row in run.metrics if row["step"] <= run.steps_of_result]:
        tenth = seen[-max(1, len(seen) // 10) :]
        mean = sum(row["loss"] for row in tenth) / len(tenth)
        last = "of the last step" if len(tenth) == 1 else f"mean of the last {len(tenth):,} steps"
        facts.append(Fact("Loss", f"{mean:.4f}", last))
    if undone := overflow_words(run.summary):
        facts.append(Fact("fp16", undone, "gradients or activations exceeded fp16"))
    if run.seconds_total is not None:
        so_far = sum(attempt.seconds_setup for attempt in run.attempts)  # before the first step of each process
        setup = run.summary.get("seconds_setup") if "seconds_total" in run.summary else so_far
        parts = [f"{duration(setup)} before the first step" if setup is not None else "", resumes(run)]
        name = "Whole job" if run.summary else "Time so far"
        facts.append(Fact(name, duration(run.seconds_total), "; ".join(part for part in parts if part)))
    return facts


def step_section(run: RunData) -> ReportSection:
    """Chart learning rate, gradient norm and seconds per step."""
    section = ReportSection("steps", "Over the steps")
    wanted = {
        "lr": ("Learning rate", "learning rate", ".3~e"),
        "grad_norm": ("Gradient norm", "gradient norm", ".4~g"),
        "seconds": ("Seconds per step", "s", ".3~g"),
    }
    every = max(1, -(-len(run.metrics) // POINTS))
    for field, (title, axis, form) in wanted.items():
        rows = [row for row in run.metrics[::every] if isinstance(row.get(field), int | float)]
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
    elif every > 1:
        section.notes.append(f"Every {every}th step is drawn.")
    return section


def image_section(run: RunData, found: list[image_rows.ValidationImage]) -> tuple[ReportSection, list[Json]]:
    """Compare the base with the tuned model over the steps; also the pictures by prompt, as data URIs."""
    section = ReportSection("pictures", "Base and tuned model")
    steps = sorted({each.step for each in found} - {0})
    if not steps:
        none = "This run drew no validation pictures (validation.prompts)."
        section.notes.append("Only the base has been drawn so far." if found else none)
        return section, []
    section.block = "pictures"
    shown = spread_steps(steps, IMAGE_STEPS)
    kept = [each for each in found if each.step in {0, *shown}]
    last = [each for each in kept if each.step == steps[-1]]  # of the requests whose inputs are kept
    inputs = {each.asked: image_rows.painted_inputs(run.folder, each.file.name) for each in last}
    side = image_rows.side_for(len(kept) + sum(map(len, inputs.values())))
    choose = " Choose the step with the slider." if len(shown) > 1 else ""
    section.notes.append(f"Both are drawn from the same noise. Drag the line to compare.{choose}")
    if len(shown) < len(steps):
        section.notes.append(f"{len(shown)} of {len(steps)} steps are shown; all are in samples/.")
    with Image.open(found[0].file) as image:
        largest = max(image.size)
    if largest > side:
        section.notes.append(f"Scaled down to {side} px and compressed; the originals are in samples/.")
    if (run.folder / "samples" / "grid.png").exists():
        section.lines.append("![Base and tuned model, one row per prompt, one column per step](samples/grid.png)")
    titles = image_rows.row_titles([each.asked for each in kept], ("prompt", "seed"))
    prompts: dict[str, Json] = {}
    for each in kept:
        row = prompts.setdefault(each.asked, {"prompt": titles[each.asked], "seed": each.seed, "steps": {}})
        row["steps"][image_rows.START if each.is_start else each.step] = image_rows.data_uri(each.file, side)
    for asked, row in prompts.items():
        row["inputs"] = {kind: image_rows.data_uri(file, side) for kind, file in inputs.get(asked, {}).items()}
    return section, [row for row in prompts.values() if any(row["steps"])]


def strength_section(run: RunData, found: list[image_rows.ValidationImage]) -> tuple[list[ReportSection], list[Json]]:
    """Show what the strength of a slider changes, after the last step that drew; also its pictures by prompt, as data
    URIs. Nothing for another run."""
    last = max((each.step for each in found), default=0)
    if run.config is None or run.config.concept is None or not last:
        return [], []
    section = ReportSection("strengths", "Strength", block="strengths")
    section.notes.append("Drawn from the same noise. Move the slider: 0 is the base, 1 what the result is by itself.")
    section.lines.append("![One row per prompt, one column per strength](samples/strengths.png)")
    newest = [each for each in found if each.step == last]
    side = image_rows.side_for(len(STRENGTHS) * len(newest))
    base = {each.asked: each.file for each in found if not each.step and not each.is_start}
    rows = []
    for each in newest:
        places = {at: pictures_at(run.folder / SAMPLES, last, at) / each.file.name for at in STRENGTHS}
        places[0] = base.get(each.asked, places[0])
        drawn = {at: image_rows.data_uri(file, side) for at, file in places.items() if file.is_file()}
        rows.append({"prompt": each.prompt, "seed": each.seed, "strengths": drawn})
    return [section], rows


def checkpoint_sections(run: RunData, drawn: list[int]) -> Iterator[ReportSection]:
    """List the checkpoints under the names that commands take, and the steps with pictures but no checkpoint."""
    steps = [step for step, _ in list_checkpoints(run.folder)]
    gone = [step for step in drawn if step not in steps]
    if not steps and not gone:
        return
    section = ReportSection("checkpoints", "Checkpoints")
    name = run.folder.name if run.folder.is_absolute() else str(run.folder)
    rows = [(f"{step:,}", f"{name}@{step}", "yes" if step in drawn else "no") for step in steps]
    if rows:
        section.notes.append(f"Use a step by its name, as in: simpletune generate --run {rows[-1][1]}")
        section.tables.append(ReportTable("Available steps", ("step", "name", "pictures above"), rows))
    if gone:
        rule = f" ({run.config.checkpoint.describe()})" if run.config is not None else ""
        section.notes.append(
            f"Pictures without a checkpoint: step {join_names([f'{step:,}' for step in gone], 12)}{rule}. "
            "To keep more, set checkpoint.keep_every=N or keep_last=all."
        )
    yield section


def source_sections(run: RunData) -> Iterator[ReportSection]:
    """List what each of several sources contributed; nothing for one source or a run of an earlier version."""
    found = read_object(run.folder / DATA, run.notes, expected=False).get("sources", [])
    try:
        shares = [SourceShare(**{**share, "path": without_parents(share["path"])}) for share in found]
        rows = source_rows(shares)
    except (TypeError, KeyError, ValueError, AttributeError):
        run.notes.append(f"{DATA} lists sources in an unknown form.")
        return
    if len(shares) > 1:
        table = ReportTable("What an epoch consists of", SOURCE_COLUMNS, rows)
        yield ReportSection("sources", "Data sources", tables=[table])


def text_sections(run: RunData) -> Iterator[ReportSection]:
    """List a run's token vectors and text encoder updates; nothing if the text side did not train."""
    if run.config is None or not run.config.text.trains:
        return
    section = ReportSection(
        "text-side", "Text side", [f"{each[0].upper()}{each[1:]}." for each in run.config.text.describe()]
    )
    result = run.folder / LORA_FILE
    for file in [*embeddings_in(run.folder), *([result] if result.is_file() else [])]:
        try:
            about = describe(file)
        except UserError as error:
            run.notes.append(f"{file.name} cannot be read: {error}")
            continue
        for each in about.get("embeddings", ()):
            head = ("encoder", "vectors", "width", "norms", "cosine with the first value")
            rows = [
                (
                    name,
                    str(vectors["vectors"]),
                    str(vectors["width"]),
                    ", ".join(f"{norm:.3g}" for norm in vectors["norms"]),
                    ", ".join(f"{cosine:.3f}" for cosine in vectors["cosines"]),
                )
                for name, vectors in each["encoders"].items()
            ]
            section.tables.append(ReportTable(f"{each['token']} in {file.name}", head, rows))
            section.notes += [
                f"{tool['tool']}: {'; '.join([tool['loads'], *tool['notes']])}." for tool in each["tools"]
            ]
        if counts := about.get("text_encoders"):
            layers = [(title, str(count)) for title, count in counts.items()]
            title = f"Updates of text encoders in {file.name}"
            section.tables.append(ReportTable(title, ("encoder", "layers"), layers))
    yield section


def attempts_sections(run: RunData) -> Iterator[ReportSection]:
    """List the attempts, which are the first start and each resume; nothing for a single one that finished."""
    rows = run.attempts
    unknown = bool(rows) and rows[0].from_step > 0
    if not unknown and (not rows or (len(rows) == 1 and rows[0].ended == "finished")):
        return
    section = ReportSection("attempts", "Attempts")
    if unknown:
        section.notes.append(f"The attempts at steps 1 to {rows[0].from_step:,} were not recorded.")
    if len(rows) > 1:
        section.notes.append("Time, cost and memory on this page cover all attempts together.")
    for earlier, later in zip(rows, rows[1:], strict=False):
        verb = "Resumed" if later.from_step else "Restarted"
        lost = earlier.last_step - later.from_step
        again = f"; {lost:,} step{'s' * (lost != 1)} repeated" if lost > 0 else ""
        when = f"on {later.started:%Y-%m-%d} at {later.started:%H:%M} UTC"
        section.notes.append(f"{verb} {when} from step {later.from_step:,}{again}.")
    cells = []
    for row in rows:
        steps = f"{row.from_step + 1:,} to {row.last_step:,}" if row.last_step > row.from_step else "none"
        on_gpu = peak_of_stages(row.stages, "peak_allocated_gib")
        peak = format_gib(on_gpu if on_gpu is not None else peak_of_stages(row.stages, "peak_rss_gib"))
        ending = row.describe()
        if row.ended is None:
            ending = "running" if run.locked and row is rows[-1] else "killed"
        elif row.ended == "failed" and row.reason:
            ending = f"failed: {without_folders(row.reason).splitlines()[0]}"
        cells.append((f"{row.started:%Y-%m-%d %H:%M}", steps, duration(row.seconds), peak, row.device, ending))
    head = ("started (UTC)", "steps", "time", "peak memory", "device", "how it ended")
    section.tables.append(ReportTable("Attempts", head, cells))
    yield section


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


def files_section(run: RunData) -> ReportSection:
    """List the run's files with their sizes."""
    section = ReportSection("files", "Files")
    rows = []
    for path in sorted(run.folder.iterdir(), key=lambda path: (path.is_file(), path.name)):
        if path.name.startswith(".") or path.name.startswith("report."):
            continue
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        rows.append((path.name + ("" if path.is_file() else "/"), str(len(files)), _binary_size(size)))
    section.tables.append(ReportTable("In the run's folder", ("name", "files", "size"), rows))
    return section


def _binary_size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
