"""Verbs that write a configuration: init, import."""

from __future__ import annotations

import argparse
from pathlib import Path

from simpletune.apps.cli.arguments import OBJECTIVE_HELP, OBJECTIVES, add_overrides
from simpletune.apps.cli.estimate import ABOUT_DEVICE

OVERWRITE_HELP = "replace the file if it exists"
WHAT = ("subject", "style", "general")
LENGTHS = ("short", "normal", "long")


def init(args: argparse.Namespace) -> None:
    """examine a folder of pictures and this machine, and write a configuration that explains its choices"""
    from simpletune.commands.init import Answers
    from simpletune.commands.init.init_command import CPU, SLIDER, init_command, slider_command
    from simpletune.system.options import UserError

    on_cpu = args.device is not None and args.device.lower() == CPU
    answers = Answers(args.what, args.trigger, args.length, args.model, on_cpu, args.objective)
    rest = args.out, args.device, args.overwrite, args.yes
    if args.slider is None and args.folder is None:
        raise UserError(f"FOLDER: missing. Name the folder of pictures, or prompts to train a slider from: {SLIDER}")
    if args.slider is None:
        init_command(args.folder, answers, *rest, args.overrides)
        return
    # without a folder, the first override stands in its place
    overrides = [*([] if args.folder is None else [str(args.folder)]), *args.overrides]
    if args.folder is not None and "=" not in str(args.folder):
        raise UserError(f"{args.folder}: a slider (--slider) is trained from prompts alone. Leave the folder out")
    for option in ("what", "trigger"):
        if getattr(args, option) is not None:
            raise UserError(f"--{option}: it is about pictures, and a slider (--slider) has none. Leave it out")
    slider_command(args.slider, answers, *rest, overrides)


def init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="FOLDER", help="folder of pictures, with or without captions"
    )
    add_overrides(parser)
    parser.add_argument(
        "--slider",
        nargs="+",
        metavar="PROMPT",
        help="no pictures: a slider between prompts. What changes; what strength 1 moves it towards; and, if wanted, "
        'what strength -1 does: "a person" "a person, smiling" "a person, frowning"',
    )
    parser.add_argument(
        "--what", choices=WHAT, help="what the pictures teach (default: guessed from their number and captions)"
    )
    parser.add_argument("--trigger", metavar="WORD", help="the word that names the subject, and its class: 'sks dog'")
    parser.add_argument("--length", choices=LENGTHS, default="normal", help="how long to train (default: normal)")
    parser.add_argument(
        "--model", metavar="NAME", help="hub name, folder or file of the base (default: chosen for the machine)"
    )
    parser.add_argument("--objective", choices=OBJECTIVES, help=f"{OBJECTIVE_HELP}; flow: rectified flow")
    parser.add_argument("--device", metavar="CARD", help=f"{ABOUT_DEVICE}, or cpu (default: this machine's)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write (default: FOLDER.json beside the folder; of a slider, named after its prompt)",
    )
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE_HELP)
    parser.add_argument("--yes", action="store_true", help="do not ask questions, even on a terminal")


def import_config(args: argparse.Namespace) -> None:
    """translate another trainer's configuration"""
    from simpletune.commands.importers.importing import import_command

    import_command(args.file, args.data, args.out, args.overwrite)


def import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="configuration or preset of another trainer")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DATA",
        help="its data sets: multidatabackend.json, a dataset's .toml, concepts.json; not needed if FILE names them",
    )
    parser.add_argument("--out", type=Path, metavar="OUT", help="file to write (default: print the configuration)")
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE_HELP)


VERBS = {"init": (init, init_arguments), "import": (import_config, import_arguments)}
