"""``python -m benchmarks GRID``: measure a grid of settings, row by row, and write its table."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

from simpletune.apps.cli.arguments import positive, size
from simpletune.system.devices import prepare_environment
from simpletune.system.options import UserError
from simpletune.system.redact import redact


class Grid(NamedTuple):
    """What a grid measures, and its arguments besides --out and --minutes."""

    about: str
    takes: tuple[str, ...] = ("rows",)


JUDGED = ("rows", "prompts", "overrides")  # by the demo's checker
GRIDS: dict[str, Grid] = {
    "memory": Grid("peak memory of SD3 Medium's training step, one change at a time", ("rows", "measure-only")),
    "dry": Grid(
        "memory that torch's CUDA allocator hands out on a simulated card, compared with the prediction",
        ("rows", "card", "predict"),
    ),
    "host": Grid("processor seconds of a step on the host, by cause, beside diffusers and peft, on a simulated card"),
    "graphs": Grid(
        "passes replayed as CUDA graphs beside plain ones: bits, seconds, memory; then streamed weights whose copies "
        "are late; needs a GPU",
        ("rows", "overrides"),
    ),
    "h100": Grid("seconds of the steps measured on an H100, predicted again with the launches of its host"),
    "peaks": Grid(
        "peak memory that a peer measured, beside ours predicted and diffusers with peft on a simulated card"
    ),
    "edges": Grid("whether training treats the edges of a picture as its middle: gradients, autoencoder and pictures"),
    "quality": Grid("what precisions, adapters and memory levers cost in quality, on the tiny SD3", JUDGED),
    "recipe": Grid("what the demo's training reaches over its steps, five seeds each, on the tiny models", JUDGED),
    "inpainting": Grid("whether a plain UNet learns to inpaint, on the tiny SDXL", ("rows", "prompts")),
    "sliders": Grid(
        "whether a slider from prompts alone changes size and nothing else, on the tiny SD3", ("rows", "prompts")
    ),
    "choice": Grid("whether the chosen checkpoint is better than the last one, on the tiny SD3", (*JUDGED, "set")),
    "inference": Grid(
        "seconds, memory and cost of a picture, compared with plain diffusers",
        ("rows", "model", "price", "prices", "size", "steps", "rounds", "device"),
    ),
    "study": Grid("full fine-tuning compared with LoRA of rank 64, 16 and 1", ("rows", "model", "overrides")),
    "student_study": Grid("the same on the tiny SD3: fidelity, drift, size, seconds; SD3 Medium predicted", JUDGED),
    "vertex": Grid("Stable Diffusion 1.5: counted and predicted figures, compared with the Vertex report's"),
    "vertex_quality": Grid(
        "the Vertex report's quality figures on the tiny SD3: fidelity over steps, batch size and learning rate, cost",
        JUDGED,
    ),
    "int8": Grid("numerical error of int8 products", ("rows", "overrides")),
    "int8_cards": Grid("predicted seconds of steps with and without int8 products and gradients, by card"),
    "int8_quality": Grid("losses and pictures of runs with int8 products and gradients, three seeds each", JUDGED),
    "convolutions": Grid("seconds and memory of frozen int8 convolutions"),
    "methods": Grid(
        "seconds and predicted memory of other adapters' steps, compared with LoRA's, at SD3 Medium's width"
    ),
    "which_method": Grid(
        "every training method at several sizes on the tiny SD3: fidelity, drift, size, time, predicted memory", JUDGED
    ),
    "speed": Grid(
        "seconds per step, compared with the device's rates and diffusers' recipe", ("rows", "model", "device")
    ),
    "hours": Grid("predicted seconds, hours and prices, compared with published ones"),
    "traffic": Grid("bytes, launches and products of a training step, counted without a GPU"),
    "scaling": Grid(
        "pictures a second on 1, 2 and more processes: measured here, predicted for up to 256 cards, beside published"
    ),
    "kernels": Grid("machine code of the int8 kernels for several architectures; needs Triton, but no GPU"),
    "elementwise": Grid(
        "machine code of the kernels for norms and gates for several architectures; needs Triton, but no GPU"
    ),
    "cards": Grid("the page of what doctor --bench measured on users' cards, and constants of time fitted to it", ()),
}
"""The grids by their modules' names."""
RESULTS = Path("benchmarks/results")
OUT = {"dry": RESULTS, "cards": Path("docs/reference"), "h100": RESULTS / "gpu-h100"}  # dry: a folder per card


def price(text: str) -> tuple[str, float]:
    """Parse NAME=PRICE, a price per hour."""
    name, _, value = text.partition("=")
    try:
        hour = float(value)
    except ValueError:
        hour = -1.0
    if not name or not 0 <= hour < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=PRICE. Use, for example, spot=0.35")
    return name, hour


ARGUMENTS: dict[str, dict[str, Any]] = {  # argparse's own keywords; ``dest`` is run's argument
    "overrides": {"nargs": "*", "metavar": "key.path=value", "help": "changes to every row's configuration"},
    "rows": {
        "dest": "only", "default": "",
        "help": "measure only these rows: names or parts of names, separated by ;",
    },
    "measure-only": {"action": "store_true", "help": "take predictions from results/cpu; needs a GPU"},
    "card": {"dest": "cards", "action": "append", "help": "card to simulate (default: L4); repeatable"},
    "predict": {"dest": "again", "action": "store_true", "help": "predict the measured rows again and measure none"},
    "set": {
        "dest": "chosen", "choices": ("first", "second", "third", "pictures"), "default": "first",
        "help": "set of fine-tunings (default: first)",
    },
    "prompts": {"dest": "count", "type": int, "default": 100, "help": "prompts per score (default: 100)"},
    "model": {"help": "a hub name or a folder; default: the tiny model"},
    "size": {"type": size, "metavar": "WIDTHxHEIGHT", "help": "default: 1024x1024; the demo's 64x64"},
    "steps": {"type": positive, "help": "sampling steps (default: 28; demo: 12)"},
    "rounds": {"type": positive, "default": 5, "help": "rounds (default: 5)"},
    "device": {"choices": ("auto", "cuda", "cpu"), "default": "auto", "help": "default: auto"},
    "price": {
        "type": price, "action": "append", "default": [], "metavar": "NAME=PRICE",
        "help": "price of this machine per hour: adds a table with the cost of 1000 pictures; repeatable",
    },
    "prices": {"type": Path, "metavar": "FILE", "help": "JSON file of more prices: {NAME: {per_hour, as_of, source}}"},
}  # fmt: skip


def name_of(grid: str) -> str:
    """The word that runs a grid."""
    return grid.replace("_", "-")


def parser() -> argparse.ArgumentParser:
    """Build the parser with one subparser per grid, which takes only that grid's arguments."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=sys.modules[__name__].__doc__)
    grids = top.add_subparsers(dest="grid", required=True, metavar="GRID")
    for grid, (about, takes) in GRIDS.items():
        sub = grids.add_parser(name_of(grid), help=about, description=about)
        sub.set_defaults(module=grid)
        sub.add_argument("--out", type=Path, default=OUT.get(grid, RESULTS / "cpu"), help="folder for the results")
        if grid != "cards":  # which measures nothing
            said = "start no row after this many minutes (default: 8)"
            sub.add_argument("--minutes", type=float, default=8.0, help=said)
        for name in takes:
            sub.add_argument(name if name == "overrides" else f"--{name}", **ARGUMENTS[name])
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one grid.

    Returns:
        0, or the exit code of a user's mistake after printing its message.
    """
    given = vars(parser().parse_args(argv))
    prepare_environment()
    _, module, out = (given.pop(name) for name in ("grid", "module", "out"))
    if given.pop("measure_only", False):
        module = f"measured_{module}"
    try:
        print(importlib.import_module(f"benchmarks.{module}").run(out, **given))
    except UserError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
