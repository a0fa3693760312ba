"""Run the command line: parse it, run one verb, turn errors into messages and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from simpletune import __version__
from simpletune.apps.cli import (
    control,
    data,
    doctor,
    estimate,
    evaluate,
    generate,
    lora,
    report,
    serve,
    start,
    train,
    web,
)
from simpletune.apps.cli import push as share
from simpletune.apps.cli.parser import Parser
from simpletune.system.devices import prepare_environment
from simpletune.system.options import UserError
from simpletune.system.printable import printable
from simpletune.system.redact import redact
from simpletune.system.signals import Stopped

Verb = tuple[Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None]]
GROUPS = (start, train, control, data, estimate, generate, evaluate, report, serve, web, lora, share, doctor)
VERBS: dict[str, Verb] = {name: verb for group in GROUPS for name, verb in group.VERBS.items()}


def parser() -> Parser:
    """Build the parser of the command line."""
    top = Parser(prog="simpletune", description="Fine-tune Stable Diffusion 3, 3.5, 1.5 and 2 on one graphics card.")
    top.add_argument("--version", action="version", version=__version__)
    verbs = top.add_subparsers(dest="verb", metavar="VERB")
    for name, (function, arguments) in VERBS.items():
        arguments(verbs.add_parser(name, help=function.__doc__, description=function.__doc__))
    return top


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse a command line; overrides may precede or follow flags."""
    words, top = sys.argv[1:] if argv is None else argv, parser()
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        from simpletune.config.error_text import did_you_mean

        top.error(f"unknown verb {verb}.{did_you_mean(verb, list(VERBS))}")
    args, rest = top.parse_known_args(words)
    if args.verb is None:
        top.error(f"VERB is missing. Known: {', '.join(VERBS)}")
    late = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in late]
    if unknown or (late and not hasattr(args, "overrides")):
        top.error(f"unknown argument {(unknown or late)[0]}", args.verb)
    if late:
        args.overrides = [*args.overrides, *late]
    return args


def describe_os_error(error: OSError) -> str:
    """Describe a file system error and its remedy."""
    return (
        f"{error.filename}: {error.strerror or type(error).__name__}. Repair or remove it, or check that this user has "
        "read and write permission"
    )


def main(argv: list[str] | None = None) -> int:
    """Run one verb; a user's mistake ends in a message and an exit code, never in a traceback.

    Returns:
        0 on success, 1 for problems that doctor found, 2 for configuration and input, 4 for a non-finite loss or
        gradient, 6 for a full disk, 7 if another process of the run is gone, 130 after Ctrl-C or a request to stop, 143
        after SIGTERM.
    """
    args = parse(argv)
    prepare_environment()
    try:
        VERBS[args.verb][0](args)
    except UserError as error:
        print(f"error: {printable(redact(str(error)))}", file=sys.stderr)
        return error.code
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is None:  # without a file, a traceback is more useful
            raise
        print(f"error: {redact(describe_os_error(error))}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"\n{stopped}", file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:
        print("\nstopped; finished work is kept", file=sys.stderr)
        return 130
    return 0
