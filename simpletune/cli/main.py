"""The command line: parse, run one verb, turn errors into messages and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from simpletune import __version__
from simpletune.cli import data, draw, estimate, lora, report, serve, train
from simpletune.cli import push as share
from simpletune.cli.parser import Parser
from simpletune.options import UserError
from simpletune.printable import printable
from simpletune.system.devices import prepare_environment
from simpletune.system.redact import redact
from simpletune.system.signals import Stopped

Verb = tuple[Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None]]
GROUPS = (train, data, estimate, draw, report, serve, lora, share)
VERBS: dict[str, Verb] = {name: verb for group in GROUPS for name, verb in group.VERBS.items()}


def parser() -> Parser:
    """The command line's parser."""
    top = Parser(prog="simpletune", description="Fine-tune Stable Diffusion 3 Medium on one graphics card.")
    top.add_argument("--version", action="version", version=__version__)
    verbs = top.add_subparsers(dest="verb", metavar="VERB")
    for name, (function, arguments) in VERBS.items():
        arguments(verbs.add_parser(name, help=function.__doc__, description=function.__doc__))
    return top


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse a command line; overrides may stand before and after flags."""
    words, top = sys.argv[1:] if argv is None else argv, parser()
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        from simpletune.config.error_text import did_you_mean

        top.error(f"{verb} is no verb.{did_you_mean(verb, list(VERBS))}")
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


def in_words(error: OSError) -> str:
    """What the system refused, where, and what to do."""
    return (
        f"{error.filename}: {error.strerror or type(error).__name__}. Mend or remove what is there, or check that this "
        "user may read and write it"
    )


def main(argv: list[str] | None = None) -> int:
    """Run one verb; a user's mistake is a message and an exit code, never a traceback.

    Returns:
        0; 2 for configuration and input, 4 for a loss or gradient that is not finite, 6 for a full disk, 130 after
        Ctrl-C, 143 after SIGTERM.
    """
    args = parse(argv)
    prepare_environment()
    try:
        VERBS[args.verb][0](args)
    except UserError as error:
        print(f"error: {printable(redact(str(error)))}", file=sys.stderr)
        return error.code
    except BrokenPipeError:  # the reader of a pipe, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is None:  # not a file's: the traceback tells more
            raise
        print(f"error: {redact(in_words(error))}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"\n{stopped}", file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:
        print("\nstopped; what is finished is kept", file=sys.stderr)
        return 130
    return 0
