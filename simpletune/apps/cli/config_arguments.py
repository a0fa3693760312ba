"""Arguments shared by the verbs that read a configuration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig

CONFIG_HELP = "a JSON file or the name of a shipped configuration, such as demo or sd3_medium_lora_8gb"
OVERRIDES_HELP = "override fields of the configuration, such as train.steps=30"
JSON_HELP = "print machine-readable JSON"


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of verbs that read a configuration."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help=CONFIG_HELP)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add ``key.path=value`` overrides."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help=OVERRIDES_HELP)


def read_config_arguments(args: argparse.Namespace) -> TrainConfig:
    """Read the configuration that the arguments name, and print notices."""
    from simpletune.config.load import read_config
    from simpletune.system.console import note

    config, notices = read_config(args.config, args.overrides)
    note(notices)
    return config
