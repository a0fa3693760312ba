"""A filled-in form: the chosen base, the user's changes, all problems at once, and a description in words."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from simpletune.apps.web.form import presets
from simpletune.apps.web.form.edit import (
    YOU,
    EditedForm,
    StartingConfig,
    apply_edits,
    changes,
    get_at,
    overrides,
    set_at,
)
from simpletune.apps.web.form.paths import absolute_paths
from simpletune.config.explain import explain
from simpletune.config.load import read_json, validate
from simpletune.config.schema import TrainConfig
from simpletune.runs.folder import CONFIG
from simpletune.system.gpus import Card
from simpletune.system.options import ConfigError, Json, Problem, UserError, plural

FOLDER = "data.path"
PLACEHOLDER = "demo:pictures"
UNSAID = ("$schema", "about")


class Places(Protocol):
    """Where a form may read; implemented by ``web.roots.Roots``."""

    @property
    def runs(self) -> Path:
        """The folder of the runs."""
        ...

    def resolve(self, text: str) -> Path:
        """Resolve a path inside of the roots.

        Raises:
            UserError: the path lies outside.
        """
        ...

    def run(self, name: str) -> Path | None:
        """Return the folder of a run."""
        ...


@dataclass(frozen=True)
class FormRequest:
    """A form's request.

    Args:
        base: ``preset``, ``shipped:NAME``, ``file:PATH`` or ``run:NAME``.
        card: the chosen card's value.
        trigger: the word to name what is learned.
        texts: posted fields by path.
        shown: the texts that the fields were shown with.
        mine: the user's texts.
    """

    base: str
    card: str
    trigger: str
    texts: Mapping[str, str]
    shown: Mapping[str, str]
    mine: Mapping[str, str]


@dataclass(frozen=True)
class FilledForm:
    """A filled-in form.

    Args:
        asked: the request.
        base: the base that was chosen.
        card: the card to train on; None: there is none.
        edited: the fields.
        data: JSON to save, paths absolute.
        config: the validated configuration; None if it has problems.
        planned: the configuration to predict: without the pictures if these are the only problem; None if there are
            others.
        problems: all problems.
    """

    asked: FormRequest
    base: StartingConfig
    card: Card | None
    edited: EditedForm
    data: Json
    config: TrainConfig | None
    planned: TrainConfig | None
    problems: list[Problem]

    def problems_of(self, path: str) -> list[str]:
        """Return the messages to show at a field."""
        return [each.message for each in self.problems if each.path == path]

    def problems_in(self, section: str) -> int:
        """Count the problems of a section's fields."""
        return sum(each.path.startswith(f"{section}.") or each.path == section for each in self.problems)

    def yours_in(self, section: str) -> int:
        """Count the user's own values in a section."""
        return sum(path.startswith(f"{section}.") or path == section for path in self.edited.mine)

    @property
    def line(self) -> str:
        """The most important settings in a line; empty if they cannot be read."""
        config = self.planned
        if config is None:
            return ""
        length = plural(config.train.epochs, "epoch") if config.train.epochs else plural(config.steps(1), "step")
        of = config.train.global_batch or config.train.micro_batch
        parts = [config.model.pretrained, config.adapter.method, f"{config.data.resolution} px", f"{length} of "
                 f"{plural(of, 'picture')}", f"learning rate {config.optimizer.lr:g}"]  # fmt: skip
        return ", ".join(parts)

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
        words = [f"{path}={_word(value)}" for path, value in changed.items() if path not in UNSAID]
        train = shlex.join(["simpletune", "train", self.base.origin, *words])
        return f"{shlex.join(['simpletune', *made_by, self.base.origin])} &&\n{train}" if made_by else train


def fill_form(places: Places, asked: FormRequest) -> FilledForm:
    """Fill in a form.

    Args:
        places: where it may read.
        asked: the request.

    Raises:
        UserError: the base or the card does not exist.
    """
    card = presets.card_named(asked.card)
    mine = changes(asked.texts, asked.shown, asked.mine)
    base = _base(places, asked, card, mine.get(FOLDER, ""))
    found = apply_edits(base, mine)
    if mine.get(FOLDER):  # the folder is the user's, whichever base is chosen next
        found = EditedForm(
            found.data, found.sections, {**found.mine, FOLDER: mine[FOLDER]}, {**found.sources, FOLDER: YOU}
        )
    data, outside = absolute_paths(found.data, places.resolve, places.runs)
    problems = [*outside, *_problems(data, {each.path for each in outside})]
    config = None if problems else validate(data, "form")
    return FilledForm(asked, base, card, found, data, config, config or _without_pictures(data), problems)


def _base(places: Places, asked: FormRequest, card: Card | None, folder: str) -> StartingConfig:
    kind, _, name = asked.base.partition(":")
    if kind in ("preset", "shipped"):
        pictures = _folder(places, folder)
        made = presets.preset(card, pictures, asked.trigger) if kind == "preset" else None
        return made or presets.shipped_config(name, pictures, asked.trigger)
    if kind == "run":
        run = places.run(name)
        if run is None:
            raise UserError(f"There is no run {name[:80]!r}")
        file, label = run / CONFIG, f"run {name}"
    elif kind == "file":
        file = places.resolve(name)
        label = f"file {file.name}"
    else:
        raise UserError(f"{asked.base[:80]!r} is not a configuration to start from")
    data = read_json(file)
    data.pop("$schema", None)
    return StartingConfig(data, label, str(file))


def _folder(places: Places, text: str) -> Path | None:
    """Return the folder of pictures, if the page may read it."""
    try:
        found = places.resolve(text) if text and ":" not in text else None
    except UserError:
        return None
    return found if found is not None and found.is_dir() else None


def _problems(data: Json, outside: set[str]) -> list[Problem]:
    """Return the problems that ``check`` finds, without looking at paths that the page may not read."""
    tried = copy.deepcopy(data)
    for path in outside:
        if not path.startswith("data.sources"):
            set_at(tried, path, PLACEHOLDER if path == FOLDER else None)
    empty = get_at(tried, FOLDER) == ""
    if empty:
        set_at(tried, FOLDER, PLACEHOLDER)
    required = [Problem(FOLDER, "is required: give the folder with the pictures")] if empty else []
    try:
        validate(tried, "form")
    except ConfigError as error:
        return [*required, *(each for each in error.problems if each.path not in outside)]
    return required


def _without_pictures(data: Json) -> TrainConfig | None:
    """Return the configuration if only its pictures are missing."""
    tried = copy.deepcopy(data)
    if get_at(tried, FOLDER) == "":
        set_at(tried, FOLDER, PLACEHOLDER)
    try:
        return validate(tried, "form", needs_data=False)
    except UserError:
        return None


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
