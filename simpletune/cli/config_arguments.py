"""What verbs share that read a configuration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig

CONFIG_HELP = "a JSON file, or the name of a shipped configuration, such as demo or sd3_medium_lora_8gb"


def add_config(parser: argparse.ArgumentParser) -> None:
    """Arguments of verbs that read a configuration."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help=CONFIG_HELP)
    about = "changes to it, such as train.steps=30"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help=about)


def read(args: argparse.Namespace) -> TrainConfig:
    """The configuration that the arguments name."""
    from simpletune.config.load import read_config
    from simpletune.system.console import note

    config, notices = read_config(args.config, args.overrides)
    note(notices)
    return config
