"""Verbs that judge runs: evaluate, report."""

from __future__ import annotations

import argparse
from pathlib import Path

from simpletune.apps.cli.arguments import (
    DEVICE_HELP,
    PRECISION_HELP,
    add_verbose,
    guidance,
    non_negative,
    number,
    positive,
    seed,
    size,
    steps,
    strength,
    tile,
)
from simpletune.system.options import UserError
from simpletune.system.startup import import_libraries


def evaluate(args: argparse.Namespace) -> None:
    """score every checkpoint of a run and its base: subject, prompt, diversity, copying; choose the best"""
    if args.choose is not None:
        choose_step(args.evaluated, args.choose)
        return
    import_libraries()
    from simpletune.commands.evaluate.evaluate import evaluate as run

    run(args)


def choose_step(name: Path, step: str) -> None:
    """Choose a checkpoint as the run's best, or with ``auto`` choose again by the scores; print the choice."""
    from simpletune.runs.best_checkpoint import choose_best, put_choice
    from simpletune.runs.weights_names import find_whole_run
    from simpletune.system.console import say

    run = find_whole_run(str(name), "--choose names the checkpoint")
    if step != "auto" and not step.isdecimal():
        raise UserError(f"--choose {step}: this is not a step. Give a number, or auto")
    put_choice(run, None if step == "auto" else int(step))
    best = choose_best(run)
    say(f"{run}: no checkpoint" if best is None else f"best    {best.describe(run)}")


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("evaluated", type=Path, metavar="RUN", help="a run folder, such as runs/demo")
    parser.add_argument(
        "--encoders",
        nargs="+",
        metavar="NAME",
        help="folders or hub names of DINO, DINOv2, CLIP or SigLIP models (default: the demo's own two)",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="text file, one prompt per line; or dreambooth-object, dreambooth-live, demo, run (default: demo or run)",
    )
    parser.add_argument("--token", metavar="WORD", help="rare word for the subject, {token} in prompts; not scored")
    parser.add_argument("--class", dest="kind", metavar="WORD", help="what the subject is, {class} in prompts")
    parser.add_argument("--strengths", nargs="+", type=strength, metavar="S", help="LoRA strengths (default: 1)")
    parser.add_argument("--seeds", type=positive, default=2, help="pictures per prompt (default: 2)")
    parser.add_argument("--seed", type=seed, help="seed of the first picture's noise (default: 10000)")
    parser.add_argument("--steps", type=steps, help="number of sampling steps (default: the run's)")
    parser.add_argument("--guidance", type=guidance, help="classifier-free guidance scale (default: the run's)")
    parser.add_argument("--size", type=size, metavar="WIDTHxHEIGHT", help="size in pixels (default: the run's)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help=DEVICE_HELP)
    parser.add_argument("--precision", choices=("bf16", "fp32", "int8", "int8-quanto", "nf4"), help=PRECISION_HELP)
    parser.add_argument("--batch-size", type=positive, metavar="N", help="pictures per batch (default: 1)")
    parser.add_argument("--resident-blocks", type=non_negative, metavar="N", help="keep N blocks on the device")
    parser.add_argument("--vae-tile", type=tile, metavar="PX", help="decode in tiles of PX pixels; approximate")
    parser.add_argument(
        "--choose", metavar="STEP", help="choose this step as the best without drawing; auto: by the scores"
    )
    parser.add_argument("--predict", action="store_true", help="predict memory and time without drawing")
    add_verbose(parser)


def report(args: argparse.Namespace) -> None:
    """write an HTML page and a Markdown file about one run, or about several side by side"""
    from simpletune.runs.report import make_report, write_report

    made = make_report(args.runs, args.price)
    default = args.runs[0] / "report.html" if len(args.runs) == 1 else Path("report.html")
    for file in write_report(made, args.out or default):
        print(file)


def report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run folder, such as runs/demo")
    parser.add_argument(
        "--out",
        type=_page,
        metavar="FILE",
        help=".html file to write (default: report.html in the run's folder, or here for several runs)",
    )
    price = number("a price in dollars per hour, above 0 and below 10000", lambda value: 0 < value < 10_000)
    parser.add_argument("--price", type=price, metavar="DOLLARS_PER_HOUR", help="machine price, to report the cost")


def _page(text: str) -> Path:
    if not text.endswith(".html"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .html. The Markdown file gets the same name")
    return Path(text)


VERBS = {"evaluate": (evaluate, evaluate_arguments), "report": (report, report_arguments)}
