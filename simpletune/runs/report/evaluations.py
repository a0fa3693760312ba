"""Report what was evaluated and which checkpoint is the best: held-out loss and drift from the base over the steps, and
the fidelity to subject and prompt that ``simpletune evaluate`` measured, with pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from PIL import Image

from simpletune.config.validation_schedule import UNRELATED, drift_group
from simpletune.runs.best_checkpoint import LAST, BestCheckpoint, choose_best, lowest_held_out, paired_difference
from simpletune.runs.folder import EVALUATIONS, read_rows, read_scores
from simpletune.runs.repair import is_start, row_key
from simpletune.runs.report import charts
from simpletune.runs.report.content import ReportSection, ReportTable
from simpletune.runs.report.run_data import RunData
from simpletune.system.options import Json, UserError

ABOUT_DRIFT = (
    "Drift is how much the model's predictions changed from the base's at fixed latents, noise and prompts: "
    "E|v - v_base|² / E|v_base|², with its standard error over the samples. It should rise for the captions and stay "
    "low for other prompts."
)
SCORE_TITLES = {
    "subject_fidelity": "subject", "prompt_fidelity": "prompt", "diversity": "diversity", "pres": "PRES",
    "copying": "copied", "cmmd": "CMMD", "kid": "KID",
}  # fmt: skip

ABOUT_SCORES = {
    "subject_fidelity": "likeness to your pictures; higher is better",
    "prompt_fidelity": "how well pictures show what the prompt says; higher is better",
    "diversity": "how much pictures of one prompt differ; higher is better",
    "pres": "likeness of others of the class to your pictures; lower is better, or the whole class becomes the subject",
    "copying": "share of pictures that copy one of yours; lower is better",
    "cmmd": "distance of the drawn pictures, as a set, from yours (CLIP maximum mean discrepancy); lower is better",
    "kid": "another such distance (kernel inception distance), which may be below 0; lower is better",
}


def describe_scores(scores: Iterable[str]) -> str:
    """Explain the columns of a table of scores."""
    return ". ".join(f"{SCORE_TITLES[score]}: {ABOUT_SCORES[score]}" for score in scores)


def choice_sections(run: RunData) -> Iterator[ReportSection]:
    """Show what each evaluated step measured, and the best checkpoint; nothing without evaluations."""
    try:
        rows = sorted(read_rows(run.folder / EVALUATIONS), key=row_key)
        best, lowest = choose_best(run.folder), lowest_held_out(run.folder)
    except UserError:  # another note of the page names the damaged file
        return
    rows = [row for row in rows if row.get("eval_losses")]
    if len(rows) < 2:
        return
    section = ReportSection("best", "Which checkpoint")
    if best is not None and best.by == LAST:
        section.notes.append(f"The last checkpoint, step {best.step:,}, counts as the best: {best.why}.")
    elif best is not None:
        section.notes.append(f"Best: step {best.step:,} ({run.name}{best.suffix}), by {best.by}: {best.why}.")
    drifted = [row for row in rows if row.get("drift")]
    if drifted:
        points = [
            {
                "step": row["step"],
                "prompts": drift_group(group),
                "drift": value,
                "low": value - row["drift_error"][group],
                "high": value + row["drift_error"][group],
            }
            for row in drifted
            for group, value in row["drift"].items()
        ]
        last = ", ".join(f"{drift_group(group)} {value:.2%}" for group, value in drifted[-1]["drift"].items())
        section.charts.append(charts.drift(points, f"Drift from the base over the steps; at the last: {last}"))
        section.notes.append(ABOUT_DRIFT)
    section.tables.append(_evaluation_table(rows, run.loss_is, best, lowest))
    yield section


def _evaluation_table(rows: list[Json], loss_is: str, best: BestCheckpoint | None, lowest: Json | None) -> ReportTable:
    """Tabulate every evaluation: the loss, its paired difference to the first one, and the drifts."""
    groups = list(dict.fromkeys(group for row in rows for group in row.get("drift", {})))
    cells, before = [], "the base" if any(map(is_start, rows)) else "before training"
    for row in rows:
        step = f"{row['step']:,}" if row["step"] else "the start" if is_start(row) else before
        mark = " (best)" if best is not None and best.by != LAST and best.step == row["step"] else ""
        mark += " (lowest loss)" if lowest is not None and lowest["step"] == row["step"] else ""
        change = ""
        if row is not rows[0] and len(row["eval_losses"]) == len(rows[0]["eval_losses"]):
            change = "{:+.4f} ± {:.4f}".format(*paired_difference(row["eval_losses"], rows[0]["eval_losses"]))
        drifts = [f"{row['drift'][group]:.2%}" if group in row.get("drift", {}) else "" for group in groups]
        cells.append((f"{step}{mark}", f"{row['eval_loss']:.4f}", change, *drifts))
    head = ("step", "loss", "change, ± paired error", *(drift_group(group).removeprefix("the ") for group in groups))
    drift = ", and drift by prompts" if groups else ""
    return ReportTable(f"{loss_is[0].upper()}{loss_is[1:]}{drift}", head, cells)


def fidelity_sections(runs: Sequence[RunData]) -> Iterator[ReportSection]:
    """Show the encoder evaluations of one or several runs; nothing if there are none."""
    section, points = ReportSection("fidelity", "Fidelity"), list[Json]()
    for run in runs:
        try:
            result = read_scores(run.folder)
        except UserError as error:
            section.notes.append(str(error))
            continue
        if result is None:
            continue
        points += _fidelity_points(run, result)
        name = f"{run.name}: " if len(runs) > 1 else ""
        section.tables += [_score_table(name, result, encoder["title"]) for encoder in result["encoders"]]
    if not points:
        if section.notes:
            yield section
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
    titles = {column for table in section.tables for column in table.head}
    section.notes.append(f"{describe_scores(score for score, title in SCORE_TITLES.items() if title in titles)}.")
    yield section


def _fidelity_points(run: RunData, result: Json) -> Iterator[Json]:
    """Return one point for each model of an evaluation: its figures, intervals and picture."""
    drift = {}  # for unrelated prompts by step, with its standard error on either side
    for row in read_rows(run.folder / EVALUATIONS):
        if UNRELATED in row.get("drift", {}) and not is_start(row):
            value, error = row["drift"][UNRELATED], row["drift_error"][UNRELATED]
            drift[row["step"]] = (value, value - error, value + error)
    subject, prompt = result["main"]["subject_fidelity"], result["main"]["prompt_fidelity"]
    for place, model in enumerate(result["points"]):
        point: Json = {
            "run": run.name,
            "place": place,
            "title": model["title"],
            "subject_by": subject,
            "prompt_by": prompt,
        }
        scores = {"subject": model["scores"]["subject_fidelity"][subject]}
        if prompt is not None:
            scores["prompt"] = model["scores"]["prompt_fidelity"][prompt]
        for name, score in scores.items():
            point |= {name: score["value"], f"{name}_low": score.get("low"), f"{name}_high": score.get("high")}
        if model["strength"] in (None, 1) and (model["step"] or 0) in drift:
            point["drift"], point["drift_low"], point["drift_high"] = drift[model["step"] or 0]
        if model.get("pictures"):
            point["picture"] = _thumbnail(run.folder / model["pictures"][0])
        yield point


def _thumbnail(file: Path) -> str | None:
    """Encode a small version of a picture as a data URL; None if the file is gone."""
    if not file.is_file():
        return None
    with Image.open(file) as image:
        small = image.convert("RGB")
    small.thumbnail((charts.MODEL, charts.MODEL))
    written = io.BytesIO()
    small.save(written, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()


def _score_table(name: str, result: Json, encoder: str) -> ReportTable:
    """Tabulate every score of one encoder with its interval, a row for each model."""
    shown = [score for score in SCORE_TITLES if encoder in result["points"][0]["scores"].get(score, {})]
    rows = []
    for model in result["points"]:
        cells = [model["title"]]
        for each in shown:
            score = model["scores"][each].get(encoder)
            limits = f" ({score['low']:.3f} to {score['high']:.3f})" if score and score.get("low") is not None else ""
            cells.append(f"{score['value']:.3f}{limits}" if score is not None else "")
        rows.append(tuple(cells))
    return ReportTable(f"{name}Scores by {encoder}", ("model", *(SCORE_TITLES[score] for score in shown)), rows)
