"""``simpletune init FOLDER``, and the configuration of ``simpletune train FOLDER``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from getpass import getpass
from pathlib import Path

from simpletune.commands.init.answers import Answers, ask
from simpletune.commands.init.choices import (
    NO_PHOTOS,
    Choice,
    Question,
    Suggestion,
    data_fields,
    default_trigger,
    guess_what,
    suggest,
    suggest_slider,
)
from simpletune.commands.init.inspect_folder import inspect_folder
from simpletune.config.load import read_config, validate
from simpletune.config.overrides import as_overrides, merge
from simpletune.config.schema import DEMO
from simpletune.data.concept import Direction
from simpletune.data.sources.accounts import sentences
from simpletune.data.sources.source import Source
from simpletune.runs.outputs import require_new
from simpletune.system.atomic import write_json
from simpletune.system.console import note, say
from simpletune.system.gpus import Card, find_card
from simpletune.system.options import Json, UserError, plural
from simpletune.system.printable import printable
from simpletune.system.shell import quote_command

CPU = "cpu"
MOST = 3  # attempts at a token
SLIDER = '--slider "a person" "a person, smiling" "a person, frowning"'


def file_for(folder: Path) -> Path:
    """Return the file for a folder's configuration: beside the folder, named after it."""
    whole = folder.resolve()
    return whole.with_name(f"{whole.name or 'pictures'}.json")


def init_command(
    folder: Path,
    answers: Answers,
    out: Path | None = None,
    device: str | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    overrides: Sequence[str] = (),
    verb: str = "init",
) -> Path:
    """Examine the pictures, ask, suggest, predict, and write the configuration.

    Args:
        folder: the pictures.
        answers: what the user has answered on the command line.
        out: the file to write; None: beside the folder.
        device: a card by name or memory, ``cpu``, or None for this machine's.
        overwrite: replace the file.
        quiet: ask no questions, even on a terminal.
        overrides: ``key.path=value``, written into the file; they answer what must be asked.
        verb: the verb that the user called, ``init`` or ``train``, for the commands to paste.

    Raises:
        UserError: the folder cannot be used, or leaves a question open; nothing is written.
    """
    out = out or file_for(folder)
    require_new(out, overwrite)
    chosen = fields_of(folder, overrides)
    card, why_none = card_for(device)
    seen = inspect_folder(folder, data_fields(chosen))
    say(
        f"{'pictures':<10} {seen.folder}: {plural(len(seen.images), 'usable picture')}, "
        f"{plural(len(seen.report.rejected), 'unusable entry', 'unusable entries')}"
    )
    for number, line in enumerate(sentences(seen.report.files)):
        say(f"{'' if number else 'files':<10} {line}")
    interactive = not quiet and sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        answers = ask(answers, guess_what(seen)[0], default_trigger(seen, "subject"))
    suggestion = suggest(folder, answers, card, seen, chosen)
    if suggestion.questions:
        elsewhere = None if out == file_for(folder) else out
        said: dict[str, object] = {"--what": answers.what, "--length": answers.length, "--model": answers.model}
        said |= {"--objective": answers.objective, "--device": device, "--out": elsewhere}
        said |= {"--overwrite": overwrite, "--yes": quiet}
        options = options_of(said) if verb == "init" else []
        raise UserError(open_questions(folder, suggestion.questions, answers, overrides, verb, options))
    _write(suggestion, out, card, why_none, overrides, interactive, verb)
    return out


def slider_command(
    prompts: Sequence[str],
    answers: Answers,
    out: Path | None = None,
    device: str | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    overrides: Sequence[str] = (),
) -> Path:
    """Suggest, predict, and write the configuration of a slider.

    Args:
        prompts: the target, what strength 1 moves it towards, and what strength -1 does; empty: no such end.

    The others are as those of ``init_command``. Raises UserError if the prompts make no direction, or the file exists.
    """
    if not 2 <= len(prompts) <= 3:
        raise UserError(
            f"--slider: {plural(len(prompts), 'prompt')}, but it takes what changes, what strength 1 moves it towards, "
            f"and if wanted what strength -1 does: {SLIDER}"
        )
    target, positive, negative = (*prompts, "")[:3]
    erases = bool(target) and not positive and target == negative
    neutral = "" if erases else None  # which leaves less of it
    direction = Direction(target=target, positive=positive or None, negative=negative or None, neutral=neutral)
    if (problem := next(direction.problems(), None)) is not None:
        raise UserError(f"--slider: {problem.path}: {problem.message}")
    card, why_none = card_for(device)
    suggestion = suggest_slider(direction, answers, card)
    out = out or Path(f"{suggestion.config['name']}.json")
    require_new(out, overwrite)
    interactive = not quiet and sys.stdin.isatty() and sys.stdout.isatty()
    _write(suggestion, out, card, why_none, overrides, interactive)
    return out


def _write(
    suggestion: Suggestion,
    out: Path,
    card: Card | None,
    why_none: str,
    overrides: Sequence[str],
    interactive: bool,
    verb: str = "init",
) -> None:
    """Apply the overrides, fit the configuration to the card, write it, and say why it is as it is."""
    merged, notices, problems = merge(suggestion.config, list(overrides))
    validate(merged, str(out), problems)
    note(notices)
    suggestion = replace(suggestion, config=merged)
    model = suggestion.config["model"]["pretrained"]
    if card is not None and not model.startswith(DEMO):
        from simpletune.commands.init.fit_card import fit_to_card

        suggestion = fit_to_card(suggestion, card)
        validate(suggestion.config, str(out))
    try:
        write_json(out, suggestion.config)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror or error}). Name another file with --out") from None
    if interactive:
        ask_for_token(model)
    for line in _lines(suggestion, out, why_none, verb):
        say(line)


def ask_for_token(model: str, read: Callable[[str], str] = getpass) -> None:
    """Ask for a token of the Hub, which is not shown, if the model needs one; Enter leaves it out."""
    from simpletune.models.families import base_access
    from simpletune.system.hub import is_hub_name
    from simpletune.system.hub_account import TOKENS, keep_token

    if not is_hub_name(model) or base_access(model).state not in ("no token", "refused"):
        return
    for _ in range(MOST):
        said = read(f"{model} needs a token of the Hub ({TOKENS}). Paste it (not shown; Enter leaves it out): ")
        if not said.strip():
            return
        try:
            say(f"{'hub':<10} the token is kept for {keep_token(said)}")
            return
        except UserError as error:
            say(f"{'hub':<10} {error}")


def card_for(device: str | None) -> tuple[Card | None, str]:
    """Return a card by name or memory, none for ``cpu``, or for None this machine's; and why there is none here."""
    if device is None:
        from simpletune.commands.init.fit_card import card_here

        return card_here()
    return (None if device.lower() == CPU else find_card(device)), ""


def fields_of(folder: Path, overrides: Sequence[str]) -> Json:
    """Return the values of overrides by path, as their fields read them; ``merge`` says what is wrong with them."""
    merged, _, _ = merge({"data": {"path": str(folder)}}, list(overrides))
    found: Json = {}
    for override in overrides:
        path = override.partition("=")[0]
        section: object = merged
        for part in path.split("."):
            section = section.get(part) if isinstance(section, dict) else None
        found[path] = section
    return found


def options_of(said: Mapping[str, object]) -> list[str]:
    """Return the options of a command line that say something else than their defaults."""
    words: list[str] = []
    for option, value in said.items():
        if value is True:
            words.append(option)
        elif value not in (None, False, "normal"):
            words += [option, str(value)]
    return words


def open_questions(
    folder: Path,
    questions: Sequence[Question],
    answers: Answers,
    overrides: Sequence[str],
    verb: str,
    options: Sequence[str] = (),
) -> str:
    """Format the questions with their choices, each with a command to paste, which repeats the overrides and options
    given."""
    before = "trained" if verb == "train" else "written"
    lines = [f"{folder}: {plural(len(questions), 'question')} before anything is {before}"]
    for question in questions:
        lines.append(f"  {printable(question.text)}.")
        lines += [
            f"    {choice.words}:  {_command(folder, choice, answers, overrides, verb, options)}"
            for choice in question.choices
        ]
    return "\n".join(lines)


def _command(
    folder: Path, choice: Choice, answers: Answers, overrides: Sequence[str], verb: str, options: Sequence[str]
) -> str:
    folder = folder / choice.below
    trigger = choice.overrides.get("trigger", answers.trigger)
    fields = {path: value for path, value in choice.overrides.items() if path != "trigger"}
    words = [*overrides, *as_overrides(fields), *options]
    if trigger is None:
        return quote_command("simpletune", verb, folder, *words)
    init = quote_command("simpletune", "init", folder, *words, "--trigger", trigger)
    return init if verb == "init" else f"{init} && {quote_command('simpletune', 'train', folder)}"


def _lines(suggestion: Suggestion, out: Path, why_none: str, verb: str) -> Iterator[str]:
    from simpletune.commands.init.fit_card import model_findings

    if why_none:
        yield f"{'card':<10} none: {why_none}. {quote_command('simpletune', 'doctor')} says more"
    for reason in suggestion.reasons:
        yield f"  {reason.path} {reason.value}: {reason.why}{reason.override and f': {reason.override}'}"
    for line in suggestion.notes:
        yield f"{'note':<10} {line}"
    if not suggestion.config["model"]["pretrained"].startswith(DEMO):
        for finding in model_findings(suggestion.config["model"]["pretrained"]):
            for number, line in enumerate(finding.lines()):
                yield f"{'model' if number == 0 else '':<10} {line.strip()}"
    yield f"{'written':<10} {out}"
    if verb != "init":  # it goes on by itself
        return
    yield f"{'next':<10} {quote_command('simpletune', 'check', out)}; {quote_command('simpletune', 'train', out)}"


def reads_folder(folder: Path, source: Source) -> bool:
    return Path(source.path).resolve() == folder.resolve()


def config_for(folder: Path, overrides: Sequence[str] = (), verb: str = "train") -> Path:
    """Return the configuration of a folder: the one beside it, or a new one, into which what the user says of the data
    is written."""
    file = file_for(folder)
    is_new = not file.exists()
    if is_new:
        of_data = [override for override in overrides if override.startswith("data.")]
        init_command(folder, Answers(), quiet=True, overrides=of_data, verb=verb)
    config, _ = read_config(file)
    init = quote_command("simpletune", "init", folder)
    if not any(reads_folder(folder, source) for source in config.sources):
        raise UserError(
            f"{file} is a configuration for other pictures ({config.pictures.place}). Name a configuration, or write "
            f"one: {init} --out FILE"
        )
    if not is_new:
        say(f"{'config':<10} {file} is used again. {init} --overwrite writes a new one")
    if config.is_demo:
        say(f"{'note':<10} this trains the tiny model: {NO_PHOTOS}, whatever it is trained on")
    return file
