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
    from simpletune.commands.init.init_command import CPU, init_command

    on_cpu = args.device is not None and args.device.lower() == CPU
    answers = Answers(args.what, args.trigger, args.length, args.model, on_cpu, args.objective)
    init_command(args.folder, answers, args.out, args.device, args.overwrite, args.yes, args.overrides)


def init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of pictures, with or without captions")
    add_overrides(parser)
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
        "--out", type=Path, metavar="FILE", help="file to write (default: FOLDER.json beside the folder)"
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
