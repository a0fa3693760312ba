"""Verbs of a configuration: train, check."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from simpletune.apps.cli.arguments import (
    CONFIG_HELP,
    add_config,
    add_overrides,
    add_verbose,
    read_config_arguments,
)
from simpletune.system.options import UserError
from simpletune.system.shell import quote_command
from simpletune.system.signals import Stopped, handle_signals
from simpletune.system.startup import import_libraries

STARTED = time.perf_counter()
RESUME = (
    "continue from the run's last checkpoint (latest) or from a checkpoint's folder; auto: continue if a checkpoint "
    "exists, otherwise start; leave a finished run alone"
)


def train(args: argparse.Namespace) -> None:
    """prepare the data, train, validate and export; given a folder of pictures, write its configuration first"""
    refuse_unused(args)
    args.config = find_or_write_config(args.config, args.overrides)
    config = read_config_arguments(args)
    with handle_signals():
        if args.prepare:
            import_libraries()
            from simpletune.training.prepare import prepare_only

            return prepare_only(config, args.source)
        try:
            from simpletune.runs.checkpoint_folders import require_resumable

            require_resumable(config, args.resume)
            import_libraries()
            from simpletune.training.train import train as run

            run(config, args.resume, STARTED, args.force, args.estimate)
        except Stopped as stopped:
            flags = [f"--{name}" for name in ("force", "estimate", "verbose") if getattr(args, name)]
            command = quote_command("simpletune", "train", args.config, *args.overrides, *flags, "--resume", "auto")
            stopped.args = (f"{stopped}. To continue: {command}",)
            raise


def refuse_unused(args: argparse.Namespace) -> None:
    """Raise UserError if ``train`` or ``train --prepare`` is given an option of the other."""
    if not args.prepare and args.source is not None:
        raise UserError("--from belongs to --prepare. Leave it out, or add --prepare")
    for name in ("resume", "force", "estimate") if args.prepare else ():
        if getattr(args, name):
            raise UserError(f"--{name} belongs to a training, and --prepare stops before it. Leave out one of them")


def is_folder_of_images(config: Path) -> bool:
    """Return whether a verb's argument is a folder of pictures; one that only holds configurations is none."""
    from simpletune.config.load import find_config
    from simpletune.data.sources.walk import walk

    return find_config(config).is_dir() and not (any(config.glob("*.json")) and not walk(config, "inside").images)


def find_or_write_config(config: Path, overrides: Sequence[str] = ()) -> Path:
    """Return a configuration file as it is; for a folder of pictures, return its configuration, written if missing."""
    if not is_folder_of_images(config):
        return config
    from simpletune.commands.init.init_command import config_for

    return config_for(config, overrides)


def train_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--resume", metavar="auto|latest|PATH", help=RESUME)
    parser.add_argument("--force", action="store_true", help="start even if the run is not expected to fit")
    parser.add_argument("--estimate", action="store_true", help="predict the memory first; always on with CUDA")
    parser.add_argument("--prepare", action="store_true", help="encode prompts and pictures into the cache and stop")
    about = "with --prepare: folder or URL of another cache (files or shards) to copy samples from instead of encoding"
    parser.add_argument("--from", dest="source", metavar="CACHE", help=about)
    add_verbose(parser)


def check(args: argparse.Namespace) -> None:
    """explain a configuration, or list all of its problems"""
    if args.schema:
        from simpletune.config.schema import TrainConfig

        print(json.dumps(TrainConfig.model_json_schema(by_alias=True), indent=2))
        return
    from simpletune.config.explain import explain
    from simpletune.runs.stack import require_lora_families

    config = read_config_arguments(args)
    require_lora_families(config)
    print(explain(config))


def check_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help=CONFIG_HELP)
    what.add_argument("--schema", action="store_true", help="print the JSON schema of configurations for editors")
    add_overrides(parser)


VERBS = {"train": (train, train_arguments), "check": (check, check_arguments)}
