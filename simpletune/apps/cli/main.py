"""Run the command line: parse it, run one verb, turn errors into messages and exit codes."""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from simpletune import __version__
from simpletune.apps.cli import control, data, doctor, estimate, evaluate, generate, lora, serve, start, train
from simpletune.system.console import print_any_text, verbose
from simpletune.system.devices import prepare_environment
from simpletune.system.options import ConfigError, Problem, UserError
from simpletune.system.portable import peak_resident_bytes
from simpletune.system.printable import printable
from simpletune.system.processes import end_with_launcher
from simpletune.system.redact import redact
from simpletune.system.shell import quote_command, typed_path
from simpletune.system.signals import Stopped

Verb = tuple[Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None]]
GROUPS = (start, train, control, data, estimate, generate, evaluate, serve, lora, doctor)
VERBS: dict[str, Verb] = {name: verb for group in GROUPS for name, verb in group.VERBS.items()}

VERB_GROUPS = {  # of the help
    "start": ("init", "import", "data", "caption", "web"),
    "know before": ("check", "estimate", "plan"),
    "train": ("train", "control"),
    "judge": ("report", "compare", "evaluate"),
    "use": ("generate", "serve", "push", "lora"),
    "this machine": ("doctor",),
}
# What verbs of before are today. Editors' settings and scripts call them: each goes on, with all of its arguments.
FORMER_VERBS = {name: ("lora", name) for name in lora.LORA_VERBS} | {
    "schema": ("check", "--schema"),
    "prepare": ("train", "--prepare"),
    "finish": ("control", "--finish"),
    "calibrate": ("doctor", "--calibrate"),
}
EXAMPLES = """\
examples:
  simpletune train demo                                   train the bundled tiny model: no GPU, no download
  simpletune init my_pictures --trigger "sks dog"         write a configuration for your pictures and this machine
  simpletune estimate sd3_medium_lora_8gb --device L4     memory, time and price before anything runs

simpletune VERB --help shows a verb's arguments."""

# Arguments that are texts and may be paths.
NAMES = (
    "run", "file", "lora", "loras", "base", "tuned", "model", "source", "resume", "embedding", "compare", "prompts",
    "clip", "dino",
)  # fmt: skip

_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)$")
_ONE_OF = re.compile(r"one of the arguments (.*) is required")
_REQUIRED = "the following arguments are required: "


class Parser(argparse.ArgumentParser):
    """argparse's parser, which reports a mistake in one line with value, rule and a pointer to the help instead of the
    usage; the verbs' parsers are of this class too."""

    def __init__(self, **options: object):
        super().__init__(**options)  # type: ignore[arg-type]
        self.register("type", float, _parse_number)
        self.register("type", int, _parse_whole)

    def verbs(self) -> argparse._SubParsersAction[Parser] | None:
        """Return the action that holds this parser's verbs; None if it has none."""
        return next((action for action in self._actions if isinstance(action, argparse._SubParsersAction)), None)

    def error(self, message: str) -> NoReturn:
        """Print the mistake and a pointer to the help, and exit with code 2."""
        text = message.removeprefix("argument ").rstrip(".")
        if text.startswith(_REQUIRED):
            names = text.removeprefix(_REQUIRED)
            text = f"{names} {'are' if ', ' in names else 'is'} missing"
        elif found := _ONE_OF.fullmatch(text):
            text = f"{' or '.join(found[1].split())} is missing"
        elif found := _CHOICE.search(text):
            from simpletune.config.error_text import did_you_mean

            guess = did_you_mean(found[1], found[2].replace("'", "").split(", "))
            what = "unknown verb" if self.verbs() else f"{text[: found.start()]}unknown value"
            text = f"{what} {found[1]}.{guess}".rstrip(".")
        stop = "" if text.endswith("?") else "."
        print(f"error: {text}{stop} See {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None


def _parse_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number") from None


class TopParser(Parser):
    """The parser of ``simpletune`` itself, whose help lists the verbs by what they are for."""

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        verbs = self.verbs()
        assert verbs is not None
        lines = {line.dest: line for line in verbs._choices_actions}
        for title, names in VERB_GROUPS.items():
            formatter.start_section(title)
            formatter.add_arguments([lines[name] for name in names])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action is not verbs])
        formatter.end_section()
        return f"{formatter.format_help()}\n{EXAMPLES}\n"


class Version(argparse.Action):
    """Print simpletune's version, torch's, and the cards with their driver; torch's import would take seconds."""

    def __call__(self, *_: object) -> NoReturn:
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "is not installed"
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=20)
            cards = answer.stdout.strip().replace(", ", ", driver ")
            if answer.returncode or not cards:
                cards = f"unknown: nvidia-smi says {cards or answer.stderr.strip() or 'nothing'}"
        except FileNotFoundError:
            cards = "none: no nvidia-smi"
        except (OSError, subprocess.TimeoutExpired) as error:
            cards = f"unknown: nvidia-smi does not answer ({type(error).__name__})"
        print(f"simpletune {__version__}", f"torch {torch}", *(f"card {line}" for line in cards.splitlines()), sep="\n")
        sys.exit(0)


def parser() -> Parser:
    about = "Fine-tune Stable Diffusion 3, 3.5, XL, 1.5 and 2 on one graphics card."
    top = TopParser(prog="simpletune", description=about)
    top.add_argument("--version", action=Version, nargs=0, help="name this version, torch's, and the card; then exit")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    for name in (name for names in VERB_GROUPS.values() for name in names):
        function, arguments = VERBS[name]
        arguments(verbs.add_parser(name, help=function.__doc__, description=function.__doc__))
    return top


def todays_words(argv: list[str] | None) -> list[str]:
    """Return the words of a command line, with a verb of before as it is called today."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = next((place for place, word in enumerate(words) if not word.startswith("-")), None)
    if at is not None:
        words[at : at + 1] = FORMER_VERBS.get(words[at], (words[at],))
    return words


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse a command line; overrides may precede or follow flags."""
    words, top = todays_words(argv), parser()
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        from simpletune.config.error_text import did_you_mean

        near = difflib.get_close_matches(verb[:60], [*VERBS, *FORMER_VERBS], n=1)
        today = [" ".join(FORMER_VERBS.get(name, (name,))) for name in near]
        top.error(f"unknown verb {verb}.{did_you_mean(today[0] if near else verb, today or [*VERBS])}")
    args, rest = top.parse_known_args(words)
    chosen = top  # the parser of the verb, or of the verb's verb
    while (verbs := chosen.verbs()) is not None:
        if (name := getattr(args, verbs.dest)) is None:
            break
        chosen = verbs.choices[name]
    if verbs is not None and not rest:
        chosen.print_help()
        sys.exit(0)
    late = [word for word in rest if "=" in word and not word.startswith("-")]
    unknown = [word for word in rest if word not in late]
    if unknown or (late and not hasattr(args, "overrides")):
        word = (unknown or late)[0]
        chosen.error(f"unknown argument {word}{near_option(chosen, word)}")
    if late:
        args.overrides = [*args.overrides, *late]
    return args


def near_option(parser: argparse.ArgumentParser, word: str) -> str:
    """Suggest the option of a verb that an unknown one is nearest to; empty if none is, or the word is no option."""
    if not word.startswith("-"):
        return ""
    near = difflib.get_close_matches(f"--{word.lstrip('-').partition('=')[0]}", parser._option_string_actions, n=1)
    return f". Did you mean {near[0]}?" if near else ""


def read_paths(args: argparse.Namespace) -> None:
    """Read the paths among the arguments as ``typed_path`` does, in place."""
    for name, value in vars(args).items():
        several = value if isinstance(value, list) else [value]
        read = [
            type(each)(typed_path(str(each)))
            if isinstance(each, Path) or (isinstance(each, str) and name in NAMES)
            else each
            for each in several
        ]
        setattr(args, name, read if isinstance(value, list) else read[0])


def main(argv: list[str] | None = None) -> int:
    """Run one verb; a user's mistake ends in a message and an exit code, never in a traceback.

    Returns:
        0 on success, 1 for problems that doctor found, 2 for configuration and input, 4 for a non-finite loss or
        gradient, 5 for full memory, 6 for a full disk, 7 if another process of the run is gone, 130 after Ctrl-C or a
        request to stop, 143 after SIGTERM.
    """
    print_any_text()
    args = parse(argv)
    prepare_environment()
    try:
        end_with_launcher()
        read_paths(args)
        with verbose(getattr(args, "verbose", False)):
            VERBS[args.verb][0](args)
    except UserError as error:
        told = name_folders(error, todays_words(argv)) if isinstance(error, ConfigError) else error
        print(f"error: {printable(redact(str(told)))}", file=sys.stderr)
        return error.code
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (MemoryError, RuntimeError, OSError) as error:
        if _is_memory_full(error):
            print(f"error: {printable(redact(_memory_full(error)))}", file=sys.stderr)
            return 5
        if not isinstance(error, OSError) or error.filename is None:  # without a file, a traceback is more useful
            raise
        remedy = "Repair or remove it, or check that this user has read and write permission"
        text = f"{error.filename}: {error.strerror or type(error).__name__}. {remedy}"
        print(f"error: {redact(text)}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"\n{stopped}", file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:
        print("\nstopped; finished work is kept", file=sys.stderr)
        return 130
    return 0


def name_folders(error: ConfigError, words: Sequence[str]) -> ConfigError:
    """Say of pictures that are not there, and that no word of the command names, how this command names others."""
    from simpletune.data.sources.folder import MissingFolder

    given = {word.partition("=")[0] for word in words}
    folders = [each for each in error.problems if isinstance(each, MissingFolder)]
    missing = [each for each in folders if not given & {"data.path", each.path}]
    command = quote_command("simpletune", *words, *(f"{each.path}=FOLDER" for each in missing))
    told: dict[Problem, Problem] = {}
    for each in missing:
        place = "there" if Path(each.folder).is_absolute() else f"in {Path.cwd()}"
        why = f"the folder with your pictures ({each.folder} is not {place})"
        told[each] = Problem(each.path, f"add {each.path}=FOLDER, {why}:\n    {command}")
    return ConfigError([told.get(each, each) for each in error.problems], error.source)


def _is_memory_full(error: BaseException) -> bool:
    """Return whether an error says that this machine, rather than its card, has no memory left: Python's, the system's,
    or that of torch's allocator."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _memory_full(error: BaseException) -> str:
    """Say how much memory was asked for, if the error knows, how much this process has had, and what to do."""
    asked = " ".join(str(error).split())[:300]
    return (
        f"this machine's memory is full{f' ({asked})' if asked else ''}; this process has used up to "
        f"{peak_resident_bytes() / 2**30:,.1f} GiB. End other programs, raise the limit that this process has "
        "(ulimit -v, a container's), or give it less at once: smaller files, pictures or batches. A run continues with "
        "--resume auto"
    )


def run_verb(*words: str) -> None:
    """Run ``simpletune WORDS`` with a script's own arguments appended, and exit with its code, as inference/ does."""
    sys.exit(main([*words, *sys.argv[1:]]))
