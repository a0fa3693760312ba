"""A filled-in form: the chosen base, the user's changes, all problems at once, and a description in words."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from simpletune.apps.web.form import presets
from simpletune.apps.web.form.fields import (
    YOU,
    EditedForm,
    StartingConfig,
    apply_edits,
    changes,
    get_at,
    overrides,
    set_at,
)
from simpletune.apps.web.roots import Roots
from simpletune.config.explain import explain
from simpletune.config.load import read_json, validate
from simpletune.config.schema import DEMO, TrainConfig
from simpletune.runs.folder import CONFIG
from simpletune.system.gpus import Card, find_card
from simpletune.system.hub import HUB_NAME
from simpletune.system.options import ConfigError, Json, Problem, UserError, plural

FOLDER = "data.path"
QUOTES = ", without quotes"  # what a message about JSON says, and a field of the form has none
PLACEHOLDER = "demo:pictures"
UNSAID = ("$schema", "about")
MODEL_PARTS = ("pretrained", "transformer", "unet", "vae", "text_encoders")
OUTPUT = ("profiles", "cache", "prices")
STORE = re.compile(r"(s3|gs|az|hf|https?)://[^/]+")  # not file://, which would lead out of the roots


@dataclass(frozen=True)
class FormRequest:
    """What a form asks for."""

    base: str  # ``preset``, ``shipped:NAME``, ``file:PATH`` or ``run:NAME``
    card: str  # the chosen card's value
    trigger: str  # the word to name what is learned
    texts: Mapping[str, str]  # posted fields by path
    shown: Mapping[str, str]  # the texts that the fields were shown with
    mine: Mapping[str, str]  # the user's texts


@dataclass(frozen=True)
class FilledForm:
    """A filled-in form."""

    asked: FormRequest
    base: StartingConfig
    card: Card | None  # to train on; None: there is none
    edited: EditedForm
    data: Json  # to save, paths absolute
    config: TrainConfig | None  # None if it has problems
    planned: TrainConfig | None  # to predict: without the pictures if only they are a problem; None: there are others
    problems: list[Problem]

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
        words = [f"{path}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
                 for path, value in changed.items() if path not in UNSAID]  # fmt: skip
        train = shlex.join(["simpletune", "train", self.base.origin, *words])
        return f"{shlex.join(['simpletune', *made_by, self.base.origin])} &&\n{train}" if made_by else train


def fill_form(roots: Roots, asked: FormRequest) -> FilledForm:
    """Fill in a form; a UserError if the base or the card does not exist."""
    card = presets.card_here() if asked.card == presets.HERE else find_card(asked.card)
    mine = changes(asked.texts, asked.shown, asked.mine)
    base = _base(roots, asked, card, mine.get(FOLDER, ""))
    found = apply_edits(base, mine)
    if mine.get(FOLDER):  # the folder is the user's, whichever base is chosen next
        found = replace(found, mine={**found.mine, FOLDER: mine[FOLDER]})
        if FOLDER in found.fields:
            found.fields[FOLDER].source = YOU
    data, outside = absolute_paths(found.data, roots)
    hidden = _without(data, {each.path for each in outside})
    problems = [*outside, *_problems(data, hidden, {each.path for each in outside})]
    config = planned = None
    if not problems:
        config = planned = validate(data, "form")
    else:
        with suppress(UserError):
            planned = validate(hidden, "form", needs_data=False)
    return FilledForm(asked, base, card, found, data, config, planned, problems)


def _base(roots: Roots, asked: FormRequest, card: Card | None, folder: str) -> StartingConfig:
    kind, _, name = asked.base.partition(":")
    if kind in ("preset", "shipped"):
        pictures: Path | None = None  # unless the page may read the folder
        with suppress(UserError):
            path = roots.resolve(folder) if folder and ":" not in folder else None
            pictures = path if path is not None and path.is_dir() else None
        made = presets.preset(card, pictures, asked.trigger) if kind == "preset" else None
        return made or presets.shipped_config(name, pictures, asked.trigger)
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


def _problems(data: Json, hidden: Json, outside: set[str]) -> list[Problem]:
    """Return the problems that ``check`` finds, without looking at paths that the page may not read."""
    is_empty = get_at(data, FOLDER) == ""
    required = [Problem(FOLDER, "Give the folder with the pictures")] if is_empty else []
    try:
        validate(hidden, "form")
    except ConfigError as error:
        found = (each for each in error.problems if each.path not in outside)
        return [*required, *(Problem(each.path, each.message.replace(QUOTES, "")) for each in found)]
    return required


def _without(data: Json, outside: set[str]) -> Json:
    """Copy a configuration without the paths that the page may not read, and with the demo's pictures where the folder
    is still empty."""
    data = copy.deepcopy(data)
    if get_at(data, FOLDER) == "":
        set_at(data, FOLDER, PLACEHOLDER)
    for section, key, path in _places(data):
        if path in outside:
            section[key] = PLACEHOLDER if key == "path" else None
    return data


def absolute_paths(data: Json, roots: Roots) -> tuple[Json, list[Problem]]:
    """Make a configuration's paths absolute, and set its runs' folder to the page's; return the changed JSON, and a
    problem for each path outside of the roots. Addresses of stores that a run reads stay."""
    data, problems = copy.deepcopy(data), []
    for section, key, path in _places(data):
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


def _places(data: Json) -> Iterator[tuple[Json, str, str]]:
    """Yield (section, key, path) of every text that names a file or folder."""
    found: list[tuple[object, str, tuple[str, ...]]] = [
        (data.get("data"), "data", ("path", "mask_path")),
        (data.get("model"), "model", MODEL_PARTS),
        (data.get("output"), "output", OUTPUT),
    ]
    own = data.get("data")
    sources = own.get("sources") if isinstance(own, dict) else None
    for number, source in enumerate(sources if isinstance(sources, list) else ()):
        found.append((source, f"data.sources.{number}", ("path", "mask_path")))
    for section, name, keys in found:
        for key in keys:
            if isinstance(section, dict) and isinstance(section.get(key), str):
                yield section, key, f"{name}.{key}"
