"""Verbs that write a configuration: init, import."""

from __future__ import annotations

import argparse
from pathlib import Path

OUT_HELP = "file to write"
OVERWRITE_HELP = "replace the file if it exists"


def import_config(args: argparse.Namespace) -> None:
    """translate a configuration of SimpleTuner, kohya's scripts or OneTrainer"""
    from simpletune.importers.command import import_command

    import_command(args.file, args.data, args.out, args.overwrite)


def import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``import``."""
    parser.add_argument("file", type=Path, metavar="FILE", help="config.json, config.toml or a OneTrainer preset")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="its data sets: multidatabackend.json, a dataset's .toml, concepts.json; unless FILE names them and they are there",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"{OUT_HELP}; without, the configuration is printed")
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE_HELP)


VERBS = {"import": (import_config, import_arguments)}
