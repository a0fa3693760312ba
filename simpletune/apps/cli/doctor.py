"""The verb that examines the machine: doctor."""

from __future__ import annotations

import argparse
from pathlib import Path

from simpletune.apps.cli.arguments import JSON_HELP, positive
from simpletune.system.options import UserError


def doctor(args: argparse.Namespace) -> None:
    """check this machine, and train 20 steps of each precision; --out writes a file for bug reports"""
    if args.bench:
        from simpletune.commands.doctor.bench import bench

        if args.json or not args.train:
            raise UserError("doctor: --bench takes neither --json nor --no-train; what it prints is JSON")
        return bench(args.bench, args.out)
    from simpletune.commands.doctor.doctor_command import doctor as run

    run(args.out, args.train, args.json, args.steps, args.notify)


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-train", dest="train", action="store_false", help="only check; takes seconds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the findings to it, for a bug report")
    parser.add_argument(
        "--bench",
        nargs="?",
        const="cuda",
        choices=("cuda", "cpu"),
        help="measure eight short runs on this card within ten minutes instead, with real sizes and random weights; "
        "writes their figures to --out (default: a file named after the card); cpu: try it with the tiny model",
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.add_argument("--notify", action="store_true", help="post a message to the URL in SIMPLETUNE_NOTIFY_URL")
    parser.add_argument("--steps", type=positive, default=20, help=argparse.SUPPRESS)  # fewer, for tests


VERBS = {"doctor": (doctor, doctor_arguments)}
