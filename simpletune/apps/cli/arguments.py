"""What the arguments of several verbs share: their texts, their values, the configuration. Imports no torch."""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simpletune.config.schema import TrainConfig

LARGEST_STRENGTH = 1e6  # that of files' own scales, too
CONFIG_HELP = "a JSON file or the name of a shipped configuration, such as demo or sd3_medium_lora_8gb"
OVERRIDES_HELP = "override fields of the configuration, such as train.steps=30"
JSON_HELP = "print machine-readable JSON"
RUNS_HELP = "folder that contains the runs (default: runs)"
OBJECTIVES = ("ddpm", "flow")  # of the families
OBJECTIVE_HELP = "what the model was trained by, which no file tells (default: the run's, or its family's usual one)"
PRECISION_HELP = "precision of the weights (default: the run's)"
MODULATION_HELP = "plan: keep the modulation weights, a third of the model, in host memory"
DEVICE_HELP = "default: the run's"
VERBOSE_HELP = "print also what the tool chose and how it computes"
OVERWRITE_HELP = "replace an existing file at --out"


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of verbs that read a configuration."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help=CONFIG_HELP)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help=OVERRIDES_HELP)


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add the option of verbs that print details."""
    parser.add_argument("--verbose", action="store_true", help=VERBOSE_HELP)


class HelpAll(argparse.Action):
    """Print the help with every option, where ``show_first`` leaves most of them out."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        whole = copy.copy(parser)
        whole.formatter_class, whole.epilog = argparse.HelpFormatter, None
        whole.print_help()
        parser.exit()


def show_first(parser: argparse.ArgumentParser, *options: str) -> None:
    """Let --help show these options only, and --help-all all of them. To be called last."""

    def shown(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
        names = {"--help", "--help-all", *options}
        return [each for each in actions if not each.option_strings or names & {*each.option_strings}]

    class FirstOptions(argparse.HelpFormatter):
        def add_usage(
            self,
            usage: str | None,
            actions: Iterable[argparse.Action],
            groups: Iterable[argparse._MutuallyExclusiveGroup],
            prefix: str | None = None,
        ) -> None:
            super().add_usage(usage, shown(actions), (), prefix)

        def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
            super().add_arguments(shown(actions))

    more = len(parser._actions) - len(shown(parser._actions))
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help="show every option and exit")
    parser.formatter_class = FirstOptions
    parser.epilog = f"{more} more options: {parser.prog} --help-all"


def read_config_arguments(args: argparse.Namespace, needs_model: bool = True) -> TrainConfig:
    """Read the configuration that the arguments name, and print notices."""
    from simpletune.config.load import read_config
    from simpletune.system.console import note

    config, notices = read_config(args.config, args.overrides, needs_model=needs_model)
    note(notices)
    return config


def whole_number(what: str, least: int, most: float = math.inf, multiple_of: int = 1) -> Callable[[str], int]:
    """Make an argument's type; ``what`` says in messages what it must be."""

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        # Python refuses to read numbers of thousands of digits
        if not digits.isdecimal() or len(digits) > 30 or not least <= int(text) <= most or int(text) % multiple_of:
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return int(text)

    return parse


def number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Make an argument's type; ``what`` says in messages what it must be."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    return parse


positive = whole_number("a whole number of at least 1", 1)
non_negative = whole_number("a whole number of at least 0", 0)
port = whole_number("a port from 0 to 65535", 0, 65535)
tile = whole_number("a multiple of 64 of at least 128, such as 512", 128, multiple_of=64)  # side in pixels
# Those of the configuration's validation: tests/config/test_config.py compares them.
steps = whole_number("a whole number from 1 to 1000", 1, 1000)
seed = whole_number("a whole number from -2^63 to 2^64 - 1", -(2**63), 2**64 - 1)
guidance = number("a number of at least 1, which is no guidance", lambda value: 1 <= value < math.inf)
strength = number("a number from -1000000 to 1000000, such as 0.8", lambda value: abs(value) <= LARGEST_STRENGTH)
gigabytes = number("a number of GiB of at least 0", lambda value: 0 <= value < math.inf)
seconds = number("a number of seconds of at least 0", lambda value: 0 <= value < math.inf)
probability = number("a number from 0 to 1, such as 0.35", lambda value: 0 <= value <= 1)
share = number("a number greater than 0 and at most 1", lambda value: 0 < value <= 1)


def size(text: str) -> tuple[int, int]:
    """Parse WIDTHxHEIGHT in pixels."""
    parts = text.lower().split("x")
    known = [int(part) for part in parts if part.isdecimal() and len(part) <= 6]
    if not len(parts) == len(known) == 2 or any(side < 8 or side % 8 for side in known):
        raise argparse.ArgumentTypeError(f"{text} is not WIDTHxHEIGHT in multiples of 8, such as 1024x768")
    return known[0], known[1]
