"""Fetch single files and data sets from the hub, in the same way as model parts."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from simpletune.system.hub.errors import Unreachable
from simpletune.system.hub.fetch import DESCRIPTIONS, chosen_weights, fetch_files, listing, snapshot
from simpletune.system.hub.repository import Repository
from simpletune.system.options import UserError


def repository_file(name: str, file: str, revision: str | None = None) -> Path:
    """Return the local path of a file on the hub; fetch it if necessary.

    Raises:
        UserError: the repository has no such file, or cannot be reached.
    """
    repository = Repository(name, revision)
    try:
        found = [each for each in listing(repository) if each.path == file]
    except Unreachable as reason:
        if not (place := snapshot(repository) / file).exists():
            raise reason from None
        return place
    if not found:
        raise UserError(f"{name} has no {file}. Check the name")
    fetch_files(found)
    return found[0].place


def data_set_folder(name: str, patterns: list[str]) -> Path:
    """Return the local folder of a data set's files that match the patterns; fetch them if necessary.

    Raises:
        UserError: the data set does not exist or cannot be reached.
    """
    repository = Repository(name, kind="dataset")
    try:
        held = listing(repository)
    except Unreachable as reason:
        if not snapshot(repository).is_dir():
            raise reason from None
        return snapshot(repository)
    found = [file for file in held if any(fnmatch(file.path, pattern) for pattern in patterns)]
    if not found:
        first = ", ".join(file.path for file in held[:8]) or "nothing"
        raise UserError(f"{name} has no file that matches {' or '.join(patterns)}, only {first}. Check the name")
    fetch_files(found)
    return repository.cache / "snapshots" / found[0].commit


def model_folder(name: str, revision: str | None = None) -> Path:
    """Return the local folder of a whole model in transformers' layout; fetch it if necessary, safetensors only.

    Raises:
        UserError: the repository has no such model, or cannot be reached.
    """
    repository = Repository(name, revision)
    try:
        files = [file for file in listing(repository) if "/" not in file.path]
    except Unreachable as reason:
        if not (folder := snapshot(repository) / "config.json").exists():
            raise reason from None
        return folder.parent
    weights = chosen_weights({file.path: file for file in files})
    described = [file for file in files if file.path.endswith(DESCRIPTIONS)]
    if not weights or not any(file.path == "config.json" for file in described):
        held = ", ".join(file.path for file in files[:8]) or "no files"
        raise UserError(
            f"{name} has no model.safetensors with a config.json, only {held}. Name a repository that has them"
        )
    fetch_files([*weights, *sorted(described, key=lambda file: file.path == "config.json")])
    return weights[0].place.parent
