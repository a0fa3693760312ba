"""Verbs on LoRA files: inspect, export, merge, mix, extract, resize."""

from __future__ import annotations

import argparse
from pathlib import Path

FORMATS = ("diffusers", "kohya", "comfy")
DTYPES = ("fp32", "bf16", "fp16")
METHODS = ("cat", "linear", "svd", "ties", "ties_svd", "dare_linear", "dare_ties", "dare_linear_svd", "dare_ties_svd",
           "magnitude_prune", "magnitude_prune_svd")  # fmt: skip
LORA = "a LoRA file in any layout, a run, its checkpoint (RUN@STEP), or a hub name"


def inspect(args: argparse.Namespace) -> None:
    """say what a weight file is, and which tools load it"""
    import json

    from simpletune.lora.describe import describe, in_words
    from simpletune.printable import printable
    from simpletune.runs.names import weight_file

    about = describe(weight_file(args.file), values=not args.header_only)
    print(json.dumps(about, indent=2) if args.json else printable(in_words(about)))


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``inspect``."""
    parser.add_argument("file", metavar="FILE", help="a .safetensors file, a folder with one, a run, or RUN@STEP")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--header-only", action="store_true", help="do not look at a LoRA's values (NaN, zeros)")


def export(args: argparse.Namespace) -> None:
    """write a LoRA in diffusers', kohya's or ComfyUI's layout"""
    from simpletune.cli.lora_commands import export as run

    run(args)


def export_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``export``."""
    parser.add_argument("lora", metavar="LORA", help=LORA)
    parser.add_argument("--format", choices=FORMATS, required=True, help="kohya loads in ComfyUI and Forge")
    parser.add_argument("--out", type=Path, help="the file to write; default: beside the LoRA, the format in its name")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as it is")
    add_overwrite(parser)


def merge(args: argparse.Namespace) -> None:
    """add LoRAs to a base model's weights and write a full model"""
    from simpletune.cli.lora_commands import merge as run

    run(args)


def merge_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``merge``."""
    parser.add_argument("loras", nargs="+", metavar="LORA[:STRENGTH]", help=LORA)
    parser.add_argument("--scale", type=float, default=1.0, help="strength of all of them (default: 1)")
    parser.add_argument("--base", help="a folder, a single file or a hub name; default: what the run trained on")
    parser.add_argument("--out", type=Path, required=True, help="a folder, or a .safetensors file")
    parser.add_argument(
        "--format", choices=("diffusers", "single-file"), help="default: single-file if --out ends in .safetensors"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: as the base is")
    add_overwrite(parser)


def mix(args: argparse.Namespace) -> None:
    """make one LoRA of several"""
    from simpletune.cli.lora_commands import mix as run

    run(args)


def mix_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``mix``."""
    parser.add_argument("loras", nargs="+", metavar="LORA:WEIGHT", help=LORA)
    parser.add_argument("--method", choices=METHODS, default="cat", help="default: cat, the exact sum")
    parser.add_argument(
        "--rank", type=positive, help="of the result, for methods that end in svd; default: the largest"
    )
    parser.add_argument("--density", type=float, default=0.5, help="kept share, for ties, dare and magnitude_prune")
    parser.add_argument("--seed", type=int, default=0, help="of what dare drops")
    add_output(parser)


def extract(args: argparse.Namespace) -> None:
    """make a LoRA from the difference of two models"""
    from simpletune.cli.lora_commands import extract as run

    run(args)


def extract_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``extract``."""
    what = "a folder in diffusers' layout, a single file, or a hub name"
    parser.add_argument("base", metavar="BASE", help=what)
    parser.add_argument("tuned", metavar="TUNED", help=what)
    add_rank_or_energy(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where to compute; default: cuda if there is one")
    add_output(parser)


def resize(args: argparse.Namespace) -> None:
    """change the rank of a LoRA"""
    from simpletune.cli.lora_commands import resize as run

    run(args)


def resize_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``resize``."""
    parser.add_argument("lora", metavar="LORA", help=LORA)
    add_rank_or_energy(parser)
    add_output(parser)


def add_rank_or_energy(parser: argparse.ArgumentParser) -> None:
    """How much to keep."""
    parser.add_argument("--rank", type=positive, help="of every layer")
    parser.add_argument("--energy", type=float, help="share of the squared singular values to keep in each layer: 0.95")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Where to and in which form."""
    parser.add_argument("--out", type=Path, required=True, help="the .safetensors file to write")
    parser.add_argument("--format", choices=FORMATS, default="diffusers", help="default: diffusers")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as computed (fp32), or as the files are")
    add_overwrite(parser)


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Leave to replace a file."""
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --out if it exists")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


VERBS = {
    "inspect": (inspect, inspect_arguments),
    "export": (export, export_arguments),
    "merge": (merge, merge_arguments),
    "mix": (mix, mix_arguments),
    "extract": (extract, extract_arguments),
    "resize": (resize, resize_arguments),
}
