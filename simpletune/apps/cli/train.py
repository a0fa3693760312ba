"""Verbs around a training run: train, check, schema, prepare."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from simpletune.apps.cli.arguments import add_config, add_verbose, read_config_arguments
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
    args.config = find_or_write_config(args.config, args.overrides)
    config = read_config_arguments(args)
    with handle_signals():
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
    add_verbose(parser)


def finish(args: argparse.Namespace) -> None:
    """export a stopped run's checkpoint as its result, without training"""
    with handle_signals():
        import_libraries()
        from simpletune.training.finish_early import finish_early

        finish_early(args.run)


def finish_arguments(parser: argparse.ArgumentParser) -> None:
    about = "a run folder (its last intact checkpoint), or RUN@STEP, such as runs/demo@100"
    parser.add_argument("run", metavar="RUN[@STEP]", help=about)


def check(args: argparse.Namespace) -> None:
    """explain a configuration, or list all of its problems"""
    from simpletune.config.explain import explain
    from simpletune.runs.stack import require_lora_families

    config = read_config_arguments(args)
    require_lora_families(config)
    print(explain(config))


def schema(args: argparse.Namespace) -> None:
    """print the JSON schema of configurations for editors"""
    from simpletune.config.schema import TrainConfig

    print(json.dumps(TrainConfig.model_json_schema(by_alias=True), indent=2))


def prepare(args: argparse.Namespace) -> None:
    """encode prompts and pictures into the cache and stop"""
    config = read_config_arguments(args)
    with handle_signals():
        import_libraries()
        from simpletune.training.prepare import prepare_only

        prepare_only(config, args.source)


def prepare_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    about = "folder or URL of another cache (files or shards) to copy samples from instead of encoding them"
    parser.add_argument("--from", dest="source", metavar="CACHE", help=about)
    add_verbose(parser)


VERBS = {
    "train": (train, train_arguments),
    "finish": (finish, finish_arguments),
    "check": (check, add_config),
    "schema": (schema, lambda parser: None),
    "prepare": (prepare, prepare_arguments),
}
