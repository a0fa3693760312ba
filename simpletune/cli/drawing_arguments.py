"""The arguments of ``generate``, ``compare`` and the inference scripts. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``generate``: what is not given is taken from the run."""
    _add_common(parser)
    about = "a LoRA file, a run, RUN@STEP, or a hub name; several add up; default: the run's"
    parser.add_argument("--lora", metavar="NAME[:SCALE]", action="append", help=about)
    parser.add_argument("--scale", type=float, default=1.0, help="strength of the LoRA (default: 1)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--base", action="store_true", help="draw with the base model alone")
    kind.add_argument("--full", action="store_true", help="draw with the run's full model; a LoRA is folded in")
    parser.add_argument("--fuse", action="store_true", help="add the LoRA to the base's weights: faster")
    about = "the PNG to write; of several pictures -000, -001, ... are added; default: the next number in the run's "
    parser.add_argument("--out", "--output", dest="output", type=Path, metavar="FILE", help=about + "inference/")
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --out if it exists")


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``compare``: several models, prompts and seeds."""
    _add_common(parser)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL[:SCALE]",
        help="what to draw with, beside the base: a run, RUN@STEP, a LoRA, a transformer's folder, a hub name; "
        "default: the run's result",
    )  # fmt: skip
    parser.add_argument("--lora", action="append", metavar="NAME[:SCALE]", help="a LoRA at each --scale; several times")
    parser.add_argument("--scale", type=float, action="append", help="strengths of each LoRA (default: 0.5 and 1)")
    parser.add_argument("--checkpoints", action="store_true", help="every checkpoint of each run, too")
    parser.add_argument("--clip", metavar="NAME", help="a CLIP model (folder or hub name): how pictures fit prompts")
    parser.add_argument("--dino", metavar="NAME", help="a DINO model (folder or hub name): likeness to the base's")
    parser.add_argument(
        "--out", "--output", dest="output", type=Path, metavar="FOLDER",
        help="the folder to write, new or empty; default: the next number in the first run's compare/",
    )  # fmt: skip


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", help="what to draw; several times; default: the run's")
    parser.add_argument("--seeds", type=positive, default=1, help="pictures for each prompt (default: 1)")
    about = "a run to draw with and take defaults from, or RUN@STEP; default: the newest"
    parser.add_argument("--run", type=Path, help=about)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are (default: runs)")
    parser.add_argument("--model", help="base model: a hub name (owner/name) or a folder")
    parser.add_argument("--negative-prompt", default=None, help="what guidance leads away from")
    parser.add_argument("--steps", type=positive, help="sampling steps")
    parser.add_argument("--guidance", type=float, help="classifier-free guidance; 1: none, and half the time")
    parser.add_argument("--size", type=size, metavar="WIDTHxHEIGHT", help="in pixels, multiples of 16: 1024x1024")
    parser.add_argument("--seed", type=int, help="of the starting noise")
    parser.add_argument("--image", type=Path, help="a picture to start from; its middle is cut to the size")
    parser.add_argument("--strength", type=share, help="with --image: share of the steps taken, 0 to 1 (default: 0.6)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help="default: the run's")
    memory = parser.add_argument_group("less memory")
    memory.add_argument(
        "--precision", choices=("bf16", "fp32", "int8", "int8-quanto", "nf4"), help="how weights are held"
    )
    memory.add_argument(
        "--modulation", choices=("resident", "plan"), help="plan: a third of the weights stay in host memory"
    )
    memory.add_argument(
        "--resident-blocks", type=natural, metavar="N", help="only N blocks stay on the device, the others are streamed"
    )
    memory.add_argument("--vae-tile", type=tile, metavar="PX", help="decode in tiles of PX pixels; not exact")
    memory.add_argument("--no-t5", action="store_true", default=None, help="leave the T5 text encoder out")
    speed = parser.add_argument_group("more speed")
    speed.add_argument("--batch-size", type=positive, metavar="N", help="pictures drawn together (default: 1)")
    speed.add_argument("--compile", action="store_true", help="torch.compile each block; needs a C compiler")
    speed.add_argument(
        "--reuse-guidance", type=positive, metavar="N", help="LOSSY: one guidance difference serves for N steps"
    )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def size(text: str) -> tuple[int, int]:
    """WIDTHxHEIGHT in pixels."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) >= 16 and int(part) % 16 == 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text} is not WIDTHxHEIGHT in multiples of 16, such as 1024x768")
    return int(parts[0]), int(parts[1])


def natural(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, 0 or more")
    return int(text)


def tile(text: str) -> int:
    """The side of a tile in pixels."""
    if not text.isdecimal() or int(text) < 128 or int(text) % 64:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 64, 128 or more, such as 512")
    return int(text)


def share(text: str) -> float:
    """A number over 0, and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number over 0 and at most 1")
    return value
