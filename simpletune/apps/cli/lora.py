"""Verbs on results: lora, with verbs of its own, and push."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from simpletune.apps.cli.arguments import JSON_HELP, OVERWRITE_HELP, positive, seed, share, strength

FORMATS = ("diffusers", "kohya", "onetrainer", "comfy")  # of LoRA
DTYPES = ("fp32", "bf16", "fp16")
METHODS = ("cat", "linear", "svd", "ties", "ties_svd", "dare_linear", "dare_ties", "dare_linear_svd", "dare_ties_svd",
           "magnitude_prune", "magnitude_prune_svd")  # fmt: skip
LONGEST = 5000  # characters of a field in the header
LORA = "a LoRA file in any layout, a run, a checkpoint (RUN@STEP) or a hub name"


def inspect(args: argparse.Namespace) -> None:
    """describe a weight file and list the tools that load it"""
    from simpletune.adapters.files.describe import describe, format_description
    from simpletune.adapters.files.header import LoraHeader, require_family
    from simpletune.runs.weights_names import weight_file
    from simpletune.system.printable import printable

    about = describe(weight_file(args.file), values=not args.header_only)
    print(json.dumps(about, indent=2) if args.json else printable(format_description(about)))
    if about["kind"] == "lora":
        require_family(LoraHeader(Path(about["file"])))


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a .safetensors file, a folder with one, a run or RUN@STEP")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.add_argument("--header-only", action="store_true", help="do not check a LoRA's values (NaN, zeros)")


def export(args: argparse.Namespace) -> None:
    """write a LoRA, DoRA or OFT in another layout, or LoKr and LoHa as a LoRA"""
    from simpletune.commands.lora_tools.commands import export as run

    run(args)


def export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", metavar="LORA", help=LORA)
    parser.add_argument(
        "--format",
        choices=(*FORMATS, "lycoris", "a1111"),
        required=True,
        help="file layout; ComfyUI and Forge load kohya; comfy and onetrainer write the same for SD 1.5 and 2; "
        "lycoris: LoKr or LoHa unchanged, for ComfyUI; a1111: a hypernetwork as .pt",
    )
    add_rank_or_energy(parser)
    parser.add_argument("--out", type=Path, help="file to write (default: beside the LoRA, named by format)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: unchanged")
    parser.add_argument("--title", type=_field, help="title in the header (default: the file's name)")
    parser.add_argument("--author", type=_field, help="author in the header: your name, or a link")
    parser.add_argument("--description", type=_field, help="description in the header (default: names the base)")
    parser.add_argument("--tags", type=_field, help="tags in the header, separated by commas")
    parser.add_argument(
        "--no-thumbnail",
        dest="thumbnail",
        action="store_false",
        help="leave the run's validation picture out of the header",
    )
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE_HELP)


def _field(text: str) -> str:
    if not text.strip() or len(text) > LONGEST:
        raise argparse.ArgumentTypeError(f"{len(text):,} characters; give 1 to {LONGEST:,}")
    return text.strip()


def merge(args: argparse.Namespace) -> None:
    """merge LoRAs into a base model and write a full model"""
    from simpletune.commands.lora_tools.commands import merge as run

    run(args)


def merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "loras", nargs="*", metavar="LORA[:STRENGTH]", help=f"{LORA}; without one, the base is written as it is"
    )
    parser.add_argument("--scale", type=strength, default=1.0, help="factor on every strength (default: 1)")
    parser.add_argument(
        "--base", help="a folder, a single file, a hub name or a run with full weights (default: the run's base)"
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder or a .safetensors file")
    parser.add_argument(
        "--format", choices=("diffusers", "single-file"), help="default: single-file if --out ends in .safetensors"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: the base's")
    parser.add_argument("--denoiser-only", action="store_true", help="leave out a LoRA's updates to text encoders")
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE_HELP)


def mix(args: argparse.Namespace) -> None:
    """combine several LoRAs into one"""
    from simpletune.commands.lora_tools.commands import mix as run

    run(args)


def mix_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("loras", nargs="+", metavar="LORA:WEIGHT", help=LORA)
    parser.add_argument("--method", choices=METHODS, default="cat", help="default: cat, the exact sum")
    parser.add_argument(
        "--rank", type=positive, help="rank of the result, for methods that end in svd (default: the largest)"
    )
    parser.add_argument(
        "--density", type=share, default=0.5, help="share of entries to keep, for ties, dare and magnitude_prune"
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed for the entries that dare drops")
    add_output(parser)


def extract(args: argparse.Namespace) -> None:
    """extract a LoRA from the difference of two models"""
    from simpletune.commands.lora_tools.commands import extract as run

    run(args)


def extract_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a folder in diffusers' layout, a single file or a hub name"
    parser.add_argument("base", metavar="BASE", help=what)
    parser.add_argument("tuned", metavar="TUNED", help=what)
    add_rank_or_energy(parser)
    add_conv_rank(parser, "left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="device to compute on (default: cuda if available)")
    add_output(parser)


def resize(args: argparse.Namespace) -> None:
    """change the rank of a LoRA"""
    from simpletune.commands.lora_tools.commands import resize as run

    run(args)


def resize_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lora", metavar="LORA", help=LORA)
    add_rank_or_energy(parser)
    add_conv_rank(parser, "as the others")
    add_output(parser)


def add_rank_or_energy(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the rank."""
    parser.add_argument("--rank", type=positive, help="rank of every layer")
    parser.add_argument("--energy", type=float, help="share of the squared singular values to keep in each layer: 0.95")


def add_conv_rank(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """Add the rank of convolutions; ``otherwise``: what happens to them without."""
    parser.add_argument(
        "--conv-rank", type=positive, help=f"rank of convolutions larger than 1x1 (default: {otherwise})"
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the output file and its format."""
    parser.add_argument("--out", type=Path, required=True, help=".safetensors file to write")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="default: diffusers for SD3, kohya for the others; onetrainer and diffusers stay for SDXL",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp32 if computed, else as in the input")
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE_HELP)


def push(args: argparse.Namespace) -> None:
    """upload a run's result and model card to the hub"""
    from simpletune.runs.push import push as run

    run(args.run, args.repository, args.private, args.yes)


def push_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN[@STEP]", help="a run such as runs/demo, or a checkpoint of a LoRA run")
    parser.add_argument("repository", metavar="REPO", help="owner/name on the hub; created if missing")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")


LORA_VERBS = {
    "inspect": (inspect, inspect_arguments),
    "export": (export, export_arguments),
    "merge": (merge, merge_arguments),
    "mix": (mix, mix_arguments),
    "extract": (extract, extract_arguments),
    "resize": (resize, resize_arguments),
}


def lora(args: argparse.Namespace) -> None:
    """inspect, export, merge, mix, extract or resize a LoRA file"""
    LORA_VERBS[args.lora_verb][0](args)


def lora_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="lora_verb", metavar="VERB", title="verbs")
    for name, (function, arguments) in LORA_VERBS.items():
        arguments(verbs.add_parser(name, help=function.__doc__, description=function.__doc__))
    parser.epilog = "simpletune lora VERB --help shows a verb's arguments."


VERBS = {"lora": (lora, lora_arguments), "push": (push, push_arguments)}
