"""Arguments of ``generate``, ``compare`` and the inference scripts. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

RUNS_HELP = "folder that contains the runs (default: runs)"
PRECISION_HELP = "precision of the weights (default: the run's)"
MODULATION_HELP = "plan: keep the modulation weights, a third of the model, in host memory"
DEVICE_HELP = "default: the run's"
OVERWRITE_HELP = "replace an existing file at --out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``generate``; the run supplies the defaults."""
    _add_common(parser)
    about = "a LoRA file, a run, RUN@STEP or a hub name; repeat to combine several (default: the run's)"
    parser.add_argument("--lora", metavar="NAME[:SCALE]", action="append", help=about)
    parser.add_argument("--scale", type=float, default=1.0, help="LoRA strength (default: 1)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--base", action="store_true", help="draw with the base model alone")
    kind.add_argument("--full", action="store_true", help="draw with the run's full model, or its LoRA merged")
    parser.add_argument("--fuse", action="store_true", help="merge the LoRA into the base weights, which is faster")
    about = "PNG file to write; several pictures get -000, -001, ... (default: next number in the run's inference/)"
    parser.add_argument("--out", "--output", dest="output", type=Path, metavar="FILE", help=about)
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE_HELP)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``compare``: several models, prompts and seeds."""
    _add_common(parser)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL[:SCALE]",
        help="models to compare with the base: a run, RUN@STEP, a LoRA, a transformer's folder or a hub name "
        "(default: the run's result)",
    )  # fmt: skip
    parser.add_argument(
        "--lora", action="append", metavar="NAME[:SCALE]", help="draw with a LoRA at each --scale; repeatable"
    )
    parser.add_argument("--scale", type=float, action="append", help="LoRA strength; repeatable (default: 0.5 and 1)")
    parser.add_argument("--checkpoints", action="store_true", help="add every checkpoint of each run")
    parser.add_argument("--predict", action="store_true", help="predict the memory first, and refuse what does not fit")
    parser.add_argument("--clip", metavar="NAME", help="CLIP model (folder or hub name) that scores prompt fit")
    parser.add_argument(
        "--dino", metavar="NAME", help="DINO model (folder or hub name) that scores likeness to the base"
    )
    parser.add_argument(
        "--out", "--output", dest="output", type=Path, metavar="FOLDER",
        help="new or empty folder to write (default: next number in the first run's compare/)",
    )  # fmt: skip


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", help="prompt; repeatable (default: the run's)")
    parser.add_argument("--seeds", type=positive, default=1, help="pictures per prompt (default: 1)")
    about = "a run or RUN@STEP that supplies the model and the defaults (default: the newest)"
    parser.add_argument("--run", type=Path, help=about)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help=RUNS_HELP)
    parser.add_argument("--model", help="base model: a hub name (owner/name) or a folder")
    parser.add_argument("--negative-prompt", default=None, help="negative prompt for guidance")
    parser.add_argument("--steps", type=positive, help="number of sampling steps")
    parser.add_argument(
        "--guidance", type=float, help="classifier-free guidance scale; 1 disables it and halves the time"
    )
    parser.add_argument(
        "--size", type=size, metavar="WIDTHxHEIGHT", help="size in pixels, multiples of 16, such as 1024x1024"
    )
    parser.add_argument("--seed", type=int, help="seed of the initial noise")
    parser.add_argument("--image", type=Path, help="start from this picture, centre-cropped to the size")
    parser.add_argument("--strength", type=share, help="with --image: share of the steps to run, 0 to 1 (default: 0.6)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help=DEVICE_HELP)
    parser.add_argument(
        "--embedding", action="append", metavar="FILE[:TOKEN]",
        help="a file of embeddings, used in prompts as TOKEN (default: its own); repeatable; adds to a run's own",
    )  # fmt: skip
    memory = parser.add_argument_group("less memory")
    memory.add_argument("--precision", choices=("bf16", "fp32", "int8", "int8-quanto", "nf4"), help=PRECISION_HELP)
    memory.add_argument("--modulation", choices=("resident", "plan"), help=MODULATION_HELP)
    memory.add_argument(
        "--resident-blocks",
        type=non_negative_int,
        metavar="N",
        help="keep N blocks on the device and stream the others",
    )
    memory.add_argument("--vae-tile", type=tile, metavar="PX", help="decode in tiles of PX pixels; approximate")
    memory.add_argument("--no-t5", action="store_true", default=None, help="do not use the T5 text encoder")
    speed = parser.add_argument_group("more speed")
    speed.add_argument("--batch-size", type=positive, metavar="N", help="pictures per batch (default: 1)")
    speed.add_argument(
        "--compile", action="store_true", help="compile each block with torch.compile; needs a C compiler"
    )
    speed.add_argument(
        "--reuse-guidance", type=positive, metavar="N", help="LOSSY: reuse each guidance difference for N steps"
    )


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def size(text: str) -> tuple[int, int]:
    """Parse WIDTHxHEIGHT in pixels."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) >= 16 and int(part) % 16 == 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text} is not WIDTHxHEIGHT in multiples of 16, such as 1024x768")
    return int(parts[0]), int(parts[1])


def non_negative_int(text: str) -> int:
    """Parse a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)


def tile(text: str) -> int:
    """Parse the side of a tile in pixels."""
    if not text.isdecimal() or int(text) < 128 or int(text) % 64:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 64 of at least 128, such as 512")
    return int(text)


def share(text: str) -> float:
    """Parse a number greater than 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number greater than 0 and at most 1")
    return value
