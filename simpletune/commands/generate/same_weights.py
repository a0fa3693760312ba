"""Merge models with identical weights, such as a run's result and its last checkpoint, into one column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from simpletune.runs.weights import Weights
from simpletune.system.console import say
from simpletune.system.safetensors_file import WeightReader


def without_twins(models: Sequence[Weights]) -> list[Weights]:
    """Drop duplicates. Of two models with equal weights, keep the one with the later position and name, because
    checkpoints are ordered by step; for full models keep the result, which has the base's precision."""
    kept: list[Weights] = []
    for weights in dict.fromkeys(models):
        twin = next((each for each in kept if _are_same(each, weights)), None)
        if twin is not None:
            say(f"{twin.title} and {weights.title} have the same weights: one column, {weights.title}")
            kept.remove(twin)
            weights = replace(twin, short=weights.title) if weights.trained else weights
        kept.append(weights)
    return kept


def _are_same(a: Weights, b: Weights) -> bool:
    if a.merged != b.merged or [token for _, token in a.embeddings] != [token for _, token in b.embeddings]:
        return False
    if not _equal_files(a.embeddings, b.embeddings):
        return False
    if a.embeddings and not (a.lora or b.lora or a.trained or b.trained or a.denoiser or b.denoiser):
        return True
    if a.loras and [scale for _, scale in a.loras] == [scale for _, scale in b.loras]:
        return _equal_files(a.loras, b.loras)
    trained, whole = (a.trained, b.denoiser) if a.trained else (b.trained, a.denoiser)
    if trained is None or whole is None:
        return False
    if trained.resolve().parents[2] != whole.resolve().parent:  # RUN/checkpoints/step-N/FILE and RUN/transformer
        return False  # of different runs: they need not be read
    return _holds_all_of(sorted(whole.glob("*.safetensors")), trained)


def _equal_files(a: Sequence[tuple[Path, object]], b: Sequence[tuple[Path, object]]) -> bool:
    """Whether the files of two lists hold the same tensors, pair by pair."""
    pairs = [(one, other) for (one, _), (other, _) in zip(a, b, strict=True)]
    return all(one == other or _holds_all_of([one], other, both=True) for one, other in pairs)


def _holds_all_of(files: list[Path], part: Path, both: bool = False) -> bool:
    """Whether ``files`` contain every tensor of ``part`` with equal values, compared in the type of ``files``; both:
    and no others."""
    whole, some = WeightReader(files), WeightReader([part])
    if not (some.names == whole.names if both else some.names <= whole.names):
        return False
    for name in sorted(some.names):
        one, other = whole.get(name), some.get(name)
        if one.shape != other.shape or not bool((one == other.to(one.dtype)).all()):
            return False
    return True
