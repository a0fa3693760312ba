"""Verbs that know before: estimate, plan."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from simpletune.cli.config_arguments import CONFIG_HELP, add_config
from simpletune.options import UserError

ABOUT_DEVICE = "a card by name (L4, T4, RTX4090, ...) or by its memory (12GiB)"


def require_cards(names: Sequence[str]) -> None:
    """Look cards up before torch is loaded, which takes seconds.

    Raises:
        UserError: a name is not known.
    """
    from simpletune.cards import card_of

    for name in names:
        card_of(name)


def estimate(args: argparse.Namespace) -> None:
    """predict what a run takes: memory by stage and kind, host memory, disk; no GPU, no weights, no data"""
    require_cards([args.device] if args.device else [])
    from simpletune.estimate.estimate_command import compare_configs, estimate_config

    if args.compare:
        files = [word for word in args.compare if "=" not in word]
        overrides = [*(word for word in args.compare if "=" in word), *args.overrides]
        print(compare_configs([Path(file) for file in files], overrides, args.device, args.picture, args.json))
    else:
        print(estimate_config(args.config, args.overrides, args.device, args.reserve, args.json))


def estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``estimate``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help=CONFIG_HELP)
    what.add_argument("--compare", nargs="+", metavar="CONFIG", help="several configurations side by side")
    about = "changes to it, such as train.steps=30"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help=about)
    parser.add_argument("--json", action="store_true", help="print figures for programs")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="with --compare: stacked bars, as .svg or .png")
    parser.add_argument("--device", metavar="CARD", help=ABOUT_DEVICE)
    parser.add_argument("--reserve", type=float, default=0.0, metavar="GIB", help="what other programs hold of it")


def plan(args: argparse.Namespace) -> None:
    """find the settings that fit on a card and should be fastest; or the largest batch by card"""
    if not args.batches:
        if not args.device or len(args.device) > 1:
            raise UserError("--device: say which card the run should fit on, as in --device L4 or --device 8GiB")
        if args.json:
            raise UserError("--json: goes with --batches. Add --batches, or leave --json out")
    require_cards(args.device or [])
    from simpletune.estimate.plan_command import batches, plan_config

    if args.batches:
        print(batches(args.config, args.overrides, args.device or [], args.json))
        return
    print(plan_config(args.config, args.overrides, args.device[0], args.reserve, args.goal, args.out))


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``plan``."""
    add_config(parser)
    parser.add_argument("--device", metavar="CARD", action="append", help=ABOUT_DEVICE + "; several with --batches")
    parser.add_argument("--reserve", type=float, default=0.0, metavar="GIB", help="what other programs hold of it")
    goals = ("fastest", "largest-batch", "highest-resolution")
    parser.add_argument("--goal", choices=goals, default="fastest", help="default: fastest")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write them (default: CONFIG_CARD.json)")
    parser.add_argument("--batches", action="store_true", help="print the largest batch by card and resolution instead")
    parser.add_argument("--json", action="store_true", help="with --batches: print figures for programs")


VERBS = {"estimate": (estimate, estimate_arguments), "plan": (plan, plan_arguments)}
