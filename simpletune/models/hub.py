"""Where model parts come from: a local diffusers folder, or only the needed files of a hub repository."""

from __future__ import annotations

import re
from pathlib import Path

from simpletune.options import UserError

HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+$")
PATTERNS = ("*.json", "*.txt", "*.model", "*.safetensors")


def is_hub_name(name: str) -> bool:
    """Whether a name is a hub repository (owner/name) rather than a folder."""
    return not Path(name).exists() and HUB_NAME.match(name) is not None


def part_folder(name: str, part: str, revision: str | None = None) -> Path:
    """The local folder of one part of a pipeline (``transformer``, ``vae``, ``tokenizer_2``, ...).

    Args:
        name: a local diffusers folder, or a hub repository of which only this part is fetched.
        part: the part's sub-folder.
        revision: branch, tag or commit on the hub.

    Raises:
        UserError: the folder or the repository has no such part, or cannot be reached.
    """
    if is_hub_name(name):
        return _fetch(name, [f"{part}/{pattern}" for pattern in PATTERNS], revision) / part
    folder = Path(name) / part
    if not folder.is_dir():
        raise UserError(f"{name} has no {part}/ folder. Give a folder in diffusers' layout, or a hub name (owner/name)")
    return folder


def part_file(name: str, file: str, revision: str | None = None) -> Path:
    """One file of a hub repository, fetched if need be.

    Raises:
        UserError: the repository has no such file, or cannot be reached.
    """
    path = _fetch(name, [file], revision) / file
    if not path.exists():
        raise UserError(f"{name} has no {file}")
    return path


def data_set_folder(name: str, patterns: list[str]) -> Path:
    """The local folder of a data set's files that fit the patterns, fetched from the hub if need be.

    Raises:
        UserError: there is no such data set, or it cannot be reached.
    """
    return _fetch(name, patterns, None, kind="dataset")


def _fetch(name: str, patterns: list[str], revision: str | None, kind: str = "model") -> Path:
    """Fetch files of a repository into the hub's cache; those in other precisions (``.fp16.``) are left out."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        folder = snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=patterns, ignore_patterns=["*.fp16*"]
        )
    except GatedRepoError:
        raise UserError(
            f"{name} is gated. Accept its licence on its page, then log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{name} was not found on the hub (or it is private). Check the name, or log in with `hf auth login`"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError) as error:
        raise UserError(
            f"{name} is not in the local cache and the hub cannot be reached ({type(error).__name__}). "
            "Check the network, or give a local folder as model.pretrained"
        ) from None
    except HfHubHTTPError as error:
        raise UserError(f"{name}: the hub answered {error}. Try again later, or give a local folder") from None
    return Path(folder)
