"""Plan what an evaluation generates and compares: points, requests, real pictures, and the key of every picture."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from simpletune.commands.evaluate.prompt_sets import Prompt, PromptSet
from simpletune.commands.generate.session import GenerationSession
from simpletune.config.schema import TrainConfig
from simpletune.data.sources.multi_source import scan_sources
from simpletune.data.sources.source import SourceImage
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.folder import DATA, read_json_or_none, read_summary
from simpletune.runs.weights import BASE, Weights, find_weights, precision_of
from simpletune.runs.weights_names import CheckpointRef, find_in_run, is_unfinished
from simpletune.stages.sample import ImageRequest
from simpletune.system.checksums import sha256_of
from simpletune.system.model_folder import fingerprint
from simpletune.system.options import Json, UserError, join_names, plural

REAL = 1000
"""Maximum number of training pictures to compare with, evenly chosen."""
FIRST_SEED = 10_000
"""Far from the seeds of validation pictures."""


@dataclass(frozen=True)
class EvaluatedWeights:
    """Weights to evaluate."""

    step: int | None  # step of the checkpoint; None for the base
    strength: float | None  # LoRA strength; None for the base and for full models
    weights: Weights  # weights to generate with

    @property
    def title(self) -> str:
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
    """One picture that every point generates."""

    request: ImageRequest  # what to generate
    prompt: int  # index of its prompt
    of_class: bool = False  # whether it shows another member of the class, for PRES


@dataclass(frozen=True)
class EvaluationPlan:
    """An evaluation."""

    session: GenerationSession  # configuration, device and speed
    points: tuple[EvaluatedWeights, ...]  # points to evaluate, the base first
    prompts: PromptSet  # prompts with the name of their slice
    shots: tuple[Shot, ...]  # pictures to generate, the same for every point
    real: tuple[SourceImage, ...]  # training pictures to compare with
    all_real: int  # total number of training pictures

    def groups(self) -> list[list[Shot]]:
        """Group the shots that are generated together; the same groups in every call, whatever is left to generate."""
        size = self.session.speed.batch_size
        return [list(self.shots[first : first + size]) for first in range(0, len(self.shots), size)]

    @cached_property
    def keys(self) -> dict[tuple[EvaluatedWeights, Shot], str]:
        """The name of every picture, a hash of everything that it depends on."""
        config = self.session.config
        model = config.model.model_dump(mode="json")
        objective = config.objective.model_dump(mode="json")
        later = ("inpainting", "vae_scale", "vae_shift", "vae_padding", "round_time")
        for section in (model, objective):  # keeps the names from before there was each of these fields
            for name in later:
                if not section.get(name):
                    section.pop(name, None)
        common = {
            "model": model,
            "objective": objective,
            "speed": asdict(self.session.speed),
            "device": self.session.device.type,
        }
        keys = {}
        for point in self.points:
            precision = precision_of(config, point.weights).model_dump(mode="json")
            own = {**common, "weights": identity(point.weights), "precision": precision}
            for group in self.groups():
                batch = [each.request.prompt for each in group]  # the last bits of a picture depend on its batch
                for shot in group:
                    values = asdict(shot.request).items()
                    new = ("mask", "paste", "negative_prompt")  # names from before there was each, or none, stay
                    request = {key: str(value) for key, value in values if value or value == "" or key not in new}
                    how = json.dumps({**own, "request": request, "batch": batch}, sort_keys=True)
                    keys[point, shot] = hashlib.sha256(how.encode()).hexdigest()[:24]
        return keys


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
    """List the base, every kept checkpoint at every strength, and the result if it is none of these."""
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


def shots_of(first: ImageRequest, prompts: Sequence[Prompt], seeds: int) -> list[Shot]:
    """List the shots: every prompt with its own seeds, then one picture of every class prompt."""
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


def real_images(config: TrainConfig, run: Path) -> tuple[list[SourceImage], int]:
    """Return the pictures that a run trained on, evenly thinned to `REAL`, without those of regularization sources."""
    members = config.sources
    wanted = [each for each in scan_sources(config.pictures).images if not members[each.source].regularization]
    there = {(image.source, image.name): image for image in wanted}
    trained: Json = (
        {} if config.pictures.streamed else read_json_or_none(run / DATA) or {}
    )  # a stream lists no pictures
    rows = {(row.get("source", 0), row["file"]): row["sha256"] for row in trained.get("samples", [])}
    rows = {key: digest for key, digest in rows.items() if not members[key[0]].regularization}
    lacking = [key[1] for key, digest in rows.items() if key not in there or there[key].digest != digest]
    if lacking:
        raise UserError(
            f"{config.pictures.place}: {plural(len(lacking), 'training picture')} missing or changed since the run "
            f"({join_names(lacking, 4)}). Put them back; what is drawn already stays"
        )
    different = {there[key].digest: there[key] for key in sorted(rows or there)}  # a folder may be listed twice
    found = list(different.values())
    if not found:
        raise UserError(f"{config.pictures.place} has no usable picture to compare with. Put the run's pictures back")
    count = min(REAL, len(found))
    return [found[number * len(found) // count] for number in range(count)], len(found)
