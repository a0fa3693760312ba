"""``cards``: the table of what ``simpletune doctor --bench`` measured on users' cards, and the constants fitted to it.

``benchmarks/results/cards/`` takes one such file a card and is empty until a card has run. A fit starts from today's
constants of ``timing/datasheet.py``, predicts every run as ``estimate`` does, and prints what would predict them best;
a person takes the figures over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.table import table
from simpletune.commands.doctor.bench import RUNS, CardFile, read_card_file
from simpletune.estimate.timing import datasheet
from simpletune.estimate.timing.datasheet import NARROW, PRODUCTS, DatasheetSpeeds
from simpletune.estimate.timing.sections import StreamWork
from simpletune.estimate.timing.speeds import HostSpeeds
from simpletune.estimate.timing.timeline import step_seconds
from simpletune.system.atomic import write_text
from simpletune.system.console import say
from simpletune.system.gpus import GIB, Card, card_named_by_driver, cards_like
from simpletune.system.options import UserError

FOLDER = Path("benchmarks/results/cards")
PAGE = "cards.md"
SHARED = ("OF_BANDWIDTH", "CONVOLUTION", "HOST")
TOWARDS = 0.05  # how strongly a fit is drawn to today's constants, which few runs separate
STEP = 0.01  # of a constant's logarithm, for slopes
COLUMNS = {
    "what": "card, run", "predicted_mib": "predicted peak, MiB", "measured_mib": "measured, MiB", "memory": "error",
    "predicted_seconds": "predicted s/step", "seconds": "measured", "least": "least", "time": "measured / predicted",
    "core": "core, after / before", "left_out": "",
}  # fmt: skip
ABOUT = """\
# Measured on users' cards

Which peak and how many seconds a step has `simpletune doctor --bench` measured, beside what was predicted? SD3 Medium
or SD 1.5 at their real size with random weights. `python -m benchmarks cards` writes this page from the files of
[benchmarks/results/cards](../../benchmarks/results/cards), one a card. To send yours in, run
`simpletune doctor --bench` (within ten minutes) and add its file there in a pull request."""
EMPTY = "No file has been sent in yet: no card has been measured, and times are predicted from today's constants."

Scales = dict[tuple[str, str], float]
"""Factors on the constants of ``timing/datasheet.py``, by name and key; without a key, all values share one."""


@dataclass(frozen=True)
class Sample:
    """A measured step, and its recorded work."""

    card: Card
    host: HostSpeeds
    sections: Sequence[StreamWork]
    seconds: float

    def predicted(self) -> float:
        return step_seconds(self.sections, DatasheetSpeeds(self.card, self.host)).seconds


def run(out: Path, folder: Path = FOLDER) -> Path:
    """Write the table of the files in ``folder`` into ``out``.

    Raises:
        UserError: files are broken or no card's; each is named, and nothing is written.
    """
    files = read_all(folder)
    text = page(files, samples_of(files))
    if not files:
        say(f"bench   {folder} holds no file yet: the page says so")
    write_text(out / PAGE, text)
    return out / PAGE


def read_all(folder: Path) -> list[CardFile]:
    """Read the folder's files; a missing folder is empty.

    Raises:
        UserError: files are broken, a processor's, or not named as their card.
    """
    files, wrong = [], []
    for place in sorted(each for each in folder.glob("*") if not each.name.startswith(".")):
        try:
            file = read_card_file(place)
        except UserError as error:
            wrong.append(str(error))
            continue
        if file.capability is None:
            wrong.append(f"{place}: measured on a processor, not on a card. Remove it")
        elif place.name != file.file_name:
            wrong.append(f"{place}: one file a card, named after it. Rename it to {file.file_name}")
        files.append(file)
    if wrong:
        raise UserError("\n".join(wrong))
    return files


def page(files: Sequence[CardFile], samples: Sequence[Sample]) -> str:
    """The page: a row for each run, then today's constants beside the fitted ones."""
    lines = [ABOUT, ""]
    if not files:
        return "\n".join([*lines, EMPTY, ""])
    rows: dict[str, dict[str, Any]] = {}
    for file in files:
        size, said_by = (file.memory_bytes or 0) / GIB, {"driver": file.driver, **file.versions}
        versions = ", ".join(f"{name} {said_by.get(name) or 'unknown'}" for name in ("driver", "torch", "simpletune"))
        lines.append(f"- {file.card}, {size:.1f} GiB: {file.date}, {file.system}, {versions}")
        for run in file.runs:
            row = run.model_dump(exclude={"name", "host", "host_after"})
            if run.predicted_mib and run.measured_mib:
                row["memory"] = round(run.predicted_mib / run.measured_mib - 1, 4)
            if run.predicted_seconds and run.seconds:
                row["time"] = round(run.seconds / run.predicted_seconds, 3)
            if run.host and run.host_after:
                row["core"] = round(run.host_after.core / run.host.core, 2)
            rows[f"{file.file_name.removesuffix('.json')}: {run.name}"] = row
    lines += ["", *table(COLUMNS, rows)]
    if scales := fitted(samples):
        lines += ["", "## Constants of time, fitted", "",
                  "Factors that would predict these steps best, and the constants of `timing/datasheet.py` with them. "
                  f"{len(samples)} steps; drawn towards today's.", ""]  # fmt: skip
        now, then = with_scales({}), with_scales(scales)
        fits = {
            f"{name} {key}".strip(): {"factor": scale, "today": said(now[name], key), "fitted": said(then[name], key)}
            for (name, key), scale in scales.items()
        }
        lines += table({"what": "constant", "factor": "factor", "today": "today", "fitted": "fitted"}, fits)
    return "\n".join([*lines, ""])


def said(value: Any, key: str) -> str:
    """A constant's value as in Python, in three digits."""
    value = value.get(key, value) if isinstance(value, Mapping) else value
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {each:.3g}" for name, each in value.items())
    return ", ".join(f"{each:.3g}" for each in (value if isinstance(value, tuple) else (value,)))


def samples_of(files: Iterable[CardFile]) -> list[Sample]:
    """The measured steps of cards in the table of cards, for runs that the form still has."""
    found = []
    for file in files:
        major, minor = file.capability or [0, 0]
        card = card_named_by_driver(file.card, file.memory_bytes or 0, (major, minor))
        found += [
            Sample(card, run.host or HostSpeeds(core=file.core), recorded(run.name, (major, minor)), run.seconds)
            for run in file.runs
            if run.seconds and run.name in RUNS and card.tflops is not None
        ]
    return found


@cache
def recorded(name: str, capability: tuple[int, int]) -> Sequence[StreamWork]:
    """The work of a run's step on a card."""
    from simpletune.commands.doctor.bench_steps import run_config
    from simpletune.estimate.simulate.simulate import simulate

    return simulate(run_config(RUNS[name], capability), capability=capability).sections


def fitted(samples: Sequence[Sample]) -> Scales:
    """Fit factors on today's constants: least squares of the relative errors by Gauss and Newton's steps in logarithms,
    drawn towards 1. Without samples there are none: the constants are today's."""
    if not samples:
        return {}
    cards = {("PRODUCTS", key_of(sample.card)) for sample in samples}
    kernels = {("ATTENTION", DatasheetSpeeds(sample.card).attention("fp16", NARROW)) for sample in samples}
    names = [*sorted(cards), *sorted(kernels), *((name, "") for name in SHARED)]
    found = np.zeros(len(names))

    def errors(logs: np.ndarray) -> np.ndarray:
        with applied(dict(zip(names, np.exp(logs), strict=True))):
            return np.array([math.log(sample.predicted() / sample.seconds) for sample in samples])

    for _ in range(20):
        here = errors(found)
        slopes = np.array([errors(found + STEP * unit) - here for unit in np.eye(len(names))]).T / STEP
        normal = slopes.T @ slopes + TOWARDS**2 * np.eye(len(names))
        change = np.linalg.solve(normal, -slopes.T @ here - TOWARDS**2 * found)
        found = found + np.clip(change, -0.5, 0.5)
        if np.abs(change).max() < 1e-4:
            break
    return {name: round(float(scale), 4) for name, scale in zip(names, np.exp(found), strict=True)}


def applied(scales: Scales) -> AbstractContextManager[Any]:
    """Predict with scaled constants within this context."""
    return mock.patch.multiple(datasheet, **with_scales(scales))


def with_scales(scales: Scales) -> dict[str, Any]:
    """The constants of a data sheet's predictions, scaled; a card without a measured rate gets one."""
    constants: dict[str, Any] = {
        "PRODUCTS": dict(datasheet.PRODUCTS), "ATTENTION": dict(datasheet.ATTENTION), "HOST": dict(datasheet.HOST),
        "OF_BANDWIDTH": datasheet.OF_BANDWIDTH, "CONVOLUTION": datasheet.CONVOLUTION,
    }  # fmt: skip
    for (name, key), scale in scales.items():
        value = constants[name]
        if name == "PRODUCTS":  # the rate of fp32 is hardly part of a step
            rate, fp32 = value.get(key) or datasheet.products_of(next(c for c in datasheet.CARDS if c.name == key))
            value[key] = (rate * scale, fp32)
        elif name == "ATTENTION":
            value[key] = tuple(share * scale for share in value[key])
        elif name == "HOST":
            constants[name] = {task: seconds * scale for task, seconds in value.items()}
        else:
            constants[name] = value * scale
    return constants


def key_of(card: Card) -> str:
    """The card's key among ``PRODUCTS``: as it is there, else as in the table of cards."""
    like = min(cards_like(card.name), key=lambda each: abs(each.gib - card.gib))
    return next((key for key in (like.name, like.name.partition("-")[0]) if key in PRODUCTS), like.name)
