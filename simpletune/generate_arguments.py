"""The arguments of ``generate``, ``compare`` and the inference scripts. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``generate``: one picture; what is not given is taken from the run."""
    _add_common(parser)
    parser.add_argument("--prompt", help="what to draw; default: the run's first validation prompt")
    parser.add_argument("--lora", help="a LoRA file, a run's folder, or a hub name; default: the run's result")
    parser.add_argument("--scale", type=float, default=1.0, help="strength of the LoRA (default: 1)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--base", action="store_true", help="draw with the base model alone")
    kind.add_argument("--full", action="store_true", help="draw with the run's full model; a LoRA is folded in")
    parser.add_argument("--output", type=Path, help="the PNG to write")


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``compare``: several models, prompts and seeds."""
    _add_common(parser)
    parser.add_argument("--prompt", action="append", help="what to draw; may be given several times")
    parser.add_argument("--lora", action="append", help="a LoRA file, a run's folder, or a hub name; several times")
    parser.add_argument("--scale", type=float, action="append", help="strengths of each LoRA (default: 0.5 and 1)")
    parser.add_argument("--seeds", type=positive, default=1, help="pictures for each prompt (default: 1)")
    parser.add_argument("--output", type=Path, help="the folder to write; default: the run's compare/")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, help="a run's folder to take defaults from; default: the newest")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are (default: runs)")
    parser.add_argument("--model", help="base model: a hub name (owner/name) or a folder")
    parser.add_argument("--negative-prompt", default=None, help="what guidance leads away from")
    parser.add_argument("--steps", type=positive, help="sampling steps")
    parser.add_argument("--guidance", type=float, help="classifier-free guidance; 1: none")
    parser.add_argument("--size", type=size, metavar="WIDTHxHEIGHT", help="in pixels, multiples of 16: 1024x1024")
    parser.add_argument("--seed", type=int, help="of the starting noise")
    parser.add_argument("--precision", choices=("bf16", "fp32", "int8", "int8-quanto"), help="how weights are held")
    parser.add_argument(
        "--modulation", choices=("resident", "plan"), help="plan: a third of the weights stay in host memory"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help="default: the run's")


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
