"""Verbs that measure: bench."""

from __future__ import annotations

import argparse
from pathlib import Path


def bench(args: argparse.Namespace) -> None:
    """measure a grid of settings and write its table"""
    from simpletune.bench import memory, quality, study

    if args.grid == "memory":
        print(memory.run(args.out, args.minutes, args.rows))
    elif args.grid == "study":
        print(study.run(args.out, args.minutes, args.rows, args.model, args.overrides))
    else:
        print(quality.run(args.out, args.prompts, args.minutes, args.rows, args.overrides))


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench``."""
    parser.add_argument("grid", choices=["memory", "quality", "study"], metavar="GRID", help="memory, quality or study")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="changes to every row's configuration")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu"), help="the folder of the results")
    parser.add_argument("--rows", default="", help="only rows whose names hold this")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no row after so many (default: 8)")
    parser.add_argument("--model", help="study: a hub name, a folder or a file (default: the tiny model)")
    parser.add_argument("--prompts", type=int, default=100, help="quality: prompts for each score (default: 100)")


VERBS = {"bench": (bench, bench_arguments)}
