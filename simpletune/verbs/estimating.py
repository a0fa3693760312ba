"""Verbs that know before: estimate, plan."""

from __future__ import annotations

import argparse
from pathlib import Path


def estimate(args: argparse.Namespace) -> None:
    """predict what a run takes: memory by stage and kind, host memory, disk; no GPU, no weights, no data"""
    from simpletune.ask import compare_configs, estimate_config

    if args.compare:
        files = [word for word in args.compare if "=" not in word]
        overrides = [*(word for word in args.compare if "=" in word), *args.overrides]
        print(compare_configs([Path(file) for file in files], overrides, args.device, args.picture, args.json))
    else:
        print(estimate_config(args.config, args.overrides, args.device, args.reserve, args.json))


def estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``estimate``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="a JSON file, such as configs/demo.json")
    what.add_argument("--compare", nargs="+", metavar="CONFIG", help="several configurations side by side")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="changes to it, such as train.steps=30")
    parser.add_argument("--json", action="store_true", help="print figures for programs")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="with --compare: stacked bars, as .svg or .png")
    add_device(parser)


def add_device(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Arguments that say what a run should fit on."""
    about = "a card by name (L4, T4, RTX4090, ...) or by its memory (12GiB)"
    parser.add_argument("--device", metavar="CARD", required=required, help=about)
    parser.add_argument("--reserve", type=float, default=0.0, metavar="GIB", help="what other programs hold of it")


VERBS = {"estimate": (estimate, estimate_arguments)}
