"""Plan what an evaluation draws and compares: points, requests, real pictures, and the key of every picture."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from io import BytesIO
from pathlib import Path

from PIL import Image

from simpletune.commands.evaluate.prompts import Prompt, PromptSet
from simpletune.commands.generate.session import GenerationSession
from simpletune.config.schema import TrainConfig
from simpletune.data.sources.multi_source import scan_sources
from simpletune.data.sources.pictures import decode
from simpletune.data.sources.source import Picture, UnusablePicture
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.folder import DATA, read_json_or_none, read_summary
from simpletune.runs.weights import BASE, Weights, find_weights, precision_of
from simpletune.runs.weights_names import CheckpointRef, find_in_run, is_unfinished
from simpletune.stages.sample import PictureRequest
from simpletune.system.checksums import sha256_of
from simpletune.system.model_folder import fingerprint
from simpletune.system.options import Json, UserError, join_names, plural

REAL = 1000
"""Maximum number of training pictures to compare with, evenly chosen."""
FIRST_SEED = 10_000
"""Far from the seeds of validation pictures."""


@dataclass(frozen=True)
class EvaluatedWeights:
    """Weights to evaluate.

    Args:
        step: step of the checkpoint; None for the base.
        strength: LoRA strength; None for the base and for full models.
        weights: weights to draw with.
    """

    step: int | None
    strength: float | None
    weights: Weights

    @property
    def title(self) -> str:
        """Name in tables."""
        if self.step is None:
            return "base"
        return f"step {self.step}" + ("" if self.strength is None else f" x {self.strength:g}")

    def name(self, run: Path | None) -> str:
        """Name for other commands: ``RUN@STEP:STRENGTH``."""
        if self.step is None or run is None:
            return "base"
        return f"{run.name}@{self.step}" + ("" if self.strength is None else f":{self.strength:g}")


@dataclass(frozen=True)
class Shot:
    """One picture that every point draws.

    Args:
        request: what to draw.
        prompt: index of its prompt.
        of_class: whether it shows another member of the class, for PRES.
    """

    request: PictureRequest
    prompt: int
    of_class: bool = False


@dataclass(frozen=True)
class EvaluationPlan:
    """An evaluation.

    Args:
        session: configuration, device and speed.
        points: points to evaluate, the base first.
        prompts: prompts with the name of their slice.
        shots: pictures to draw, the same for every point.
        real: training pictures to compare with.
        all_real: total number of training pictures.
    """

    session: GenerationSession
    points: tuple[EvaluatedWeights, ...]
    prompts: PromptSet
    shots: tuple[Shot, ...]
    real: tuple[Picture, ...]
    all_real: int

    def key(self, point: EvaluatedWeights, shot: Shot) -> str:
        """Return the name of a picture, a hash of everything that it depends on."""
        how: Json = {
            **self._common,
            "weights": identity(point.weights),
            "request": {key: str(value) for key, value in asdict(shot.request).items()},
            "precision": precision_of(self.session.config, point.weights).model_dump(mode="json"),
            "batch": self._neighbours[shot],
        }
        return hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()[:24]

    def groups(self) -> list[list[Shot]]:
        """Group the shots that are drawn together; the same groups in every call, whatever is left to draw."""
        size = self.session.speed.batch_size
        return [list(self.shots[first : first + size]) for first in range(0, len(self.shots), size)]

    @cached_property
    def _common(self) -> Json:
        """What all pictures depend on, as JSON."""
        config = self.session.config
        parts = {"model": config.model, "objective": config.objective}
        dumped = {name: part.model_dump(mode="json") for name, part in parts.items()}
        return {**dumped, "speed": asdict(self.session.speed), "device": self.session.device.type}

    @cached_property
    def _neighbours(self) -> dict[Shot, list[str]]:
        """Prompts of the batch that each shot is drawn in: the last bits of a picture depend on them."""
        return {shot: [each.request.prompt for each in group] for group in self.groups() for shot in group}


@cache
def identity(weights: Weights) -> str:
    """Hash the files that make up a model, and its strengths."""
    files = [(sha256_of(file), scale) for file, scale in weights.loras]
    whole = fingerprint(weights.denoiser) if weights.denoiser else ""
    trained = sha256_of(weights.trained) if weights.trained else ""
    embeddings = [[(sha256_of(file), token) for file, token in weights.embeddings]] if weights.embeddings else []
    parts = [files, whole, trained, weights.merged, *embeddings]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def evaluated_weights(run: Path, strengths: Sequence[float] | None) -> list[EvaluatedWeights]:
    """List the base, every kept checkpoint at every strength, and the result if it is none of these.

    Args:
        run: the run's folder.
        strengths: LoRA strengths; None: 1.

    Raises:
        UserError: the run has neither a checkpoint nor a result, or a full model is given strengths.
    """
    steps: list[int | None] = [step for step, _ in list_checkpoints(run)]
    summary = read_summary(run)
    if not is_unfinished(run) and summary is not None and summary["steps"] not in steps:
        steps.append(None)
    if not steps:
        raise UserError(f"{run} has no checkpoint and no result. Continue training it, or name another run")
    points = [EvaluatedWeights(None, None, BASE)]
    for step in steps:
        named = find_in_run(CheckpointRef(run, step))
        number = step if step is not None else (summary or {})["steps"]
        if named.lora is None and strengths and list(strengths) != [1.0]:
            raise UserError("--strengths: a full model has no strength. Leave them out")
        scales = [None] if named.lora is None else list(dict.fromkeys(strengths or [1.0]))
        points += [
            EvaluatedWeights(number, scale, find_weights(named, 1.0 if scale is None else scale)) for scale in scales
        ]
    return points


def shots_of(first: PictureRequest, prompts: Sequence[Prompt], seeds: int) -> list[Shot]:
    """List the shots: every prompt with its own seeds, then one picture of every class prompt.

    Args:
        first: request with the settings of all shots and the first seed.
        prompts: prompts to draw.
        seeds: number of pictures per prompt.
    """
    shots = [
        Shot(replace(first, prompt=prompt.text, seed=first.seed + number * seeds + which), number)
        for number, prompt in enumerate(prompts)
        for which in range(seeds)
    ]
    others = {prompt.scored: number for number, prompt in enumerate(prompts) if prompt.has_token and prompt.scored}
    shots += [
        Shot(replace(first, prompt=text, seed=first.seed + number * seeds), number, of_class=True)
        for text, number in others.items()
    ]
    return shots


def real_pictures(config: TrainConfig, run: Path) -> tuple[list[Picture], int]:
    """Return the pictures that a run trained on, evenly thinned to `REAL`, without those of regularization sources.

    Returns:
        The pictures, and how many there were.

    Raises:
        UserError: some are missing or have changed since.
    """
    members = config.data.members
    wanted = [each for each in scan_sources(config.data).pictures if not members[each.source].regularization]
    there = {(picture.source, picture.name): picture for picture in wanted}
    trained: Json = {} if config.data.streamed else read_json_or_none(run / DATA) or {}  # a stream lists no pictures
    rows = {(row.get("source", 0), row["file"]): row["sha256"] for row in trained.get("samples", [])}
    rows = {key: digest for key, digest in rows.items() if not members[key[0]].regularization}
    lacking = [key[1] for key, digest in rows.items() if key not in there or there[key].digest != digest]
    if lacking:
        raise UserError(
            f"{config.data.place}: {plural(len(lacking), 'training picture')} missing or changed since the run "
            f"({join_names(lacking, 4)}). Put them back; what is drawn already stays"
        )
    different = {there[key].digest: there[key] for key in sorted(rows or there)}  # a folder may be listed twice
    found = list(different.values())
    if not found:
        raise UserError(f"{config.data.place} has no usable picture to compare with. Put the run's pictures back")
    chosen = [found[number * len(found) // min(REAL, len(found))] for number in range(min(REAL, len(found)))]
    return chosen, len(found)


def open_picture(picture: Picture) -> Image.Image:
    """Read a training picture.

    Raises:
        UserError: it cannot be read, or has changed.
    """
    try:
        return decode(picture.read_same())
    except (UnusablePicture, OSError) as error:
        raise UserError(f"{picture.name} {error}. Put it back; what is drawn already stays") from None


def readable(file: Path) -> Image.Image | None:
    """Read a drawn picture; None if it is missing or damaged."""
    try:
        with Image.open(BytesIO(file.read_bytes())) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError):
        return None
