"""Fetch model parts from the hub: choose the files, check the disk, and locate them in the cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from simpletune.system.console import say
from simpletune.system.disk import DiskFull, free_disk_bytes
from simpletune.system.hub.download import fetch_file
from simpletune.system.hub.errors import Unreachable, explain_hub_errors
from simpletune.system.hub.repository import HubFile, Repository
from simpletune.system.model_folder import NAMES, weight_files
from simpletune.system.options import UserError, plural

HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+$")
DESCRIPTIONS = (".json", ".txt", ".model", ".jinja")
LAST = (
    "config.json",
    "tokenizer_config.json",
    "scheduler_config.json",
)  # fetched last, so a part that has it is complete
ALONE = ("transformer", "vae")  # parts that may have their own repository
GB = 10**9


@dataclass(frozen=True)
class HubPart:
    """A part of a pipeline on the hub.

    Args:
        repository: repository of the part.
        part: the sub-folder (``transformer``, ``tokenizer_2``, ...).
        weights: whether the weights are needed, or only the configuration.
    """

    repository: Repository
    part: str
    weights: bool


_FETCHED: dict[HubPart, Path] = {}


def is_hub_name(name: str) -> bool:
    """Whether a name is a hub repository (owner/name) rather than a folder or file."""
    return not Path(name).exists() and not name.endswith(".safetensors") and HUB_NAME.match(name) is not None


def part_folder(part: HubPart) -> Path:
    """Return the local folder of a part on the hub; fetch it if necessary.

    Raises:
        UserError: the repository has no such part, or cannot be reached.
    """
    if part not in _FETCHED:
        fetch([part])
    return _FETCHED[part]


def fetch(parts: Sequence[HubPart]) -> None:
    """Fetch parts that are not in the hub's cache; start only if all of them fit on the disk.

    Raises:
        UserError: a part does not exist, the disk is too small, or the hub is unreachable and the cache incomplete.
    """
    folders: dict[HubPart, Path] = {}
    wanted: list[HubFile] = []
    for part in dict.fromkeys(parts):
        try:
            files = needed(part, listing(part.repository))
        except Unreachable as reason:
            folders[part] = _part_in_cache(part, reason)
        else:
            folders[part] = files[0].place.parent
            wanted += files
    fetch_files(wanted)
    _FETCHED.update(folders)


def needed(part: HubPart, files: Sequence[HubFile]) -> list[HubFile]:
    """List the files of a part in fetching order, without other precisions and frameworks.

    Raises:
        UserError: the repository has no such part, or no weights for it.
    """
    name, prefix = part.repository.name, f"{part.part}/"
    if not any(file.path.startswith(prefix) for file in files):
        if part.part not in ALONE or not any(file.path == "config.json" for file in files):
            held = ", ".join(sorted({f.path.split("/")[0] for f in files if "/" in f.path})) or "no folders"
            raise UserError(f"{name} has no {prefix} folder (diffusers' layout), only {held}. Name an SD3 pipeline")
        prefix = ""
    inside = {file.path.removeprefix(prefix): file for file in files if file.path.startswith(prefix)}
    inside = {path: file for path, file in inside.items() if "/" not in path}
    chosen = [file for path, file in inside.items() if path.endswith(DESCRIPTIONS) and ".fp16." not in path]
    if part.weights:
        weights = chosen_weights(inside)
        if not weights:
            raise UserError(
                f"{name}: {prefix or 'the repository'} has no {NAMES[0]}.safetensors, only {', '.join(inside)}. "
                "Name a repository with safetensors weights"
            )
        chosen = weights + chosen
    return sorted(chosen, key=lambda file: (file.path.endswith(LAST), not file.path.endswith(".safetensors")))


def chosen_weights(inside: dict[str, HubFile]) -> list[HubFile]:
    """List the weight files that ``weight_files`` will read: the shards if there is an index, else the single file."""
    for name in NAMES:
        shards = [file for path, file in inside.items() if re.fullmatch(rf"{name}-\d+-of-\d+\.safetensors", path)]
        if f"{name}.safetensors.index.json" in inside and shards:
            return shards
        if f"{name}.safetensors" in inside:
            return [inside[f"{name}.safetensors"]]
    return []


def fetch_files(files: Sequence[HubFile]) -> None:
    """Fetch missing files if they fit on the disk; record the commit for later use without a network.

    Raises:
        DiskFull: the disk is too small.
        UserError: a file cannot be fetched.
    """
    from huggingface_hub import constants

    missing = [file for file in files if not file.place.exists()]
    require_space(missing)
    for file in missing:
        fetch_file(file)
    for repository, commit in dict.fromkeys((file.repository, file.commit) for file in files):
        note = repository.cache / "refs" / (repository.revision or constants.DEFAULT_REVISION)
        if note.name != commit and (not note.exists() or note.read_text() != commit):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(commit)


def require_space(files: Sequence[HubFile]) -> None:
    """Refuse a download that does not fit on the disk.

    Args:
        files: files still to fetch.

    Raises:
        DiskFull: states the bytes needed and free.
    """
    if not files:
        return
    size, cache = sum(file.bytes_to_fetch for file in files), files[0].repository.cache.parent
    free = free_disk_bytes(cache)
    names = ", ".join(dict.fromkeys(file.repository.name for file in files))
    if size > free:
        t5 = sum(file.size for file in files if file.path.startswith("text_encoder_3/"))
        remedy = f", or set model.t5=false (saves {t5 / GB:.1f} GB)" if t5 else ""
        raise DiskFull(
            f"{names}: the download needs {size / GB:.2f} GB, and {free / GB:.2f} GB are free at {cache}. "
            f"Free {(size - free) / GB:.2f} GB, set HF_HOME to a larger disk{remedy}"
        )
    say(
        f"fetching {size / GB:.2f} GB in {plural(len(files), 'file')} from {names} to {cache} ({free / GB:.0f} GB free)"
    )


@lru_cache(maxsize=16)
def listing(repository: Repository) -> tuple[HubFile, ...]:
    """List a repository's files.

    Raises:
        UserError: the hub does not respond, or not with a listing.
    """
    from huggingface_hub import HfApi, constants

    with explain_hub_errors(repository):
        info = HfApi().repo_info(
            repository.name,
            repo_type=repository.kind,
            revision=repository.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    return tuple(
        HubFile(repository, info.sha or "", each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else None)
        for each in getattr(info, "siblings", None) or ()
    )


def snapshot(repository: Repository) -> Path:
    """Return the cache folder of the last commit that was fetched completely."""
    from huggingface_hub import constants

    revision = repository.revision or constants.DEFAULT_REVISION
    note = repository.cache / "refs" / revision
    return repository.cache / "snapshots" / (note.read_text().strip() if note.is_file() else revision)


def _part_in_cache(part: HubPart, reason: UserError) -> Path:
    """Return the part's folder in the cache if it is complete; otherwise raise ``reason``."""
    folder = in_cache(part)
    if folder is None:
        raise reason
    say(f"{part.repository.name}: the hub is offline or unreachable; {part.part} comes from the cache")
    return folder


def in_cache(part: HubPart) -> Path | None:
    """Return the part's folder in the hub's cache if it is complete, without contacting the hub."""
    here = snapshot(part.repository)
    for folder in (here / part.part, *([here] if part.part in ALONE else [])):
        if any((folder / name).exists() for name in LAST):
            try:
                if part.weights:
                    weight_files(folder)
            except UserError:
                return None
            return folder
    return None
