"""Verbs that predict before anything runs: estimate, plan."""

from __future__ import annotations

import argparse
from pathlib import Path

from simpletune.apps.cli.arguments import (
    CONFIG_HELP,
    JSON_HELP,
    add_config,
    add_overrides,
    gigabytes,
    positive,
)
from simpletune.system.console import verbose
from simpletune.system.options import UserError
from simpletune.system.startup import import_libraries

ABOUT_DEVICE = "a card by name (L4, T4, RTX4090, ...) or by memory (12GiB)"
ABOUT_PRICES = "JSON file of your prices: {CARD: {per_hour, as_of, source}} (default: output.prices)"


def _import() -> None:
    """Import torch and the rest, the schema first: pydantic finds docstrings faster while few modules are loaded."""
    import simpletune.config.schema  # noqa: F401

    import_libraries()


def estimate(args: argparse.Namespace) -> None:
    """predict memory, disk, time and price of a run on one or several cards; needs no GPU, weights or data"""
    from simpletune.system.gpus import find_card

    for name in (args.device or "").split(","):  # before torch is imported, which takes seconds
        if name.strip():
            find_card(name)
    if args.compare and "," in (args.device or ""):
        raise UserError(
            "--compare: takes one card. Compare configurations on one, or one configuration on several cards"
        )
    from simpletune.estimate.estimate_command import compare_configs, estimate_config
    from simpletune.estimate.simulate.processes import simulate_one_of

    if args.processes < 1 or (args.compare and args.processes > 1):
        raise UserError("--processes: use a number of at least 1, without --compare, or leave it out")
    if args.compare:
        files = [word for word in args.compare if "=" not in word]
        overrides = [*(word for word in args.compare if "=" in word), *args.overrides]
        print(compare_configs([Path(file) for file in files], overrides, args.device, args.picture, args.json))
        return
    if args.processes > 1 and "," in (args.device or ""):
        raise UserError(
            "--processes: hours and prices are predicted for one process only. Name one card, or leave out --processes"
        )
    with simulate_one_of(args.processes), verbose():  # what is settled for the run is a part of the answer
        print(estimate_config(args.config, args.overrides, args.device, args.reserve, args.json, args.prices))


def estimate_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help=CONFIG_HELP)
    what.add_argument("--compare", nargs="+", metavar="CONFIG", help="compare several configurations side by side")
    add_overrides(parser)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="with --compare: write stacked bars to a .svg or .png file"
    )
    parser.add_argument("--device", metavar="CARD", help=ABOUT_DEVICE + "; separate several with commas")
    parser.add_argument("--prices", type=Path, metavar="FILE", help=ABOUT_PRICES)
    parser.add_argument(
        "--processes", type=positive, default=1, metavar="N", help="predict each of N processes; memory only"
    )
    add_reserve(parser)


def add_reserve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reserve", type=gigabytes, default=0.0, metavar="GIB", help="device memory that other programs use"
    )


def plan(args: argparse.Namespace) -> None:
    """find the fastest settings that fit on a card, the cheapest of several cards, or the largest batch per card"""
    names = [name for given in args.device or [] for name in given.split(",") if name.strip()]
    if not args.batches and not names:
        raise UserError("--device: name the card that the run must fit on, as in --device L4 or --device 8GiB")
    from simpletune.system.gpus import find_card

    cards = [find_card(name) for name in names]  # before torch is imported, which takes seconds
    _import()
    from simpletune.estimate.plan_command import describe_batches, plan_config

    if args.batches:
        print(describe_batches(args.config, args.overrides, names, args.json))
        return
    settings = plan_config(
        args.config,
        args.overrides,
        cards,
        args.goal,
        reserve=args.reserve,
        prices=args.prices,
        out=args.out,
        as_json=args.json,
    )
    print(settings)


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--device", metavar="CARD", action="append", help=ABOUT_DEVICE + "; separate several with commas"
    )
    add_reserve(parser)
    goals = ("fastest", "cheapest", "largest-batch", "highest-resolution")
    parser.add_argument(
        "--goal",
        choices=goals,
        default="fastest",
        help="default: fastest; with several cards, fastest and cheapest choose one",
    )
    parser.add_argument("--prices", type=Path, metavar="FILE", help=ABOUT_PRICES)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a configuration with the settings")
    parser.add_argument(
        "--batches", action="store_true", help="print the largest batch per card and resolution instead"
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


VERBS = {"estimate": (estimate, estimate_arguments), "plan": (plan, plan_arguments)}
