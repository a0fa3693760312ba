"""``student-study``: measure on the tiny SD3 what the published study of four runs compared by eye.

Full fine-tuning and LoRA of rank 64, 16 and 1, with the settings of ``benchmarks study``, learn the demo's style. The
demo's encoders and its checker judge each result, and drift, bytes and seconds are added. Peaks and seconds of SD3
Medium are predicted and compared with those that the study published for an L4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from PIL import Image

from benchmarks import judged, memory
from benchmarks.judged import Studio
from benchmarks.quality import STYLE, Easel, Prompt, accuracies, drift, file_name, prompts_of, unrelated
from benchmarks.study import BOTH, DEMO, RUNS, TINY, TINY_RATE
from benchmarks.table import Results, describe_machine, listed, prompted, table
from simpletune.config.resolve import resolve_folders
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import demo_scenes
from simpletune.estimate.job_estimate import MIB, estimate
from simpletune.estimate.job_time import job_time
from simpletune.runs.folder import read_summary
from simpletune.system.gpus import find_card
from simpletune.system.options import Json

SEEDS = (0, 1, 2)
CARD = "L4"
GB = 10**9
# SD3 Medium, 1024 px, batch 1, quanto's int8 for LoRA, checkpointing, adamw_bf16. Its LoRA figures differ by 10 bytes
# per LoRA parameter, which matches LoRA on the image stream's attention in bf16 with a gradient and adamw_bf16's three
# states. The prediction here assumes that.
STUDY = (
    "precision.weights=int8-quanto", "adapter.targets=attention_image", "adapter.dtype=bf16",
    "optimizer.name=adamw_bf16", "memory.crop_positions=false", "model.t5_length=154",
)  # fmt: skip
PUBLISHED: dict[str, tuple[float, float, tuple[str, ...]]] = {
    "full": (20.26, 2.56, ("adapter.method=full", "precision.weights=bf16", *STUDY[3:])),
    "LoRA r64, int8": (3.68, 1.38, (*STUDY, "adapter.rank=64")),
    "LoRA r16, int8": (3.54, 1.89, (*STUDY, "adapter.rank=16")),
    "LoRA r1, int8": (3.50, 1.35, (*STUDY, "adapter.rank=1")),
}
"""Published for the L4: GB, seconds, by their size per step, and the settings."""
SCORES = (
    "subject", "prompt", "style", "asked", "others", "drift_captions", "drift_unrelated", "drift_pictures", "seconds",
)  # fmt: skip
COLUMNS = {
    "what": "", "of": "runs", "subject": "subject, tiny-dino", "prompt": "prompt, tiny-clip", "style": "checker: style",
    "asked": "checker: prompt", "others": "checker: other prompts", "style_range": "style, most - least",
}  # fmt: skip
DRIFTS = {
    "what": "", "drift_captions": "velocity drift, captions", "drift_unrelated": "velocity drift, unrelated prompts",
    "drift_pictures": "picture drift, other prompts", "parameters": "trained parameters", "bytes": "result, bytes",
    "seconds": "processor seconds", "train_mib": "training stage, predicted MiB",
}  # fmt: skip
REAL = {
    "what": "", "predicted_gb": "peak, predicted GB", "published_gb": "peak, published GB",
    "step": "seconds a step, predicted", "published_step": "seconds, published",
}  # fmt: skip
TITLE = "Full fine-tuning against LoRA of rank 64, 16 and 1: fidelity, drift, size"
ABOUT = f"""\
The demo's 32 pictures teach the tiny SD3 a style with the settings of `benchmarks study` ({TINY[0]}, 8 pictures
a step, LoRA over an int8 base, full in bf16). Means over seeds of training. *Subject* and *prompt*: likeness to the
training pictures and CLIP-T-like fidelity by the demo's encoders (`simpletune evaluate`, 12 prompts, 1 seed).
*Checker*, without any learned model, on pictures of other prompts and seeds: the share in the style where the prompt
has its word, prompt accuracy there, and prompt accuracy of prompts without the word."""
OF_DRIFT = """\
*Velocity drift*: change of the prediction against the base, as a share of the base's. *Picture drift*: mean absolute
difference, 0 to 1, from the base's picture from the same noise, for prompts without the style's word. *Processor
seconds* are measured and of the whole training on one thread; the training stage's peak is predicted for a card."""
OF_REAL = f"""\
SD3 Medium at the study's settings (1024 px, batch 1, checkpointing) on an {CARD}. Published: its plot's data, whose
"runtime per epoch" is of the size of a step. Predicted: the training stage's allocated bytes, GB of 10^9 bytes, and a
step by the card's data sheet, expected within -30% and +100%."""


def run(folder: Path, count: int, minutes: float, only: str, overrides: list[str]) -> Path:
    """Measure missing rows with ``count`` prompts per score of the checker; write page, chart and pictures."""
    results = Results(folder / "student_study", {}, prompted("student-study", count))
    study = Study(folder / "student_study", count, overrides)
    results.measure(study.rows(), minutes, only)
    if found := averaged(results.rows):
        judged.chart(results.stem.with_suffix(".png"), panels(found))
    strips = [("base", study.strip_file("base")), *((name, study.strip_file(name)) for name in RUNS)]
    judged.sheet_of(strips, folder / "student_study_pictures.png")
    return judged.write_page(results, page(results.command, found, results.rows), study.rows())


class Study:
    """The rows that train.

    Args:
        folder: for the pictures.
        count: prompts per score of the checker.
        overrides: for the configuration.
    """

    def __init__(self, folder: Path, count: int, overrides: list[str]):
        self.folder = folder
        self.studio = Studio(DEMO, overrides)
        self.styled, self.others = prompts_of(count, STYLE, demo_scenes.STYLE_TRIGGER), unrelated(count)
        self.of_base: dict[str, list[Image.Image]] = {}

    def rows(self) -> dict[str, Callable[[], Json]]:
        """Name every row and what measures or predicts it."""
        found: dict[str, Callable[[], Json]] = {}
        for seed in SEEDS:
            for name in RUNS:
                found[f"{name}, seed {seed}"] = partial(self.row, name, seed)
        return found | {f"{CARD}: {name}": partial(predicted_row, name) for name in PUBLISHED}

    def row(self, name: str, seed: int) -> Json:
        """Train once, and judge the result."""
        options = [*RUNS[name], *BOTH, *TINY, *TINY_RATE.get(name, ()), f"train.seed={seed}"]
        run = self.studio.tuned(options, f"{name}, seed {seed}")
        summary = read_summary(run.folder) or {}
        scores = self.studio.fidelity(run, seeds=1)
        easel = self.studio.at(run, max(scores))
        found = accuracies(easel.draw(self.styled), self.styled)
        others = easel.draw(self.others)
        if seed == SEEDS[0]:
            judged.strip(easel, self.shown(), self.strip_file(name))
        moved = summary["drift_after"]
        output = Path(summary["output"])
        files = [output] if output.is_file() else list(output.rglob("*.safetensors"))
        return {
            **scores[max(scores)],
            "style": found["style"], "asked": round(found["prompt"], 4),
            "others": round(accuracies(others, self.others)["prompt"], 4),
            "drift_captions": moved["training"], "drift_unrelated": moved["unrelated"],
            "drift_pictures": round(drift(others, self.base_images(run.config)), 4),
            "parameters": summary["trainable_parameters"], "bytes": sum(file.stat().st_size for file in files),
            "seconds": round(run.seconds, 1), "train_mib": train_mib(run.config),
        }  # fmt: skip

    def base_images(self, config: TrainConfig) -> list[Image.Image]:
        """Draw the other prompts with the base, in a run's precision."""
        key = config.precision.weights
        if key not in self.of_base:
            easel = Easel.of(config)
            self.of_base[key] = easel.draw(self.others)
            judged.strip(easel, self.shown(), self.strip_file("base"))
        return self.of_base[key]

    def shown(self) -> list[Prompt]:
        """Three prompts with the style's word, and one without."""
        return [*self.styled[:3], self.others[-1]]

    def strip_file(self, name: str) -> Path:
        """The file with a run's pictures."""
        return self.folder / f"{file_name(name)}.png"


def train_mib(config: TrainConfig) -> float:
    """Predict the peak of a run's training stage on a card."""
    return round(estimate(resolve_folders(config), find_card(CARD).capability).stages["train"].bytes / MIB, 1)


def predicted_row(name: str) -> Json:
    """Predict peak and seconds of one of the study's runs of SD3 Medium."""
    published, seconds, overrides = PUBLISHED[name]
    config, card = memory.config_of(overrides), find_card(CARD)
    prediction = estimate(config, card.capability)
    assert prediction.job is not None
    step = job_time(config, prediction.job, card).step.seconds
    return {
        "predicted_gb": round(prediction.stages["train"].bytes / GB, 3), "published_gb": published,
        "step": round(step, 4), "published_step": seconds,
    }  # fmt: skip


def averaged(rows: Mapping[str, Json]) -> dict[str, Json]:
    """Means over the measured seeds, by run."""
    found: dict[str, Json] = {}
    for name in RUNS:
        runs = [rows[key] for seed in SEEDS if (key := f"{name}, seed {seed}") in rows]
        if runs:
            same = {key: runs[0][key] for key in ("parameters", "bytes", "train_mib")}
            found[name] = {"of": len(runs), **judged.means(runs, SCORES), **same}
    return found


def panels(found: Mapping[str, Json]) -> list[Json]:
    """Style learned against drift elsewhere, and against the size of the result."""
    values = [{"run": name, **row} for name, row in found.items()]
    y = {"field": "style", "type": "quantitative", "title": "pictures in the style, by the checker"}
    axes = (
        ("Learned against drift", {"field": "drift_unrelated", "title": "velocity drift, unrelated prompts"}),
        ("Learned against size", {"field": "bytes", "title": "result, bytes", "scale": {"type": "log"}}),
    )
    return [
        {"title": title, "width": 320, "height": 260, "data": {"values": values},
         "encoding": {"x": {"type": "quantitative", **x}, "y": y},
         "layer": [{"mark": {"type": "point", "filled": True, "size": 70}},
                   {"mark": {"type": "text", "dy": -11}, "encoding": {"text": {"field": "run"}}}]}
        for title, x in axes
    ]  # fmt: skip


def page(command: str, found: Mapping[str, Json], rows: Mapping[str, Json]) -> list[str]:
    """Lay out the Markdown page."""
    machine = listed(command, describe_machine())
    real = {name: rows[key] for name in PUBLISHED if (key := f"{CARD}: {name}") in rows}
    lines = [f"# {TITLE}", "", ABOUT, "", *machine, "", *table(COLUMNS, found)]
    lines += ["", "## Drift, size and time", "", OF_DRIFT, "", *table(DRIFTS, found)]
    return [*lines, "", "## SD3 Medium", "", OF_REAL, "", *table(REAL, real)]
