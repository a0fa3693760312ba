"""``vertex-quality``: the quality figures of the Vertex report, repeated on the tiny SD3.

The report taught Stable Diffusion 1.5 one dog, in full and by LoRA, scored subject fidelity (DINO) and prompt fidelity
(CoCa) over steps, and gave the cost of 800 pictures at several batch sizes. Here the tiny model learns the demo's
subject, judged by its encoders and its checker; costs of Stable Diffusion 1.5 are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import judged, vertex
from benchmarks.judged import Studio, Tuned
from benchmarks.quality import PRECISIONS, accuracies, file_name, unrelated
from benchmarks.table import Results, describe_machine, listed, prompted, table
from simpletune.estimate.job_estimate import estimate
from simpletune.estimate.job_time import job_time
from simpletune.system.gpus import find_card
from simpletune.system.options import Json

CONFIG = Path("configs/demo_subject.json")
STEPS, EVERY, SEEDS = 600, 100, (0, 1)
IMAGES = 800
"""Pictures shown in every row of batch size and learning rate, as in the report's cost table."""
ALL = (
    "schedule.name=constant", "schedule.warmup_steps=0", "validation.loss_samples=0", "data.repeats=32",
    "train.batch_size=4", *PRECISIONS["fp32"],
)  # fmt: skip
METHODS: dict[str, tuple[str, ...]] = {
    "full": ("adapter.method=full", "optimizer.lr=0.0005"),
    "LoRA r8": ("optimizer.lr=0.001",),
}
RATE, BATCH = 0.001, 4  # of a LoRA, at this batch size
RULES: dict[str, Callable[[int], float]] = {
    "same rate": lambda batch: RATE,
    "rate by root of batch": lambda batch: RATE * (batch / BATCH) ** 0.5,
    "rate by batch": lambda batch: RATE * batch / BATCH,
}
BATCHES: dict[str, tuple[int, ...]] = {
    "same rate": (1, 2, 4, 8, 16, 32), "rate by root of batch": (1, 8, 32), "rate by batch": (1, 8, 32),
}  # fmt: skip
PUBLISHED = {
    "base": {0: (0.254, 0.140)},
    "full": {400: (0.798, 0.114), 1000: (0.887, 0.092)},
    "LoRA r8": {500: (0.757, 0.118), 800: (0.778, 0.122), 1100: (0.789, 0.112)},
}
"""Published by steps: DINO subject fidelity, CoCa prompt fidelity."""
HOUR = {"A100-40GB": 4.2245, "V100-16GB": 2.852}
"""USD per hour of the report's machines."""
COSTS = {
    ("full", "A100-40GB"): {1: 0.44, 2: 0.27, 4: 0.20, 8: 0.15},
    ("LoRA", "A100-40GB"): {1: 0.36, 2: 0.23, 4: 0.17, 8: 0.13, 16: 0.15, 32: 0.19},
    ("LoRA", "V100-16GB"): {1: 0.33, 2: 0.20, 4: 0.14, 8: 0.13},
}
"""Published USD of 800 / batch steps, by method, card and batch."""

SCORES = ("subject", "prompt", "likeness", "placed", "others")
SHOWN = {
    "subject": "subject, tiny-dino", "prompt": "prompt, tiny-clip", "likeness": "checker: subject",
    "placed": "checker: prompt", "others": "checker: other prompts",
}  # fmt: skip
HALVES = ("subject_half", "prompt_half")
STEP_COLUMNS = {
    "what": "", "of": "runs", **SHOWN, "subject_half": "± subject", "prompt_half": "± prompt",
    "subject_range": "subject, most - least",
}  # fmt: skip
BATCH_COLUMNS = {"what": "", "steps": "steps", "rate": "learning rate", **SHOWN, "seconds": "processor seconds"}
COST_COLUMNS = {
    "what": "", "steps": "steps", "step": "seconds a step, predicted", "cost": "USD, predicted",
    "published": "USD, published", "relative": "of batch 1, predicted", "published_relative": "of batch 1, published",
}  # fmt: skip
TITLE = "The Vertex report's quality figures, on the tiny SD3"
ABOUT = f"""\
Five pictures teach the tiny SD3 one figure, as in `configs/demo_subject.json`, in fp32 at constant learning rates,
{BATCH} pictures a step. *Subject* and *prompt*: DINO-like and CLIP-T-like fidelity by the demo's encoders
(`simpletune evaluate`, 12 prompts, 1 seed). *Checker*, without any learned model, on pictures of other prompts and
seeds: the share of pictures that it reads as it reads the subject itself; the mean share of background, size and place
drawn as asked there; prompt accuracy of prompts without the subject. Both are from 0 to 1, and higher is better."""
OVER_STEPS = "Means over seeds of training; *runs* is how many. ± is half of a run's 95% interval over prompts."
AT_EQUAL = f"""\
LoRA of rank 8, {IMAGES} pictures in every row, so {IMAGES} / batch steps; rates are relative to {RATE:g} at batch
{BATCH}. *Processor seconds* are measured and of the whole training on one thread."""
OF_COST = f"""\
Stable Diffusion 1.5 at 512 px, {IMAGES} / batch steps, at the report's prices of an hour ({HOUR["A100-40GB"]} USD for
the A100, {HOUR["V100-16GB"]} for the V100). Predicted: the training steps alone, by the cards' data sheets; LoRA with
gradient checkpointing, full without. Published figures include the start of the job: those of 10 and 1,000 steps lie on
a line that begins at 0.05 USD."""


def run(folder: Path, count: int, minutes: float, only: str, overrides: list[str]) -> Path:
    """Measure missing rows with ``count`` prompts per score of the checker; write page, chart and pictures."""
    results = Results(folder / "vertex_quality", {}, prompted("vertex-quality", count))
    study = Study(folder / "vertex_quality", count, overrides)
    results.measure(study.rows(), minutes, only)
    if paths := measured_paths(results.rows):
        judged.chart(results.stem.with_suffix(".png"), panels(results.rows, paths))
    judged.sheet_of(study.strips(), folder / "vertex_quality_pictures.png")
    return judged.write_page(results, page(results.command, results.rows), study.rows())


class Study:
    """The rows that train.

    Args:
        folder: for the pictures.
        count: prompts per score of the checker.
        overrides: for the configuration.
    """

    def __init__(self, folder: Path, count: int, overrides: list[str]):
        self.folder = folder
        self.studio = Studio(CONFIG, overrides)
        self.subject, self.others = judged.subject_prompts(count), unrelated(count)

    def rows(self) -> dict[str, Callable[[], Json]]:
        """Name every row and what measures it."""
        found: dict[str, Callable[[], Json]] = {}
        for seed in SEEDS:
            for method, options in METHODS.items():
                name = f"{method}, seed {seed}"
                found[name] = partial(self.over_steps, name, [*options, f"train.seed={seed}"])
        for rule, batches in BATCHES.items():
            for batch in batches:
                found[f"batch {batch}, {rule}"] = partial(self.at_batch, f"batch {batch}, {rule}", batch, rule)
        for (method, card), published in COSTS.items():
            for batch in published:
                found[f"cost: {method}, {card}, batch {batch}"] = partial(cost_row, method, card, batch)
        return found

    def over_steps(self, name: str, options: list[str]) -> Json:
        """Train once and judge every checkpoint."""
        settings = [*ALL, *options, f"train.steps={STEPS}", f"checkpoint.every={EVERY}"]
        run = self.studio.tuned(settings, name)
        points = self.judged(run, name)
        return {"points": {str(step): point for step, point in points.items()}, "seconds": round(run.seconds, 1)}

    def at_batch(self, name: str, batch: int, rule: str) -> Json:
        """Train on `PICTURES` pictures and judge the result."""
        steps, rate = IMAGES // batch, RULES[rule](batch)
        settings = [*ALL, f"train.steps={steps}", f"train.batch_size={batch}", f"optimizer.lr={rate:.6g}",
                    "checkpoint.every=null"]  # fmt: skip
        run = self.studio.tuned(settings, name)
        points = self.judged(run, name, last_only=True)
        last = points[max(points)]
        return {"batch": batch, "rule": rule, "steps": steps, "rate": round(rate, 6), **last,
                "seconds": round(run.seconds, 1)}  # fmt: skip

    def judged(self, run: Tuned, name: str, last_only: bool = False) -> dict[int, Json]:
        """Score the base and every checkpoint, or the last alone; keep pictures of the first seed's."""
        found = self.studio.fidelity(run, seeds=1)
        if last_only:
            found = {max(found): found[max(found)]}
        for step, point in found.items():
            easel = self.studio.at(run, step)
            asked = easel.draw(self.subject)
            likeness, placed = judged.read_shares(asked, self.subject)
            point |= {"likeness": round(likeness, 4), "placed": round(placed, 4)}
            point["others"] = round(accuracies(easel.draw(self.others), self.others)["prompt"], 4)
            if name.endswith(f"seed {SEEDS[0]}"):
                judged.strip(easel, [*self.subject[:3], self.others[-1]], self.strip_file(name, step))
        return found

    def strip_file(self, name: str, step: int) -> Path:
        """The file with a checkpoint's pictures."""
        return self.folder / f"{file_name(name)}-{step:04d}.png"

    def strips(self) -> list[tuple[str, Path]]:
        """The pictures of the base, then of both methods over steps."""
        runs = {method: f"{method}, seed {SEEDS[0]}" for method in METHODS}
        found = [("base", self.strip_file(runs["full"], 0))]
        for method, name in runs.items():
            found += [(f"{method}, {step} steps", self.strip_file(name, step))
                      for step in (EVERY, STEPS // 2, STEPS)]  # fmt: skip
        return found


def cost_row(method: str, card: str, batch: int) -> Json:
    """Predict what `PICTURES` pictures cost on a card."""
    kind, steps = find_card(card), IMAGES // batch
    settings = (*vertex.BASE, *vertex.CHECKPOINTED) if method == "LoRA" else (*vertex.FULL, *vertex.PLAIN)
    compute = "bf16" if kind.has_bf16 else "fp16"
    own = ("data.resolution=512", f"train.batch_size={batch}", f"train.steps={steps}", "schedule.warmup_steps=0",
           f"precision.compute={compute}", "checkpoint.every=null")  # fmt: skip
    config = vertex.config_of(*settings, *own)
    prediction = estimate(config, kind.capability)
    assert prediction.job is not None
    step = job_time(config, prediction.job, kind).step.seconds
    return {"steps": steps, "step": round(step, 4), "cost": round(steps * step / 3600 * HOUR[card], 4),
            "published": COSTS[method, card][batch]}  # fmt: skip


def measured_paths(found: Mapping[str, Json]) -> dict[str, dict[int, Json]]:
    """Means over seeds, by method and step; steps that every finished seed has."""
    paths: dict[str, dict[int, Json]] = {}
    for method in METHODS:
        runs = [found[name]["points"] for seed in SEEDS if (name := f"{method}, seed {seed}") in found]
        steps = [int(step) for step in (runs[0] if runs else {}) if all(step in run for run in runs)]
        if runs:
            paths[method] = {
                step: {"of": len(runs), **judged.means([run[str(step)] for run in runs], (*SCORES, *HALVES))}
                for step in steps
            }
    return paths


def panels(found: Mapping[str, Json], paths: Mapping[str, Mapping[int, Json]]) -> list[Json]:
    """Subject against prompt fidelity over steps, ours and the report's, and subject fidelity by batch."""
    ours = [{"run": method, "step": step, "x": point["subject"], "y": point["prompt"],
             "low": point["prompt"] - point["prompt_half"], "high": point["prompt"] + point["prompt_half"]}
            for method, path in paths.items() for step, point in path.items()]  # fmt: skip
    theirs = [{"run": method, "step": step, "x": subject, "y": prompt}
              for method, path in PUBLISHED.items() if method != "base"
              for step, (subject, prompt) in (PUBLISHED["base"] | path).items()]  # fmt: skip
    result = [
        judged.path_panel("Tiny SD3, measured", ours, ("subject fidelity, tiny-dino", "prompt fidelity, tiny-clip")),
        judged.path_panel("SD 1.5, published by Vertex", theirs, ("subject fidelity, DINO", "prompt fidelity, CoCa")),
    ]
    batches = [{"rule": rule, "batch": row["batch"], "subject": row["subject"]}
               for rule in BATCHES for row in batch_rows(found, rule).values()]  # fmt: skip
    if batches:
        result.append({
            "title": f"LoRA r8 after {IMAGES} pictures, measured", "width": 300, "height": 260,
            "data": {"values": batches}, "mark": {"type": "line", "point": True},
            "encoding": {
                "x": {"field": "batch", "type": "quantitative", "scale": {"type": "log", "base": 2}},
                "y": {"field": "subject", "type": "quantitative", "title": "subject fidelity, tiny-dino",
                      "scale": {"zero": False}},
                "color": {"field": "rule", "type": "nominal", "title": None, "legend": {"orient": "bottom"}},
            },
        })  # fmt: skip
    return result


def batch_rows(found: Mapping[str, Json], rule: str) -> dict[str, Json]:
    """The measured rows of a rule; at the reference batch all rules are the same."""
    names = [(batch, f"batch {batch}, {rule}") for batch in sorted({*BATCHES[rule], BATCH})]
    same = {BATCH: f"batch {BATCH}, same rate"}
    return {f"batch {batch}, {rule}": found[same.get(batch, name)] for batch, name in names
            if same.get(batch, name) in found}  # fmt: skip


def page(command: str, found: Mapping[str, Json]) -> list[str]:
    """Lay out the Markdown page."""
    machine = listed(command, describe_machine())
    steps: dict[str, Json] = {}
    for method, path in measured_paths(found).items():
        for step, point in path.items():
            steps.setdefault("base" if step == 0 else f"{method}, {step} steps", point)
    lines = [f"# {TITLE}", "", ABOUT, "", *machine, ""]
    lines += ["## Over steps", "", OVER_STEPS, "", *table(STEP_COLUMNS, steps)]
    lines += ["", "## Batch against learning rate at equal pictures", "", AT_EQUAL, ""]
    batches = {name: row for rule in BATCHES for name, row in batch_rows(found, rule).items()}
    lines += table(BATCH_COLUMNS, {name: {**row, "rate": f"{row['rate']:g}"} for name, row in batches.items()})
    lines += ["", "## Cost", "", OF_COST, "", *table(COST_COLUMNS, costs(found))]
    return lines


def costs(found: Mapping[str, Json]) -> dict[str, Json]:
    """The measured cost rows, each relative to its batch of 1."""
    rows: dict[str, Json] = {}
    for (method, card), published in COSTS.items():
        first = found.get(f"cost: {method}, {card}, batch 1")
        for batch in published:
            row = found.get(f"cost: {method}, {card}, batch {batch}")
            if row is not None and first is not None:
                relative = {"relative": row["cost"] / first["cost"],
                            "published_relative": row["published"] / first["published"]}  # fmt: skip
                rows[f"{method}, {card}, batch {batch}"] = row | relative
    return rows
