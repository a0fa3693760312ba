"""The verb that examines or measures the machine: doctor."""

from __future__ import annotations

import argparse
from pathlib import Path

from simpletune.apps.cli.arguments import JSON_HELP, add_overrides, positive, seconds
from simpletune.system.options import UserError
from simpletune.system.startup import import_libraries

CACHE = Path(".cache")
SECONDS = 110.0  # of a calibration


def doctor(args: argparse.Namespace) -> None:
    """check this machine, and train 20 steps of each precision; --out writes a file for bug reports"""
    if args.calibrate:
        return calibrate(args)
    for name in ("config", "device", "cache", "seconds"):
        if getattr(args, name) is not None:
            given = "CONFIG" if name == "config" else f"--{name}"
            raise UserError(f"doctor: {given} belongs to --calibrate. Leave it out, or add --calibrate")
    if args.bench:
        from simpletune.commands.doctor.bench import bench

        if args.json or not args.train:
            raise UserError("doctor: --bench takes neither --json nor --no-train; what it prints is JSON")
        return bench(args.bench, args.out)
    from simpletune.commands.doctor.doctor_command import doctor as run

    run(args.out, args.train, args.json, args.steps, args.notify)


def calibrate(args: argparse.Namespace) -> None:
    """Measure the speed of this machine's card or CPU, or tune the int8 kernels for a run."""
    if args.json or args.notify or not args.train:
        raise UserError("doctor: --calibrate takes none of --json, --notify, --no-train. Leave them out")
    if args.config is not None:
        import_libraries()
        from simpletune.estimate.tune_ahead import tune_ahead

        return tune_ahead(args.config, args.overrides)
    from simpletune.estimate.timing.calibrate import calibrate as run

    run(args.device or "cuda", args.out, args.cache or CACHE, SECONDS if args.seconds is None else args.seconds)


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-train", dest="train", action="store_false", help="only check; takes seconds")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the findings to it, for a bug report; what --bench and --calibrate measure, too",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
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
    speed = parser.add_argument_group("speed of this machine")
    about = "measure the speed of the card or CPU instead, for predictions of time; with CONFIG, tune for that run"
    instead.add_argument("--calibrate", action="store_true", help=about)
    about = "with --calibrate: instead of measuring, tune the int8 kernels for this run, which saves its first step "
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help=f"{about}the time")
    add_overrides(parser)
    speed.add_argument("--device", choices=("cuda", "cpu"), help="what --calibrate measures (default: cuda)")
    speed.add_argument(
        "--cache", type=Path, metavar="FOLDER", help=f"output.cache of your runs, for --calibrate (default: {CACHE})"
    )
    about = f"start no new measurement of --calibrate after this long (default: {SECONDS:g})"
    speed.add_argument("--seconds", type=seconds, metavar="S", help=about)


VERBS = {"doctor": (doctor, doctor_arguments)}
