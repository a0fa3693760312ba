"""The command line: one verb, one function."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from simpletune import __version__
from simpletune.devices import prepare_environment
from simpletune.options import UserError

STARTED = time.perf_counter()


def add_config(parser: argparse.ArgumentParser) -> None:
    """Arguments of verbs that read a configuration."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a JSON file, such as configs/demo.json")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="changes to it, such as train.steps=30")


def read(args: argparse.Namespace):  # type: ignore[no-untyped-def]  # the type would import pydantic for --help
    """The configuration that the arguments name."""
    from simpletune.reading import read_config

    config, notices = read_config(args.config, args.overrides)
    for notice in notices:
        print(notice)
    return config


def train(args: argparse.Namespace) -> None:
    """prepare, train, validate, export"""
    config = read(args)
    from simpletune.train import train as run

    run(config, args.resume, STARTED)


def check(args: argparse.Namespace) -> None:
    """explain a configuration, or list all its problems"""
    from simpletune.explain import explain

    print(explain(read(args)))


def schema(args: argparse.Namespace) -> None:
    """print the JSON schema of configurations, for editors"""
    from simpletune.config import TrainConfig

    print(json.dumps(TrainConfig.model_json_schema(by_alias=True), indent=2))


def prepare(args: argparse.Namespace) -> None:
    """fill the cache (prompts and pictures through the encoders) and stop"""
    config = read(args)
    from simpletune.train import prepare_only

    prepare_only(config)


def generate(args: argparse.Namespace) -> None:
    """draw a picture with a run's result, a LoRA, or the base"""
    from simpletune.generate import generate as run

    run(args)


def compare(args: argparse.Namespace) -> None:
    """draw the same pictures with several models, side by side"""
    from simpletune.compare import compare as run

    run(args)


def push(args: argparse.Namespace) -> None:
    """upload a run's result and its model card to the hub"""
    from simpletune.push import push as run

    run(args.run, args.repository, args.private, args.yes)


def bench(args: argparse.Namespace) -> None:
    """measure a grid of settings and write its table"""
    from simpletune.bench import memory, quality

    if args.grid == "memory":
        print(memory.run(args.out, args.minutes, args.rows))
    else:
        print(quality.run(args.out, args.prompts, args.minutes, args.rows, args.overrides))


def train_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``train``."""
    add_config(parser)
    parser.add_argument("--resume", metavar="latest|PATH", help="continue from the run's last checkpoint, or from one")


def generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``generate``."""
    from simpletune.generate_arguments import add_arguments

    add_arguments(parser)


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``compare``."""
    from simpletune.generate_arguments import add_compare_arguments

    add_compare_arguments(parser)


def push_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``push``."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, such as runs/demo")
    parser.add_argument("repository", metavar="REPO", help="owner/name on the hub; made if there is none")
    parser.add_argument("--private", action="store_true", help="only you may see it")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``bench``."""
    parser.add_argument("grid", choices=["memory", "quality"], metavar="GRID", help="memory or quality")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="changes to every row's configuration")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu"), help="the folder of the results")
    parser.add_argument("--rows", default="", help="only rows whose names hold this")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no row after so many (default: 8)")
    parser.add_argument("--prompts", type=int, default=100, help="quality: prompts for each score (default: 100)")


Verb = tuple[Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None]]
VERBS: dict[str, Verb] = {
    "train": (train, train_arguments),
    "check": (check, add_config),
    "schema": (schema, lambda parser: None),
    "prepare": (prepare, add_config),
    "generate": (generate, generate_arguments),
    "compare": (compare, compare_arguments),
    "push": (push, push_arguments),
    "bench": (bench, bench_arguments),
}


def parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    top = argparse.ArgumentParser(
        prog="simpletune", description="Fine-tune Stable Diffusion 3 Medium on one graphics card."
    )
    top.add_argument("--version", action="version", version=__version__)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (function, arguments) in VERBS.items():
        arguments(verbs.add_parser(name, help=function.__doc__, description=function.__doc__))
    return top


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse a command line; overrides may stand before and after flags."""
    args, rest = parser().parse_known_args(argv)
    late = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in late]
    if unknown or (late and not hasattr(args, "overrides")):
        parser().error(f"unknown argument {(unknown or late)[0]}. See simpletune {args.verb} --help")
    if late:
        args.overrides = [*args.overrides, *late]
    return args


def main(argv: list[str] | None = None) -> int:
    """Run one verb; a user's mistake is a message and an exit code, never a traceback.

    Returns:
        0; 2 for configuration and input, 4 for a loss that is not finite, 130 after Ctrl-C.
    """
    args = parse(argv)
    prepare_environment()
    try:
        VERBS[args.verb][0](args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except BrokenPipeError:  # the reader of a pipe, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(
            "\nstopped; what is finished is kept. To continue from the last checkpoint: --resume latest",
            file=sys.stderr,
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
