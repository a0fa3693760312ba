"""Decide whether a run may continue from a checkpoint, and list what has changed since."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

from pydantic import ValidationError

from simpletune.config.load import read_saved
from simpletune.config.schema import ResolvedConfig, TrainConfig
from simpletune.runs.checkpoint import SavedState
from simpletune.system.environment import NUMERIC, numeric_versions
from simpletune.system.hub import commit_of
from simpletune.system.options import Json, UserError

# Where the parts of the base lie. They may move, but not change.
PLACES = tuple(
    f"model.{place}" for place in ("pretrained", "revision", "transformer", "unet", "vae", "text_encoders", "loras")
)
# Settings that may not change on resume: they determine the weights, or which samples each step sees.
PINNED = (
    "model", "adapter", "precision", "objective", "concept", "ema", "prior.method", "prior.prompt", "optimizer.name",
    "train.seed", "text", "train.batch_size", "train.gradient_accumulation", "train.global_batch",
)  # fmt: skip

UNSAID = ("about:", "$schema:")  # texts for readers, which overrides drop


def base_of(config: ResolvedConfig, loras: list[Json]) -> Json:
    """Identify what a run trains on: the parts' fingerprints and, from the hub, commits; and the LoRAs under it.

    Args:
        config: with folders resolved.
        loras: the run's record of ``model.loras``.
    """
    model = config.model
    found: Json = {
        name: {"fingerprint": fingerprint, "commit": commit_of(model.files.part(name).folder)}
        for name, fingerprint in model.files.fingerprints(config.output.cache_folder).items()
    }
    return {"parts": found, "loras": [_about(each) for each in loras]}


def _about(lora: Json) -> list[object]:
    return [lora["sha256"], lora["scale"], *(["only while training"] if lora.get("only_training") else [])]


def changed_places(saved: SavedState, config: TrainConfig) -> list[str]:
    """List the changed places of the base, as ``path: old -> new``, of a checkpoint that knows the base's contents."""
    return _keep_places(saved, _changes(saved, config)) if saved.base else []


def _keep_places(saved: SavedState, changes: Sequence[str]) -> list[str]:
    places = tuple(f"{place}:" for place in PLACES)
    return [change for change in changes if saved.base and change.startswith(places)]


def require_same_base(saved: SavedState, config: ResolvedConfig, base: Json) -> None:
    """Compare what a run trains on (``base_of``) with a checkpoint's record, if it has one.

    Args:
        saved: the checkpoint.
        config: with folders resolved.
        base: of this configuration.

    Raises:
        UserError: the contents differ, wherever they lie.
    """
    if not saved.base:
        return
    then, now, commit = saved.base["parts"], base["parts"], None
    listed = [f"{name}: no longer a part of the model" for name in then if name not in now]
    for name, known in now.items():
        before = then.get(name)
        if before is not None and before["fingerprint"] == known["fingerprint"]:
            continue
        commit = commit or (before or {}).get("commit")
        others = f" (fingerprint {before['fingerprint']} -> {known['fingerprint']})" if before else " (new)"
        part = config.model.files.part(name)
        place = part.place if part.folder or part.file else config.model.files.weights_from  # of a file's marks
        listed.append(f"{name}: {place} has other contents{others}")
    if saved.base["loras"] != base["loras"]:
        listed.append("model.loras: other files, strengths or marks")
    if listed:
        hub = f", with model.revision={commit} if they came from there" if commit is not None else ""
        listed.insert(0, f"--resume: the base has changed since {saved.folder}:")
        raise UserError(
            "\n  ".join(listed) + f"\nPut the earlier files back{hub}, or start a new run under another name"
        )


def check_resumable(
    saved: SavedState, config: TrainConfig, manifest: list[Json], processes: int | None = None
) -> list[str]:
    """Compare a configuration, as the user gave it, and the data's manifest with those of a checkpoint; list the
    allowed changes, as ``path: old -> new``. ``processes``: the current number; None skips this comparison. A base's
    ``changed_places`` are compared elsewhere (``require_same_base``). Raises UserError, which lists the changes, if
    some affect the meaning of the weights or the order of samples."""
    changes = _changes(saved, config)
    places = _keep_places(saved, changes)
    pinned = [c for c in changes if c not in places and any(c.startswith((f"{p}:", f"{p}.")) for p in PINNED)]
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
    return [f"{change} (the same contents)" if change in places else change for change in changes]


def kept_settings(config: TrainConfig, samples: int | None, chosen: Json, threads: int) -> dict[str, str]:
    """Return the settings whose new value a resumed run does not follow, because it keeps what it began with: what
    stays, and why, by path.

    Args:
        config: the new one, as the user gave it, with its batch size settled.
        samples: of the run's evaluations so far; None: it has made none.
        chosen: what the run chose for ``auto`` (``read_chosen``), or was given.
        threads: that this process uses.
    """
    found, option, memory = dict[str, str](), config.validation.loss_samples, config.memory
    if samples is not None and option not in (0, samples):
        found["validation.loss_samples"] = f"{samples}, because evaluations are compared sample by sample"
    if config.speed.threads == "auto" and threads == chosen.get("threads"):
        found["speed.threads"] = f"{threads}, because another number changes rounding"
    if memory.modulation == "auto" and chosen.get("modulation") in ("plan", "resident"):
        found["memory.modulation"] = f"{chosen['modulation']}, as before"
    if memory.checkpointing != "auto":
        found["memory.budget_gib"] = "without effect: the run keeps its train.batch_size"
    found["output.prices"] = "without effect on this run: its predicted price is that of the first start"
    return found


def _changes(saved: SavedState, config: TrainConfig) -> list[str]:
    """List the settings that differ from a checkpoint's, as ``path: old -> new``."""
    before = saved.config
    with suppress(ValidationError):  # a field was removed since; the differences name it
        # Defaults of newer fields do not change the run.
        before = read_saved(json.dumps(before)).model_dump(mode="json", by_alias=True)
    changes = _differences(before, config.model_dump(mode="json", by_alias=True))
    return [each for each in changes if not each.startswith(UNSAID)]


def changed_versions(saved: SavedState) -> str | None:
    """Describe the libraries that compute and have changed since the checkpoint; None if none has."""
    pairs = [
        (NUMERIC[name], now, saved.versions[name]) for name, now in numeric_versions().items() if name in saved.versions
    ]
    changed = [f"{name} {now or 'none'} (the checkpoint: {then or 'none'})" for name, now, then in pairs if now != then]
    return ", ".join(changed) or None


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
        named = {"decoding": "decoding (its colour profile or transparency, as this version reads it)"}
        parts = [named.get(n, n) for n in {**was, **now} if n != "held_out" and was.get(n) != now.get(n)]
        changes += [f"{key[0]}: changed {', '.join(parts)}"] if parts else []
        if was.get("held_out") != now.get("held_out"):
            changes.append(f"{key[0]}: now {'held out' if now.get('held_out') else 'trained on'} (validation.split)")
    return changes[:12] or ["the order or the number of repetitions"]
