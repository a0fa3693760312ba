"""The report of several runs side by side."""

from __future__ import annotations

from simpletune.report import charts, pictures
from simpletune.report.content import Chart, Fact, Report, Section, Table, dollars, gib, seconds
from simpletune.report.ended import outcome, resumes
from simpletune.report.losses import MIXED, loss_data, loss_section, loss_title
from simpletune.report.recorded import Json, RunRecord
from simpletune.report.settings import plain_settings, settings_of
from simpletune.system.console import duration

NAMES = ("name", "about", "output.runs", "output.profiles", "output.cache", "output.report")
WEIGHTY = (
    "model.pretrained", "data.path", "data.resolution", "train.batch_size", "train.gradient_accumulation",
)  # fmt: skip
PICTURES = 12  # prompts


def report_of(runs: list[RunRecord], price: float | None, title: str = "", lead: str = "") -> Report:
    """Several runs, compared with the first.

    Args:
        runs: as their folders tell them; the first is what the percentages are of.
        price: of the machine, dollars an hour, if known.
        title: of the page.
        lead: under it.
    """
    differences = differing(runs)
    found = {run.name: list(pictures.validation_pictures(run.folder, run.notes)) for run in runs}
    status = [f"{run.name}: {note}" for run in runs for note in run.notes]
    status += comparability(runs, differences)
    sections = [
        runtime_section(runs),
        peak_section(runs),
        table_section(runs, price),
        picture_section(found),
        loss_section(runs),
        difference_section(runs, differences),
        environment_section(runs),
    ]
    data = {"losses": [loss_data(run) for run in runs if run.metrics], "grid": picture_grid(found)}
    lead = lead or f"Compared with the first, {runs[0].name}."
    return Report(title or f"{len(runs)} runs", lead, "", status, headline(runs), sections, price, [], data)


def headline(runs: list[RunRecord]) -> list[Fact]:
    """Who needs least, and how much less than the first."""
    facts = []
    peaks = [run for run in runs if run.peak]
    if peaks and len({run.peak_key for run in peaks}) == 1:
        least = min(peaks, key=lambda run: run.peak or 0.0)
        facts.append(Fact("Least memory", gib(least.peak), f"{least.name}, {_against(least.peak, runs[0].peak)}"))
    quick = [run for run in runs if run.seconds_per_step]
    if quick:
        best = min(quick, key=lambda run: run.seconds_per_step or 0.0)
        note = f"{best.name}, {_against(best.seconds_per_step, runs[0].seconds_per_step)}"
        facts.append(Fact("Fastest step", seconds(best.seconds_per_step), note))
    return facts


def _against(value: float | None, first: float | None) -> str:
    """Percent of the first run's figure."""
    return f"{value / first:.0%} of the first" if value and first else "the first has no such figure"


def runtime_section(runs: list[RunRecord]) -> Section:
    """The study's first figure; seconds a step stand in where no run knows its epoch."""
    epochs = all(run.seconds_per_epoch for run in runs)
    section = Section("runtime", "Runtime per epoch" if epochs else "Runtime per step")
    first = runs[0].seconds_per_epoch if epochs else runs[0].seconds_per_step
    rows: list[Json] = []
    for run in runs:
        value = run.seconds_per_epoch if epochs else run.seconds_per_step
        percent = f" ({value / first:.0%})" if value and first else ""
        rows.append({"name": run.name, "value": value, "label": f"{seconds(value)}{percent}" if value else "not known"})
    says = "; ".join(f"{row['name']} {row['label']}" for row in rows)
    unit = "seconds per epoch" if epochs else "seconds per step"
    section.charts.append(Chart("runtime", "", f"{section.title}: {says}", charts.bars(rows, unit, "@runs")))
    lengths = sorted({run.steps_per_epoch for run in runs if run.steps_per_epoch})
    if epochs:
        listed = ", ".join(f"{steps:,}" for steps in lengths)
        steps_of = "step of an epoch" if lengths == [1] else "steps of an epoch"
        section.notes.append(f"The median seconds of a step (warm-up left out) times the {listed} {steps_of}.")
    else:
        section.notes.append("Not every run knows how many steps its epoch has: seconds of one step are shown.")
    return section


def peak_section(runs: list[RunRecord]) -> Section:
    """The study's second figure."""
    section = Section("peak", "Peak memory usage")
    kinds = {run.peak_words for run in runs if run.peak}
    rows: list[Json] = []
    for run in runs:
        first = runs[0].peak if run.peak_key == runs[0].peak_key else None
        percent = f" ({run.peak / first:.0%})" if run.peak and first else ""
        rows.append(
            {"name": run.name, "value": run.peak, "label": f"{gib(run.peak)}{percent}" if run.peak else "not known"}
        )
    says = "; ".join(f"{row['name']} {row['label']}" for row in rows)
    section.charts.append(Chart("peak", "", f"Peak memory: {says}", charts.bars(rows, "GiB", "@runs")))
    if len(kinds) == 1:
        section.notes.append(f"Of the whole job, {kinds.pop()}: the largest over text, latents, training, pictures.")
    elif kinds:
        section.notes.append("Some runs had a GPU and some had none: these peaks are of different memory.")
    return section


def table_section(runs: list[RunRecord], price: float | None) -> Section:
    """All figures with percentages of the first run's."""
    head = [
        "run",
        "trained parameters",
        "s/step",
        "% of first",
        "s/epoch",
        "samples/s",
        "peak",
        "% of first",
        "loss",
        loss_title(runs) or MIXED,
    ]
    head += ["1,000 steps"] if price else []
    rows = []
    for run in runs:
        trained = run.summary.get("trainable_parameters")
        share = f" ({100 * run.share:.3g}%)" if run.share is not None else ""
        final = run.summary.get("final_loss")
        cells = [
            run.name,
            f"{trained:,}{share}" if trained is not None else "",
            seconds(run.seconds_per_step),
            _percent(run.seconds_per_step, runs[0].seconds_per_step),
            seconds(run.seconds_per_epoch),
            f"{run.samples_per_second:.3g}" if run.samples_per_second else "",
            gib(run.peak),
            _percent(run.peak, runs[0].peak if run.peak_key == runs[0].peak_key else None),
            f"{final:.4f}" if final is not None else "",
            f"{run.evaluations[-1][1]:.4f}" if run.evaluations else "",
        ]
        cells += [dollars(run.seconds_per_step * 1000 / 3600 * price) if run.seconds_per_step else ""] if price else []
        rows.append(tuple(cells))
    note = f"Percentages are of the first, {runs[0].name}." + (f" Cost at ${price:g} an hour." if price else "")
    tables = [Table("Runs", tuple(head), rows), _time_table(runs, price)]
    return Section("figures", "Figures", notes=[note], tables=tables)


def _time_table(runs: list[RunRecord], price: float | None) -> Table:
    """What each run took over all of its attempts, and how it ended."""
    rows = []
    for run in runs:
        time = run.seconds_total
        cost = [dollars(time / 3600 * price) if time is not None else ""] if price else []
        took = duration(time) if time is not None else ""
        rows.append((run.name, took, *cost, resumes(run) or ("1 attempt" if run.attempts else ""), outcome(run)))
    head = ("run", "time", *(["cost"] if price else []), "attempts", "how it ended")
    return Table("Time of the whole job", head, rows)


def _percent(value: float | None, first: float | None) -> str:
    return f"{value / first:.1%}" if value and first else ""


def differing(runs: list[RunRecord]) -> dict[str, list[str]]:
    """Settings in which the runs differ: path, and each run's value."""
    tables = [
        {row.path: row for row in (settings_of(run.config) if run.config else plain_settings(run.settings))}
        for run in runs
    ]
    found = {}
    for path in dict.fromkeys(path for table in tables for path in table):
        rows = [table.get(path) for table in tables]
        there = [row for row in rows if row is not None]
        same = len({row.value for row in there}) == 1
        # A field that only some runs' options have tells nothing while it is at its default.
        if path in NAMES or (same and (len(there) == len(rows) or not any(row.changed for row in there))):
            continue
        found[path] = [row.value if row is not None else "" for row in rows]
    return found


def comparability(runs: list[RunRecord], differences: dict[str, list[str]]) -> list[str]:
    """What should be known before times and peaks of these runs are compared."""
    notes = []
    weighty = [path for path in WEIGHTY if path in differences]
    if weighty:
        notes.append(f"These runs differ in {', '.join(weighty)}: compare times and peaks with that in mind.")
    devices = {str(run.summary.get("device", "")) for run in runs if run.summary}
    machines = {str(run.environment.get("device", "")) for run in runs if run.environment}
    if len(devices) > 1 or len(machines) > 1:
        notes.append(
            f"They ran on different machines: {'; '.join(sorted(machines if len(machines) > 1 else devices))}."
        )
    return notes


def difference_section(runs: list[RunRecord], differences: dict[str, list[str]]) -> Section:
    """The settings that are not the same in all runs."""
    section = Section("differences", "What differs")
    if not differences:
        section.notes.append("These runs have the same configuration.")
        return section
    head = ("setting", *(run.name for run in runs))
    rows = [(path, *values) for path, values in differences.items()]
    section.tables.append(Table("Settings", head, rows))
    return section


def environment_section(runs: list[RunRecord]) -> Section:
    """Machine and versions, once for all runs that share them."""
    section = Section("environment", "Environment")
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        found.setdefault(tuple((name, str(value)) for name, value in run.environment.items()), []).append(run.name)
    for pairs, names in found.items():
        who = "All runs" if len(found) == 1 else ", ".join(names)
        if pairs:
            section.tables.append(Table(who, ("what", "value"), list(pairs)))
        else:
            section.notes.append(f"{who}: machine and versions were not recorded.")
    return section


def picture_section(found: dict[str, list[pictures.ValidationPicture]]) -> Section:
    """The same prompts by every run."""
    section = Section("pictures", "The same prompt by every run", block="grid")
    if not any(found.values()):
        section.block = ""
        section.notes.append("No run drew validation pictures.")
        return section
    section.notes.append("The base, then each run's last pictures, from the same noise; large ones are scaled down.")
    section.lines.append("They are on the page beside this file, and in each run's `samples/`.")
    return section


def picture_grid(found: dict[str, list[pictures.ValidationPicture]]) -> list[Json]:
    """For each prompt the base's picture and each run's last one, as data URIs."""
    prompts: dict[tuple[str, str], Json] = {}
    for name, drawn in found.items():
        for picture in drawn:
            row = prompts.setdefault((picture.prompt, picture.seed), {"base": None, "runs": {}})
            if picture.step == 0:
                row["base"] = row["base"] or picture
            else:
                row["runs"][name] = picture  # by step: the last stays
    kept = list(prompts.items())[:PICTURES]
    side = pictures.side_for(sum(1 + len(row["runs"]) for _, row in kept))
    return [
        {
            "prompt": prompt,
            "seed": seed,
            "pictures": [
                {"name": name, "step": picture.step, "src": pictures.data_uri(picture.file, side)}
                for name, picture in [("base", row["base"]), *row["runs"].items()]
                if picture is not None
            ],
        }
        for (prompt, seed), row in kept
    ]
