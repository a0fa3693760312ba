"""Ask a training run, through ``RUN/control.json``, to generate a picture, write a checkpoint or stop.

Commands and pages rewrite the whole file each time; the training loop only reads it, between two steps, and appends the
outcome of each request to ``control_answers.jsonl``. Pictures go to ``drawn/``, described in ``drawn/drawn.jsonl``.
Imports no torch.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, ValidationError

from simpletune.config.error_text import problems_of
from simpletune.models.shared.buckets import STEP
from simpletune.runs.folder import CONTROL, CONTROL_ANSWERS, GENERATED
from simpletune.runs.repair import parse_row
from simpletune.system import strict_json
from simpletune.system.atomic import quarantine, write_json
from simpletune.system.locks import is_held, wait_for_lock
from simpletune.system.options import ConfigError, Json, Option, UserError, plural
from simpletune.system.shell import quote_command
from simpletune.system.strict_json import JsonError

WAITING = 64  # requests in a file
LONGEST = 4000  # characters of a prompt
STRONGEST = 4.0
GENERATED_ROWS = f"{GENERATED}/drawn.jsonl"
State = Literal["done", "refused", "failed"]


class RunRequest(Option):
    """A request to a run."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]
    """Name of the request, by which it is answered once: letters, digits, _ and -."""
    asked: AwareDatetime | None = None
    """Time of the request, such as 2026-11-22T17:00:00Z; a request from before the run's last start is refused. null:
    the time the file was written."""


class GenerateRequest(RunRequest):
    """Draw a picture between two steps."""

    ask: Literal["draw"] = "draw"
    """Draw a picture with the current weights."""
    prompt: Annotated[str, Field(min_length=1, max_length=LONGEST)]
    """Prompt to draw."""
    negative_prompt: Annotated[str, Field(max_length=LONGEST)] | None = None
    """Negative prompt for guidance; null: as in validation."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial noise."""
    strength: Annotated[float, Field(ge=0, le=STRONGEST)] = 1.0
    """Strength (scale, weight) of the LoRA; 0 draws with the base model."""
    steps: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Number of sampling steps; null: as in validation."""
    guidance: Annotated[float, Field(ge=1)] | None = None
    """Classifier-free guidance scale (CFG); null: as in validation."""
    width: Annotated[int, Field(ge=STEP, multiple_of=STEP)] | None = None
    """Width in pixels; null: as in validation."""
    height: Annotated[int, Field(ge=STEP, multiple_of=STEP)] | None = None
    """Height in pixels; null: as in validation."""


class SaveRequest(RunRequest):
    """Write a checkpoint between two steps."""

    ask: Literal["save"]
    """Write a checkpoint."""


class StopRequest(RunRequest):
    """Stop after the step."""

    ask: Literal["stop"]
    """Write a checkpoint and stop, as after SIGTERM; the run can be resumed."""


AnyRequest = GenerateRequest | SaveRequest | StopRequest


class ControlFile(Option):
    """The content of ``control.json``."""

    requests: Annotated[list[Annotated[AnyRequest, Field(discriminator="ask")]], Field(max_length=WAITING)]
    """Requests, answered in this order; requests that have been answered are skipped."""


def read_requests(folder: Path) -> list[AnyRequest]:
    """Read a run's control file; no requests if it does not exist. Raises UserError, which lists every problem, if it
    does not follow the format."""
    file = folder / CONTROL
    try:
        data = strict_json.read(file)
    except FileNotFoundError:
        return []
    except (OSError, JsonError) as error:
        raise UserError(f"{file} cannot be read ({error})") from None
    if not isinstance(data, dict):
        raise UserError(f'{file} is not an object. Write {{"requests": [...]}}')
    try:
        return ControlFile.model_validate_json(json.dumps(data)).requests
    except ValidationError as error:
        raise ConfigError(problems_of(error, data, ControlFile), str(file)) from None


def ask(folder: Path, request: AnyRequest) -> AnyRequest:
    """Add a request to a run's control file, keeping those that wait; returns it with its time set."""
    if not is_held(folder):
        raise UserError(
            f"{folder} is not training, so nothing would answer. Continue it with train CONFIG --resume auto, or draw "
            f"with {quote_command('simpletune', 'generate', '--run', folder)}"
        )
    request = request.model_copy(update={"asked": datetime.now(UTC)})
    with wait_for_lock(folder / ".control.lock", f"waiting for another request to {folder}"):
        try:
            requests = read_requests(folder)
        except UserError:  # damaged; the training loop warns about it if it sees it first
            requests = []
            with suppress(FileNotFoundError):
                quarantine(folder / CONTROL)
        answered = answered_ids(folder)
        waiting = [each for each in requests if each.id not in answered]
        if len(waiting) >= WAITING:
            raise UserError(f"{plural(len(waiting), 'request')} to {folder} already wait. Wait until one is answered")
        rows = [each.model_dump(mode="json", exclude_none=True) for each in (*waiting, request)]
        write_json(folder / CONTROL, {"requests": rows}, shared=True)
    return request


def new_id(kind: str) -> str:
    """Make a name for a new request."""
    return f"{kind}-{secrets.token_hex(6)}"


def read_answers(folder: Path) -> list[Json]:
    """Read the outcomes of a run's requests, oldest first: ``id``, ``ask``, ``state``, ``step``, ``why``, ``file``."""
    return _rows(folder / CONTROL_ANSWERS, {"id": str, "state": str})


def answered_ids(folder: Path) -> set[str]:
    """Return the ids of requests that have been answered."""
    return {row["id"] for row in read_answers(folder)}


def read_generated(folder: Path) -> list[Json]:
    """Read the descriptions of the pictures generated on request, oldest first; skips damaged lines."""
    return _rows(folder / GENERATED_ROWS, {"file": str, "prompt": str})


def _rows(file: Path, needed: dict[str, type]) -> list[Json]:
    try:
        lines: Iterable[str] = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # missing, or not a file
        return []
    rows = [row for line in lines if (row := parse_row(line, ())) is not None]
    return [row for row in rows if all(isinstance(row.get(key), kind) for key, kind in needed.items())]
