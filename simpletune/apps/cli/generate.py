"""Verbs that generate pictures: generate, compare."""

from __future__ import annotations

import argparse
from pathlib import Path

from simpletune.apps.cli.arguments import (
    DEVICE_HELP,
    MODULATION_HELP,
    OBJECTIVE_HELP,
    OBJECTIVES,
    OVERWRITE_HELP,
    PRECISION_HELP,
    RUNS_HELP,
    add_verbose,
    guidance,
    non_negative,
    positive,
    seed,
    share,
    show_first,
    size,
    steps,
    strength,
    tile,
)
from simpletune.system.startup import import_libraries

FIRST = ("--prompt", "--run", "--model", "--seeds", "--seed", "--size", "--out")  # of the options, in the short help


def generate(args: argparse.Namespace) -> None:
    """draw pictures with a run's result, a LoRA or the base model"""
    import_libraries()
    from simpletune.commands.generate.generate import generate as run

    run(args)


def generate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    about = "a LoRA file, a run, RUN@STEP or a hub name; repeat to combine several (default: the run's)"
    parser.add_argument("--lora", metavar="NAME[:SCALE]", action="append", help=about)
    parser.add_argument("--scale", type=strength, help="LoRA strength (default: 1)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--base", action="store_true", help="draw with the base model alone")
    kind.add_argument("--full", action="store_true", help="draw with the run's full model, or its LoRA merged")
    parser.add_argument("--fuse", action="store_true", help="merge the LoRA into the base weights, which is faster")
    about = "PNG file to write; several pictures get -000, -001, ... (default: next number in the run's inference/)"
    parser.add_argument("--out", "--output", dest="output", type=Path, metavar="FILE", help=about)
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE_HELP)
    show_first(parser, *FIRST, "--lora")


def compare(args: argparse.Namespace) -> None:
    """draw the same pictures with several models and show them side by side"""
    import_libraries()
    from simpletune.commands.generate.compare import compare as run

    run(args)


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL[:SCALE]",
        help="models to compare with the base: a run, RUN@STEP, a LoRA, a transformer's folder or a hub name "
        "(default: the run's result)",
    )
    parser.add_argument(
        "--lora", action="append", metavar="NAME[:SCALE]", help="draw with a LoRA at each --scale; repeatable"
    )
    parser.add_argument(
        "--scale", type=strength, action="append", help="LoRA strength; repeatable (default: 0.5 and 1)"
    )
    parser.add_argument("--checkpoints", action="store_true", help="add every checkpoint of each run")
    parser.add_argument("--predict", action="store_true", help="predict the memory first, and refuse what does not fit")
    parser.add_argument("--clip", metavar="NAME", help="CLIP model (folder or hub name) that scores prompt fit")
    parser.add_argument(
        "--dino", metavar="NAME", help="DINO model (folder or hub name) that scores likeness to the base"
    )
    parser.add_argument(
        "--out",
        "--output",
        dest="output",
        type=Path,
        metavar="FOLDER",
        help="new or empty folder to write (default: next number in the first run's compare/)",
    )
    show_first(parser, *FIRST, "--checkpoints")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", help="prompt; repeatable (default: the run's)")
    parser.add_argument("--seeds", type=positive, default=1, help="pictures per prompt (default: 1)")
    about = "a run or RUN@STEP that supplies the model and the defaults (default: the newest)"
    parser.add_argument("--run", type=Path, help=about)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help=RUNS_HELP)
    parser.add_argument("--model", help="base model: a hub name (owner/name) or a folder")
    parser.add_argument("--objective", choices=OBJECTIVES, help=f"with --model: {OBJECTIVE_HELP}")
    parser.add_argument("--negative-prompt", default=None, help="negative prompt for guidance")
    parser.add_argument("--steps", type=steps, help="number of sampling steps")
    parser.add_argument(
        "--guidance", type=guidance, help="classifier-free guidance scale; 1 disables it and halves the time"
    )
    parser.add_argument(
        "--size",
        type=size,
        metavar="WIDTHxHEIGHT",
        help="size in pixels, multiples of 16 (UNets: 8), such as 1024x1024",
    )
    parser.add_argument("--seed", type=seed, help="seed of the initial noise")
    parser.add_argument("--image", type=Path, help="start from this picture, centre-cropped to the size")
    parser.add_argument(
        "--mask", type=Path, help="inpainting: paint into --image where this picture of its shape is white"
    )
    about = "with --image: share of the steps to run, 0 to 1 (default: 0.6, with --mask 1)"
    parser.add_argument("--strength", type=share, help=about)
    about = "with --mask: put the pixels of --image back outside the mask, which the autoencoder changes"
    parser.add_argument("--paste", action="store_true", default=None, help=about)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help=DEVICE_HELP)
    parser.add_argument(
        "--embedding",
        action="append",
        metavar="FILE[:TOKEN]",
        help="a file of embeddings, used in prompts as TOKEN (default: its own); repeatable; adds to a run's own",
    )
    add_verbose(parser)
    memory = parser.add_argument_group("less memory")
    memory.add_argument("--precision", choices=("bf16", "fp32", "int8", "int8-quanto", "nf4"), help=PRECISION_HELP)
    memory.add_argument("--modulation", choices=("resident", "plan"), help=MODULATION_HELP)
    memory.add_argument(
        "--resident-blocks",
        type=non_negative,
        metavar="N",
        help="keep N blocks on the device and stream the others",
    )
    memory.add_argument("--vae-tile", type=tile, metavar="PX", help="decode in tiles of PX pixels; approximate")
    about = "leave out the T5 text encoder, which changes the pictures; only SD3 has one"
    memory.add_argument("--no-t5", action="store_true", default=None, help=about)
    speed = parser.add_argument_group("more speed")
    speed.add_argument("--batch-size", type=positive, metavar="N", help="pictures per batch (default: 1)")
    speed.add_argument(
        "--compile", action="store_true", help="compile each block with torch.compile; needs a C compiler"
    )
    speed.add_argument(
        "--reuse-guidance", type=positive, metavar="N", help="LOSSY: reuse each guidance difference for N steps"
    )


VERBS = {"generate": (generate, generate_arguments), "compare": (compare, compare_arguments)}
