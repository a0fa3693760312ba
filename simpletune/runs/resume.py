"""Decide whether a run may continue from a checkpoint, and list what has changed since."""

from __future__ import annotations

import json
from contextlib import suppress

from pydantic import ValidationError

from simpletune.config.load import read_saved
from simpletune.config.schema import TrainConfig
from simpletune.runs.checkpoint import SavedState
from simpletune.system.options import Json, UserError

# Settings that may not change on resume: they determine the weights, or which samples each step sees.
PINNED = (
    "model", "adapter", "precision", "objective", "ema", "prior.method", "prior.prompt", "optimizer.name", "train.seed",
    "text", "train.batch_size", "train.gradient_accumulation", "train.global_batch",
)  # fmt: skip

UNSAID = ("about:", "$schema:")  # texts for readers, which overrides drop


def check_resumable(
    saved: SavedState, config: TrainConfig, manifest: list[Json], processes: int | None = None
) -> list[str]:
    """Compare a configuration, as the user gave it, and the data's manifest with those of a checkpoint; list the
    allowed changes, as ``path: old -> new``. A UserError lists those that affect the meaning of the weights or the
    order of samples. ``processes``: the current number; None skips this comparison."""
    before = saved.config
    with suppress(ValidationError):  # a field was removed since; the differences name it
        # Defaults of newer fields do not change the run.
        before = read_saved(json.dumps(before)).model_dump(mode="json", by_alias=True)
    changes = _differences(before, config.model_dump(mode="json", by_alias=True))
    changes = [each for each in changes if not each.startswith(UNSAID)]
    pinned = [c for c in changes if any(c.startswith((f"{p}:", f"{p}.")) for p in PINNED)]
    if pinned:
        remedy = "Use the same values, or start a new run under another name"
        listed = "\n  ".join([f"--resume: {saved.folder} was made with other settings:", *pinned])
        raise UserError(f"{listed}\n{remedy}")
    if saved.micro_batches is None and saved.processes > 1:
        raise UserError(
            f"--resume: {saved.folder} was made by {saved.processes} processes with an earlier version, in which the "
            "samples of a step depended on their number. Finish it with that version, or start a new run under another "
            "name"
        )
    if processes is not None and processes != saved.processes:
        exact = config.train.reduce == "exact"
        bits = "the same bits" if exact else "the same samples and noise; sums differ in the last bits"
        changes.append(f"processes: {saved.processes} -> {processes} (train.reduce {config.train.reduce}: {bits})")
    if manifest != saved.manifest:
        data = _manifest_changes(saved.manifest, manifest)
        listed = "\n  ".join(["--resume: the data has changed since the checkpoint:", *data])
        raise UserError(f"{listed}\nRestore the data, or start a new run")
    return changes


def _differences(old: object, new: object, path: str = "") -> list[str]:
    """List the leaves that differ between two JSON values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [d for key in keys for d in _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)]
    if (
        isinstance(old, list)
        and isinstance(new, list)
        and len(old) == len(new)
        and any(old)
        and isinstance(old[0], dict)
    ):
        pairs = enumerate(zip(old, new, strict=True))
        return [d for index, (a, b) in pairs for d in _differences(a, b, f"{path}.{index}")]
    return [] if old == new else [f"{path}: {json.dumps(old)} -> {json.dumps(new)}"]


def _manifest_changes(old: list[Json], new: list[Json]) -> list[str]:
    before, after = ({(row["file"], row["repeat"], row.get("source", 0)): row for row in rows} for rows in (old, new))
    changes = [f"{key[0]}: removed" for key in before if key not in after and not key[1]]
    changes += [f"{key[0]}: added" for key in after if key not in before and not key[1]]
    for key in [key for key in before if key in after and before[key] != after[key] and not key[1]]:
        was, now = before[key], after[key]
        parts = [name for name in {**was, **now} if name != "held_out" and was.get(name) != now.get(name)]
        changes += [f"{key[0]}: changed {', '.join(parts)}"] if parts else []
        if was.get("held_out") != now.get("held_out"):
            changes.append(f"{key[0]}: now {'held out' if now.get('held_out') else 'trained on'} (validation.split)")
    return changes[:12] or ["the order or the number of repetitions"]
