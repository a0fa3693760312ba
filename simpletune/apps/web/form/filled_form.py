"""A filled-in form: the chosen base, the user's changes, all problems at once, and a description."""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from simpletune.apps.web.form import presets
from simpletune.apps.web.form.fields import (
    YOU,
    EditedForm,
    StartingConfig,
    apply_edits,
    changes,
    format_value,
    get_at,
    overrides,
    set_at,
)
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.scans import ImageScan, Scans
from simpletune.commands.init import FolderContents, Question
from simpletune.commands.init.answers import What
from simpletune.commands.init.choices import guess_what
from simpletune.config.explain import explain
from simpletune.config.load import path_fields, read_json, validate
from simpletune.config.overrides import as_overrides
from simpletune.config.schema import DEMO, TrainConfig
from simpletune.data.demo import MODELS
from simpletune.runs.folder import CONFIG
from simpletune.system.gpus import Card, find_card
from simpletune.system.hub import HUB_NAME
from simpletune.system.options import ConfigError, Json, Problem, UserError, plural

FOLDER, MODEL, PROMPT, TRIGGER = "data.path", "model.pretrained", "data.prompt", "trigger"
DIRECTIONS = "concept.directions"
TOP = (
    "name", "adapter.method", FOLDER, "data.resolution", "concept.resolutions", MODEL, "objective.name", "train.steps",
)  # fmt: skip
SLIDER = "slider"  # the base of a run from prompts alone
QUOTES = ", without quotes"  # what a message about JSON says, and a field of the form has none
PLACEHOLDER = "demo:pictures"
UNSAID = ("$schema", "about")
ELSEWHERE = ("model.loras", "adapter.start", "output.runs")  # names of LoRAs, and the page's own folder
STORE = re.compile(r"(s3|gs|az|hf|https?)://[^/]+")  # not file://, which would lead out of the roots


@dataclass(frozen=True)
class FolderAnswers:
    """What the user has answered about a folder's pictures."""

    folder: str = ""  # they concern no other
    chosen: tuple[tuple[str, str], ...] = ()  # the text of each question, and the words of the choice


@dataclass(frozen=True)
class FormRequest:
    """What a form asks for."""

    base: str  # ``preset``, ``slider``, ``shipped:NAME``, ``file:PATH`` or ``run:NAME``
    card: str  # the chosen card's value
    trigger: str  # the word to name what is learned, and its class
    texts: Mapping[str, str]  # posted fields by path
    shown: Mapping[str, str]  # the texts that the fields were shown with
    mine: Mapping[str, str]  # the user's texts
    answers: FolderAnswers = FolderAnswers()
    what: What | None = None  # what the pictures teach; None: guess


@dataclass(frozen=True)
class FilledForm:
    """A filled-in form."""

    asked: FormRequest
    base: StartingConfig
    card: Card | None  # to train on; None: there is none
    edited: EditedForm
    data: Json  # to save, paths absolute
    config: TrainConfig | None  # None if it has problems, or the folder is still looked at
    planned: TrainConfig | None  # to predict: without the pictures if only they are a problem; None: there are others
    problems: list[Problem]
    answers: FolderAnswers = FolderAnswers()
    answered: Mapping[str, str] = field(default_factory=dict)  # the texts of the fields that they set, by path
    questions: tuple[Question, ...] = ()  # that are still open
    scan: ImageScan[FolderContents] | None = None  # of the folder with the pictures; None: none is chosen

    @property
    def seen(self) -> FolderContents | None:
        """What the folder holds, once that is known."""
        return self.scan.found if self.scan else None

    @property
    def guess(self) -> str:
        """What the pictures seem to teach; empty before that is known."""
        return guess_what(self.seen)[0] if self.seen is not None else ""

    @property
    def about_captions(self) -> str:
        """That all pictures have one caption, and which; empty if they have their own."""
        prompt, seen = get_at(self.data, PROMPT), self.seen
        if seen is None or not prompt:
            return ""
        why = self.base.reasons.get(PROMPT, "") if PROMPT not in self.edited.mine else ""
        images = plural(len(seen.images), "picture is", "pictures are")
        return f"{images} trained with one caption, “{prompt}”{': ' if why else ''}{why}"

    def problems_of(self, path: str) -> list[str]:
        return [each.message for each in self.problems if each.path == path]

    def problems_in(self, section: str) -> int:
        return sum(f"{each.path}.".startswith(f"{section}.") for each in self.problems)

    def yours_in(self, section: str) -> int:
        return sum(f"{path}.".startswith(f"{section}.") for path in self.edited.mine)

    @property
    def line(self) -> str:
        """The most important settings in a line; empty if they cannot be read."""
        config = self.planned
        if config is None:
            return ""
        length = plural(config.train.epochs, "epoch") if config.train.epochs else plural(config.steps(1), "step")
        of = config.train.global_batch or config.train.micro_batch
        parts = [
            config.model.pretrained,
            config.adapter.method,
            f"{config.resolution} px",
            f"{length} of {plural(of, 'picture' if config.concept is None else 'drawing')} each",
            f"learning rate {config.optimizer.lr:g}",
        ]
        return ", ".join(parts)

    @property
    def is_slider(self) -> bool:
        """Whether it trains from prompts alone."""
        return FOLDER not in self.edited.fields

    @property
    def prompts(self) -> list[str]:
        """The paths of the prompts that each direction of a slider needs, and of the number of directions."""
        count = len(self.edited.fields[DIRECTIONS].items or ()) if DIRECTIONS in self.edited.fields else 0
        own = [f"{DIRECTIONS}.{number}.{name}" for number in range(count) for name in presets.EXAMPLE]
        return [*own, DIRECTIONS] if count and self.is_slider else []

    @property
    def top(self) -> tuple[str, ...]:
        """The paths of the fields that stand above the sections."""
        return (*TOP, *self.prompts)

    @property
    def about(self) -> str:
        """A description like ``check``'s; empty while there are problems."""
        return explain(self.config) if self.config is not None else ""

    @property
    def command(self) -> str:
        """The equivalent command line."""
        made_by = self.base.made_by
        origin = self.base.data if made_by else read_json(Path(self.base.origin))
        changed = overrides(origin, self.data)
        words = as_overrides({path: value for path, value in changed.items() if path not in UNSAID})
        train = shlex.join(["simpletune", "train", self.base.origin, *words])
        return f"{shlex.join(['simpletune', *made_by, self.base.origin])} &&\n{train}" if made_by else train


def fill_form(roots: Roots, scans: Scans, asked: FormRequest) -> FilledForm:
    """Fill in a form. Raises UserError if the base or the card does not exist."""
    card = presets.card_here() if asked.card == presets.HERE else find_card(asked.card)
    mine = changes(asked.texts, asked.shown, asked.mine)
    folder = mine.get(FOLDER, "")
    images = _images(roots, asked, folder)
    scan = scans.scan_folder(images) if images is not None else None
    base = _base(roots, asked, card, images, scan, {}, mine)
    answers, chosen, done = FolderAnswers(folder), dict[str, object](), set[str]()
    known = {(each.text, choice.words): choice for each in base.questions for choice in each.choices}
    for each in asked.answers.chosen if asked.answers.folder == folder else ():
        choice = known.get(each)  # None: the pictures have changed, and the question with them
        if choice is not None and choice.overrides:
            done.add(each[0])
            chosen |= choice.overrides
            if set(choice.overrides) != {TRIGGER}:  # its field keeps that one
                answers = FolderAnswers(folder, (*answers.chosen, each))
    trigger = chosen.pop(TRIGGER, None)
    if trigger is not None:
        asked = replace(asked, trigger=str(trigger))
    questions = tuple(each for each in base.questions if each.text not in done and not _is_by_hand(each, mine))
    if images is not None and (chosen or trigger is not None):
        scan = scans.scan_folder(images, chosen)
        base = _base(roots, asked, card, images, scan, chosen, mine)
    answered = {path: format_value(value, "lines") for path, value in chosen.items() if path not in mine}
    # the user's, even if the base has the same
    named = {path: mine[path] for path in (FOLDER, MODEL) if mine.get(path)}
    named |= {path: text for path, text in mine.items() if path.startswith(presets.DIRECTION)}
    kept = {**answered, **named}
    found = apply_edits(base, {**mine, **answered})
    found = replace(found, mine={**found.mine, **kept})
    for path in kept:
        if path in found.fields:
            found.fields[path].source = YOU
    data, outside = absolute_paths(found.data, roots)
    hidden = _without(data, {each.path for each in outside})
    # what follows from the scan is right; and the folder is not listed once more, which takes seconds for 100,000 files
    needs_data = scan is None or any(path.startswith("data.") and path != FOLDER for path in found.mine)
    more, config = _problems(data, hidden, {each.path for each in outside}, needs_data)
    problems = [*outside, *more]
    if scan is not None and scan.problem and FOLDER not in {each.path for each in problems}:
        problems.append(Problem(FOLDER, scan.problem))
    is_running = scan is not None and scan.is_running
    if problems or is_running:
        config = None
    planned = config
    if config is None and not is_running:
        with suppress(UserError):
            planned = validate(hidden, "form", needs_data=False)
    return FilledForm(asked, base, card, found, data, config, planned, problems, answers, answered, questions, scan)


def _is_by_hand(question: Question, mine: Mapping[str, str]) -> bool:
    """Return whether the user has set by hand what one of the choices sets."""
    return any(choice.overrides and choice.overrides.keys() <= mine.keys() for choice in question.choices)


def _images(roots: Roots, asked: FormRequest, folder: str) -> Path | None:
    """Return the user's folder of pictures; None without one, if the page may not read it, or the base says how to."""
    kind, _, name = asked.base.partition(":")
    if kind not in ("preset", "shipped") or not folder or ":" in folder:
        return None
    if kind == "shipped" and presets.is_slider(name):
        return None
    with suppress(UserError):
        path = roots.resolve(folder)
        return path if path.is_dir() else None
    return None


def _base(
    roots: Roots,
    asked: FormRequest,
    card: Card | None,
    images: Path | None,
    scan: ImageScan[FolderContents] | None,
    chosen: Json,
    mine: Mapping[str, str],
) -> StartingConfig:
    kind, _, name = asked.base.partition(":")
    if kind == SLIDER:
        return presets.slider(card, mine, _named_model(roots, mine.get(MODEL, "")))
    if kind in ("preset", "shipped"):
        seen = scan.found if scan else None
        if kind == "preset":
            model = _named_model(roots, mine.get(MODEL, ""))
            return presets.preset(card, images, seen, asked.trigger, chosen, asked.what, model)
        return presets.shipped_config(name, images, seen, asked.trigger, chosen, asked.what)
    if kind == "run":
        run = roots.run(name)
        if run is None:
            raise UserError(f"There is no run {name[:80]!r}")
        file, label = run / CONFIG, f"from the run {name}"
    elif kind == "file":
        file = roots.resolve(name)
        label = f"from the configuration {file.name}"
    else:
        raise UserError(f"{asked.base[:80]!r} is not a configuration to start from")
    data = read_json(file)
    data.pop("$schema", None)
    return StartingConfig(data, label, str(file))


def _named_model(roots: Roots, text: str) -> str | None:
    """Return the base that the user has named, if the page may look at it: its settings are then those of its
    family."""
    if text in MODELS or roots.is_on_hub(text):
        return text
    with suppress(UserError):
        return str(roots.resolve(text)) if text and not text.startswith(DEMO) else None
    return None


def _problems(
    data: Json, hidden: Json, outside: set[str], needs_data: bool
) -> tuple[list[Problem], TrainConfig | None]:
    """Return the problems that ``check`` finds, without looking at paths that the page may not read (``hidden``), and
    the configuration, if only a folder or such paths are wrong."""
    is_empty = get_at(data, FOLDER) == ""
    required = [Problem(FOLDER, "Give the folder with the pictures")] if is_empty else []
    try:
        config = validate(hidden, "form", needs_data=needs_data)
    except ConfigError as error:
        found = (each for each in error.problems if each.path not in outside)
        return [*required, *(Problem(each.path, each.message.replace(QUOTES, "")) for each in found)], None
    return required, config


def _without(data: Json, outside: set[str]) -> Json:
    """Copy a configuration without the paths that the page may not read, and with the demo's pictures where the folder
    is still empty."""
    data = copy.deepcopy(data)
    if get_at(data, FOLDER) == "":
        set_at(data, FOLDER, PLACEHOLDER)
    for section, key, path in path_fields(data):
        if path in outside:
            section[key] = PLACEHOLDER if key == "path" else None
    return data


def absolute_paths(data: Json, roots: Roots) -> tuple[Json, list[Problem]]:
    """Make a configuration's paths absolute, and set its runs' folder to the page's; return the changed JSON, and a
    problem for each path outside of the roots. Addresses of stores that a run reads stay."""
    data, problems = copy.deepcopy(data), []
    for section, key, path in path_fields(data):
        if path.startswith(ELSEWHERE):
            continue
        text = section[key]
        if text.startswith(DEMO) or not text:
            continue
        if STORE.match(text) and (key == "path" or path == "output.cache"):  # whether this one can: validation says
            continue
        # a repository on the hub, of a model or a data set
        of_hub = path.startswith(("model.", "data.")) and not path.endswith("mask_path") and HUB_NAME.match(text)
        try:
            found = roots.resolve(text)
        except UserError as error:
            # a name as on the hub means a path where one exists, even if only as a link out of the roots
            if not of_hub or os.path.exists(roots.named[0] / text):
                problems.append(Problem(path, str(error)))
            continue
        if found.exists() or not of_hub:
            section[key] = str(found)
    output = data.setdefault("output", {})
    if isinstance(output, dict):
        runs = output.get("runs")
        if isinstance(runs, str) and "://" in runs:
            why = f"{runs} is a store, and this page keeps its runs in {roots.runs}. Clear the field, or start the run "
            problems.append(Problem("output.runs", f"{why}in a terminal"))
        output["runs"] = str(roots.runs)
    return data, problems
