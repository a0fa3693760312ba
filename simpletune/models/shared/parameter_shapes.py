"""The shapes of a model's parameters from its ``config.json``, as diffusers' class makes them.

``shapes.json`` has those of every configuration that ships (``make shapes``), so that whoever
reads them needs no torch. For any other configuration diffusers builds the model once, without weights: here if torch
is loaded, else in a process of its own, whose result is kept.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpletune.models.shared.model_config import ModelConfig, Shape, Shapes
from simpletune.system.atomic import write_text
from simpletune.system.console import note
from simpletune.system.options import UserError
from simpletune.system.startup import ensure_libraries

if TYPE_CHECKING:
    from torch import nn

STORED = Path(__file__).with_name("shapes.json")
CACHE = Path(".cache/shapes")
LONGEST = 600  # seconds of the process: 3 to 10, nearly all of them for imports, and minutes on a busy machine
REMEDY = "Download the model again, or use another"


def shapes_of_class(model: str, config: ModelConfig) -> dict[str, Shape]:
    """Return every parameter's shape in diffusers' class ``model``. Raises UserError if it makes no such model."""
    return dict(_shapes(model, settings_of(config, _stored()["defaults"].get(model))))


def settings_of(config: ModelConfig, defaults: ModelConfig | None) -> str:
    """Return the settings of a ``config.json`` that differ from the class's defaults, if these are known, as JSON."""
    given = json.loads(json.dumps(config))
    if defaults is not None:  # diffusers ignores what the class does not know
        given = {name: given[name] for name in defaults if name in given and given[name] != defaults[name]}
    return json.dumps({name: given[name] for name in sorted(given) if not name.startswith("_")})


def empty_model(model: str, config: ModelConfig) -> nn.Module:
    """Build a model of diffusers' class ``model`` with all tensors on the meta device."""
    import diffusers
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=True):
        built: nn.Module = getattr(diffusers, model).from_config(config)
    return built


@lru_cache(maxsize=1)
def _stored() -> dict[str, Any]:
    """Read ``defaults`` of each class; ``trees``, of names and shapes or numbers of other trees; ``models``, the number
    of a tree by class and ``settings_of``."""
    return dict(json.loads(STORED.read_bytes()))


@lru_cache(maxsize=64)
def _shapes(model: str, settings: str) -> Shapes:
    if (root := _stored()["models"].get(f"{model} {settings}")) is not None:
        return dict(_leaves(root))
    return _made(model, settings) if "torch" in sys.modules else _kept(model, settings)


def _made(model: str, settings: str) -> dict[str, Shape]:
    ensure_libraries()
    try:
        made = empty_model(model, json.loads(settings))
    except Exception as error:  # whatever a constructor says of settings that contradict one another
        why = str(error).partition("\n")[0][:200].rstrip(".")
        raise UserError(f"diffusers makes no {model} of this config.json: {why}. {REMEDY}") from error
    return {name: tuple(value.shape) for name, value in made.named_parameters()}


def _leaves(tree: int, prefix: str = "") -> Iterator[tuple[str, Shape]]:
    for name, below in _stored()["trees"][tree].items():
        if isinstance(below, int):
            yield from _leaves(below, f"{prefix}{name}.")
        else:
            yield prefix + name, tuple(below)


def _kept(model: str, settings: str) -> Shapes:
    """Return the shapes that a process of its own finds, or found before."""
    from importlib.metadata import version

    about = f"diffusers {version('diffusers')} {model} {settings}"
    file = CACHE / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.json"
    try:
        return {name: tuple(shape) for name, shape in json.loads(file.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # there is none, or it is damaged
        found = _found(model, settings, file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(found), shared=True)
    except OSError as error:
        note([f"shapes  {file} cannot be written ({error.strerror}): they are computed again next time"])
    return found


def _found(model: str, settings: str, file: Path) -> Shapes:
    import subprocess

    note([f"shapes  none that ships is of this {model}: diffusers computes them once, in seconds, for {file}"])
    # Without the current folder, whose files could hide modules; the package's comes last: it may not be installed.
    code = f"import sys; sys.path.append({str(Path(__file__).parents[3])!r}); from {__name__} import print_shapes"
    command, asked = [sys.executable, "-P", "-c", f"{code}; print_shapes()"], json.dumps([model, settings])
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, errors="replace", timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise UserError(f"diffusers did not make a {model} of this config.json in {LONGEST} s. {REMEDY}") from None
    if done.returncode:
        why = (done.stderr.splitlines() or [f"it ended with code {done.returncode}"])[-1]
        raise UserError(f"the shapes of a {model} could not be computed: {why}. Try again, or see simpletune doctor")
    answer = json.loads(done.stdout.splitlines()[-1])
    if isinstance(answer, str):
        raise UserError(answer)
    return {name: tuple(shape) for name, shape in answer.items()}


def print_shapes() -> None:
    """Print, as a process, the shapes of what standard input asks for as JSON, or a UserError's message."""
    try:
        print(json.dumps(_made(*json.load(sys.stdin))))
    except UserError as error:
        print(json.dumps(str(error)))
