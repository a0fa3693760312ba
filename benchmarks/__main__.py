"""``python -m benchmarks GRID``: measure a grid of settings, row by row, and write its table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simpletune.apps.cli.arguments import positive, size
from simpletune.system.devices import prepare_environment
from simpletune.system.options import UserError
from simpletune.system.redact import redact

Grid = Callable[[argparse.Namespace], object]


def memory(args: argparse.Namespace) -> object:
    """peak memory of SD3 Medium's training step at its real size, one change at a time"""
    from benchmarks import measured_memory, memory

    return (measured_memory if args.measure_only else memory).run(args.out, args.minutes, args.rows)


def estimate(args: argparse.Namespace) -> object:
    """predicted and measured memory, for the memory grid and the published study"""
    from benchmarks import estimate

    return estimate.run(args.out, args.minutes, args.rows)


def dry(args: argparse.Namespace) -> object:
    """memory that torch's CUDA allocator hands out on a simulated card, compared with the prediction"""
    from benchmarks import dry

    return dry.run(args.out, args.minutes, args.rows, args.card or ["L4"], args.predict)


def host(args: argparse.Namespace) -> object:
    """processor seconds of a step on the host, by cause, beside diffusers and peft, on a simulated card"""
    from benchmarks import host

    return host.run(args.out, args.minutes, args.rows)


def peaks(args: argparse.Namespace) -> object:
    """peak memory that a peer measured, beside ours predicted and diffusers with peft on a simulated card"""
    from benchmarks import peaks

    return peaks.run(args.out, args.minutes, args.rows)


def edges(args: argparse.Namespace) -> object:
    """whether training treats the edges of a picture as its middle: gradients, autoencoder and drawn pictures"""
    from benchmarks import edges

    return edges.run(args.out, args.minutes, args.rows)


def quality(args: argparse.Namespace) -> object:
    """what precisions, adapters and memory levers cost in quality, on the tiny SD3"""
    from benchmarks import quality

    return quality.run(args.out, args.prompts, args.minutes, args.rows, args.overrides)


def masks(args: argparse.Namespace) -> object:
    """whether training with masks leaves the background alone, on the tiny SD3"""
    from benchmarks import masks

    return masks.run(args.out, args.prompts, args.minutes, args.rows)


def inpainting(args: argparse.Namespace) -> object:
    """whether a plain UNet learns to inpaint, on the tiny SDXL"""
    from benchmarks import inpainting

    return inpainting.run(args.out, args.prompts, args.minutes, args.rows)


def prior(args: argparse.Namespace) -> object:
    """how far a class drifts while a run learns one subject of it, without and with prior preservation"""
    from benchmarks import prior

    return prior.run(args.out, args.prompts, args.minutes, args.rows, args.overrides)


def choice(args: argparse.Namespace) -> object:
    """whether the chosen checkpoint is better than the last one, on the tiny SD3"""
    from benchmarks import choice

    return choice.run(args.out, args.prompts, args.minutes, args.rows, args.overrides, args.set)


def inference(args: argparse.Namespace) -> object:
    """seconds, memory and cost of a picture, compared with plain diffusers"""
    from benchmarks import inference

    workload = inference.Workload(args.model or inference.DEMO, args.size, args.steps, args.rounds, args.device)
    return inference.run(args.out, args.minutes, args.rows, inference.merge_prices(args.price, args.prices), workload)


def study(args: argparse.Namespace) -> object:
    """full fine-tuning compared with LoRA of rank 64, 16 and 1"""
    from benchmarks import study

    return study.run(args.out, args.minutes, args.rows, args.model, args.overrides)


def vertex(args: argparse.Namespace) -> object:
    """Stable Diffusion 1.5: counted and predicted figures, compared with the Vertex report's"""
    from benchmarks import vertex

    return vertex.run(args.out, args.minutes, args.rows)


def recipe(args: argparse.Namespace) -> object:
    """what the demo's training reaches over its steps, five seeds each, on the tiny SD3"""
    from benchmarks import recipe

    return recipe.run(args.out, args.prompts, args.minutes, args.rows, args.overrides)


def vertex_quality(args: argparse.Namespace) -> object:
    """the Vertex report's quality figures on the tiny SD3: fidelity over steps, batch size and learning rate, cost"""
    from benchmarks import vertex_quality

    return vertex_quality.run(args.out, args.prompts, args.minutes, args.rows, args.overrides)


def student_study(args: argparse.Namespace) -> object:
    """full fine-tuning and LoRA of rank 64, 16 and 1 on the tiny SD3: fidelity, drift, size, seconds"""
    from benchmarks import student_study

    return student_study.run(args.out, args.prompts, args.minutes, args.rows, args.overrides)


def int8(args: argparse.Namespace) -> object:
    """numerical error of int8 products"""
    from benchmarks import int8

    return int8.run(args.out, args.minutes, args.rows, args.overrides)


def convolutions(args: argparse.Namespace) -> object:
    """seconds and memory of frozen int8 convolutions"""
    from benchmarks import convolutions

    return convolutions.run(args.out, args.minutes, args.rows)


def methods(args: argparse.Namespace) -> object:
    """seconds and predicted memory of other adapters' steps, compared with LoRA's, at SD3 Medium's width"""
    from benchmarks import methods

    return methods.run(args.out, args.minutes, args.rows)


def which_method(args: argparse.Namespace) -> object:
    """every training method at several sizes on the tiny SD3: fidelity, drift, size, time, predicted memory"""
    from benchmarks import which_method

    return which_method.run(args.out, args.prompts, args.minutes, args.rows, args.overrides)


def speed(args: argparse.Namespace) -> object:
    """seconds per step, compared with the device's rates and diffusers' recipe"""
    from benchmarks import speed

    return speed.run(args.out, args.minutes, args.rows, args.model, args.device)


def times(args: argparse.Namespace) -> object:
    """predicted and measured seconds of a step on this machine's CPU; needs simpletune calibrate --device cpu"""
    from benchmarks import times

    return times.run(args.out, args.minutes, args.rows, args.calibration)


def hours(args: argparse.Namespace) -> object:
    """predicted seconds, hours and prices, compared with published ones"""
    from benchmarks import hours

    return hours.run(args.out, args.minutes, args.rows)


def traffic(args: argparse.Namespace) -> object:
    """bytes, launches and products of a training step, counted without a GPU"""
    from benchmarks import traffic

    return traffic.run(args.out, args.minutes, args.rows)


def scaling(args: argparse.Namespace) -> object:
    """pictures a second on 1, 2 and more processes: measured here, predicted for up to 256 cards, beside published"""
    from benchmarks import scaling

    return scaling.run(args.out, args.minutes, args.rows)


def remote_cache(args: argparse.Namespace) -> object:
    """samples a second from a cache of files, of shards and on a web server, at real sizes; the index of a million"""
    from benchmarks import remote_cache

    return remote_cache.run(args.out, args.minutes, args.rows)


def kernels(args: argparse.Namespace) -> object:
    """machine code of the int8 kernels for several architectures; needs Triton, but no GPU"""
    from benchmarks import kernels

    return kernels.run(args.out, args.minutes, args.rows)


def elementwise(args: argparse.Namespace) -> object:
    """machine code of the kernels for norms and gates for several architectures; needs Triton, but no GPU"""
    from benchmarks import elementwise

    return elementwise.run(args.out, args.minutes, args.rows)


def cards(args: argparse.Namespace) -> object:
    """the page of what doctor --bench measured on users' cards, and the constants of time fitted to it"""
    from benchmarks import cards

    return cards.run(args.out)


def pair(args: argparse.Namespace) -> object:
    """complete runs compared with diffusers' DreamBooth LoRA recipe, on the CPU"""
    from benchmarks import pair

    return pair.run(args.out, args.rounds, args.steps, args.minutes, args.overrides)


# The arguments of each grid besides --out and --minutes.
GRIDS: dict[Grid, tuple[str, ...]] = {
    memory: ("rows", "measure-only"),
    estimate: ("rows",),
    dry: ("rows", "card", "predict"),
    host: ("rows",),
    peaks: ("rows",),
    edges: ("rows",),
    quality: ("rows", "prompts", "overrides"),
    recipe: ("rows", "prompts", "overrides"),
    masks: ("rows", "prompts"),
    inpainting: ("rows", "prompts"),
    prior: ("rows", "prompts", "overrides"),
    choice: ("rows", "prompts", "overrides", "set"),
    inference: ("rows", "model", "price", "prices", "size", "steps", "rounds", "device"),
    study: ("rows", "model", "overrides"),
    vertex: ("rows",),
    vertex_quality: ("rows", "prompts", "overrides"),
    student_study: ("rows", "prompts", "overrides"),
    int8: ("rows", "overrides"),
    convolutions: ("rows",),
    methods: ("rows",),
    which_method: ("rows", "prompts", "overrides"),
    speed: ("rows", "model", "device"),
    times: ("rows", "calibration"),
    hours: ("rows",),
    traffic: ("rows",),
    scaling: ("rows",),
    remote_cache: ("rows",),
    kernels: ("rows",),
    elementwise: ("rows",),
    cards: (),
    pair: ("steps", "rounds", "overrides"),
}


RESULTS = Path("benchmarks/results")
OUT: dict[Grid, Path] = {dry: RESULTS, cards: Path("docs/reference")}  # dry: a folder per card


def name_of(grid: Grid) -> str:
    """The word that runs a grid."""
    return grid.__name__.replace("_", "-")


def parser() -> argparse.ArgumentParser:
    """Build the parser with one subparser per grid, which takes only that grid's arguments."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=sys.modules[__name__].__doc__)
    grids = top.add_subparsers(dest="grid", required=True, metavar="GRID")
    for grid, names in GRIDS.items():
        sub = grids.add_parser(name_of(grid), help=grid.__doc__, description=grid.__doc__)
        sub.set_defaults(run=grid)
        sub.add_argument("--out", type=Path, default=OUT.get(grid, RESULTS / "cpu"), help="folder for the results")
        if grid is not cards:  # which measures nothing
            said = "start no row after this many minutes (default: 8)"
            sub.add_argument("--minutes", type=float, default=8.0, help=said)
        for name in names:
            flag = name if name == "overrides" else f"--{name}"
            sub.add_argument(flag, **ARGUMENTS[name])
    return top


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


ARGUMENTS: dict[str, dict[str, Any]] = {  # argparse's own keywords
    "calibration": {"type": Path, "metavar": "FILE", "help": "from simpletune calibrate (default: the cache's)"},
    "overrides": {"nargs": "*", "metavar": "key.path=value", "help": "changes to every row's configuration"},
    "rows": {"default": "", "help": "measure only these rows: names or parts of names, separated by ;"},
    "measure-only": {"action": "store_true", "help": "take predictions from results/cpu; needs a GPU"},
    "card": {"action": "append", "help": "card to simulate (default: L4); repeatable"},
    "predict": {"action": "store_true", "help": "predict the measured rows again and measure none"},
    "set": {
        "choices": ("first", "second", "third", "pictures"),
        "default": "first",
        "help": "set of fine-tunings (default: first)",
    },
    "prompts": {"type": int, "default": 100, "help": "prompts per score (default: 100)"},
    "model": {"help": "a hub name or a folder; default: the tiny model"},
    "size": {"type": size, "metavar": "WIDTHxHEIGHT", "help": "default: 1024x1024; the demo's 64x64"},
    "steps": {"type": positive, "help": "sampling steps (default: 28; demo: 12) or training steps (default: 20)"},
    "rounds": {"type": positive, "default": 5, "help": "rounds (default: 5)"},
    "device": {"choices": ("auto", "cuda", "cpu"), "default": "auto", "help": "default: auto"},
    "price": {
        "type": price,
        "action": "append",
        "default": [],
        "metavar": "NAME=PRICE",
        "help": "price of this machine per hour: adds a table with the cost of 1000 pictures; repeatable",
    },
    "prices": {"type": Path, "metavar": "FILE", "help": "JSON file of more prices: {NAME: {per_hour, as_of, source}}"},
}


def main(argv: list[str] | None = None) -> int:
    """Run one grid.

    Returns:
        0, or the exit code of a user's mistake after printing its message.
    """
    args = parser().parse_args(argv)
    prepare_environment()
    try:
        print(args.run(args))
    except UserError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
