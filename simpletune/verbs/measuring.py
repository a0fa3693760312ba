"""Verbs that measure: bench."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from simpletune.generate_arguments import positive, size

GRIDS = ("memory", "estimate", "quality", "inference", "study", "int8", "speed", "pair")


def bench(args: argparse.Namespace) -> None:
    """measure a grid of settings and write its table"""
    from simpletune.bench import estimate, inference, int8, memory, pair, quality, speed, study

    asked = {"minutes": args.minutes, "only": args.rows, "prices": dict(args.price), "rounds": args.rounds}
    more = {"size": args.size, "steps": args.steps, "device": args.device}
    grids: dict[str, Callable[[], object]] = {
        "memory": lambda: memory.run(args.out, args.minutes, args.rows),
        "estimate": lambda: estimate.run(args.out, args.minutes, args.rows),
        "quality": lambda: quality.run(args.out, args.prompts, args.minutes, args.rows, args.overrides),
        "inference": lambda: inference.run(args.out, args.model or inference.DEMO, **asked, **more),
        "study": lambda: study.run(args.out, args.minutes, args.rows, args.model, args.overrides),
        "int8": lambda: int8.run(args.out, args.minutes, args.rows, args.overrides),
        "speed": lambda: speed.run(args.out, args.minutes, args.rows, args.model, args.device),
        "pair": lambda: pair.run(args.out, args.rounds, args.steps, args.minutes, args.overrides),
    }
    print(grids[args.grid]())


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench``."""
    parser.add_argument("grid", choices=GRIDS, metavar="GRID", help=", ".join(GRIDS))
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="changes to every row's configuration")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu"), help="the folder of the results")
    parser.add_argument("--rows", default="", help="only rows whose names hold this")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no row after so many (default: 8)")
    parser.add_argument("--prompts", type=int, default=100, help="quality: prompts for each score (default: 100)")
    parser.add_argument(
        "--model", help="inference, study: a hub name or a folder (default: the tiny model); speed: demo"
    )
    mine = parser.add_argument_group("inference; --device also speed, --steps and --rounds also pair")
    mine.add_argument("--size", type=size, metavar="WIDTHxHEIGHT", help="default: 1024x1024; the demo's 64x64")
    mine.add_argument("--steps", type=positive, help="sampling steps (default: 28; the demo's 12); of training (20)")
    mine.add_argument("--rounds", type=positive, default=5, help="rounds of which the fastest counts (default: 5)")
    mine.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: auto")
    mine.add_argument(
        "--price", type=price, action="append", default=[], metavar="NAME=PRICE",
        help="of an hour of this machine: adds a table of what 1000 pictures cost; several times",
    )  # fmt: skip


def price(text: str) -> tuple[str, float]:
    """NAME=PRICE, a price of an hour."""
    name, _, value = text.partition("=")
    try:
        hour = float(value)
    except ValueError:
        hour = -1.0
    if not name or not 0 <= hour < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=PRICE, such as spot=0.35")
    return name, hour


VERBS = {"bench": (bench, bench_arguments)}
