"""Report what ``simpletune evaluate`` measured: subject fidelity against prompt fidelity and drift, with pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from simpletune.config.validation_schedule import UNRELATED
from simpletune.runs.folder import EVALUATIONS, read_rows, read_scores
from simpletune.runs.report import charts
from simpletune.runs.report.content import ReportSection, ReportTable
from simpletune.runs.report.run_data import RunData
from simpletune.system.options import Json, UserError

NAMES = {
    "subject_fidelity": "subject", "prompt_fidelity": "prompt", "diversity": "diversity", "pres": "PRES",
    "copying": "copied", "cmmd": "CMMD", "kid": "KID",
}  # fmt: skip


def fidelity_sections(runs: Sequence[RunData]) -> Iterator[ReportSection]:
    """Show the encoder evaluations of one or several runs; yield nothing if there are none."""
    section, points = ReportSection("fidelity", "Fidelity"), list[Json]()
    for run in runs:
        result = _result(run, section)
        if result is None:
            continue
        own = list(fidelity_rows(run, result))
        points += own
        name = f"{run.name}: " if len(runs) > 1 else ""
        section.tables += [table(name, result, encoder) for encoder in result["encoders"]]
    if not points:
        return
    subject, prompt = points[0]["subject_by"], points[0]["prompt_by"]
    several = len({point["run"] for point in points}) > 1
    if prompt is not None:
        section.charts.append(charts.scatter("prompt", f"prompt fidelity ({prompt})", points, several))
    if any("drift" in point for point in points):
        drifted = [point for point in points if "drift" in point]
        section.charts.append(charts.scatter("drift", "drift for unrelated prompts", drifted, several))
    section.notes.append(
        f"Up is more like the subject, by {subject}. Lines are 95% intervals over the prompts; each model is shown by "
        "its first picture, all from the same noise."
    )
    yield section


def _result(run: RunData, section: ReportSection) -> Json | None:
    try:
        return read_scores(run.folder)
    except UserError as error:
        section.notes.append(str(error))
        return None


def fidelity_rows(run: RunData, result: Json) -> Iterator[Json]:
    """One row for each model of an evaluation: its figures, intervals and picture."""
    main, drift = result["main"], _drift(run)
    subject, prompt = main["subject_fidelity"], main["prompt_fidelity"]
    for place, point in enumerate(result["points"]):
        row: Json = {
            "run": run.name,
            "place": place,
            "title": point["title"],
            "subject_by": subject,
            "prompt_by": prompt,
        }
        scores = {"subject": point["scores"]["subject_fidelity"][subject]}
        if prompt is not None:
            scores["prompt"] = point["scores"]["prompt_fidelity"][prompt]
        for name, score in scores.items():
            low, high = score.get("low"), score.get("high")
            row |= {name: score["value"], f"{name}_low": low, f"{name}_high": high}
        if point["strength"] in (None, 1) and (point["step"] or 0) in drift:
            row["drift"], row["drift_low"], row["drift_high"] = drift[point["step"] or 0]
        if point.get("pictures"):
            row["picture"] = thumbnail(run.folder / point["pictures"][0])
        yield row


def _drift(run: RunData) -> dict[int, tuple[float, float, float]]:
    """The drift for unrelated prompts by step, with its standard error."""
    found = {}
    for row in read_rows(run.folder / EVALUATIONS):
        if UNRELATED in row.get("drift", {}):
            value, error = row["drift"][UNRELATED], row["drift_error"][UNRELATED]
            found[row["step"]] = (value, value - error, value + error)
    return found


def thumbnail(file: Path) -> str | None:
    """A small version of a picture as a data URL; None if the file is gone."""
    if not file.is_file():
        return None
    with Image.open(file) as picture:
        small = picture.convert("RGB")
    small.thumbnail((charts.MODEL, charts.MODEL))
    written = io.BytesIO()
    small.save(written, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()


def table(name: str, result: Json, encoder: Json) -> ReportTable:
    """Tabulate every score of one encoder with its interval, a row for each model."""
    title = encoder["title"]
    shown = [score for score in NAMES if title in result["points"][0]["scores"].get(score, {})]
    rows = [
        (point["title"], *(_cell(point["scores"][score].get(title)) for score in shown)) for point in result["points"]
    ]
    return ReportTable(f"{name}Scores by {title}", ("model", *(NAMES[score] for score in shown)), rows)


def _cell(score: Json | None) -> str:
    if score is None:
        return ""
    if score.get("low") is None:
        return f"{score['value']:.3f}"
    return f"{score['value']:.3f} ({score['low']:.3f} to {score['high']:.3f})"
