"""``simpletune push``: a run's result, its card, its configuration and its pictures to the hub, in one commit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.config.schema import TrainConfig
from simpletune.hub.fetch import HUB_NAME
from simpletune.options import UserError
from simpletune.runs.folder import CONFIG
from simpletune.runs.model_card import CARD, GRID, card_of, for_repository, shareable
from simpletune.runs.names import Named, RunName, find_in_run, find_run, run_config
from simpletune.system.console import say

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

Upload = dict[str, Path | bytes]
"""By path in the repository, a file or its content."""
ENDINGS = (".json", ".safetensors")


def push(name: str, repository: str, private: bool, yes: bool) -> str:
    """Upload a run's result. Says first what, and asks.

    Args:
        name: the run's folder, or a checkpoint of it (``RUN@STEP``).
        repository: owner/name on the hub; made if there is none.
        private: whether it may only be seen by its owner.
        yes: do not ask.

    Returns:
        The repository's page.

    Raises:
        UserError: there is no result, no token, no consent, or the hub refuses.
    """
    from huggingface_hub import get_token

    if not HUB_NAME.match(repository):
        raise UserError(f"push: {repository!r} is not the name of a repository. Give owner/name, such as me/my-lora")
    files = files_of(find_run(name), repository)
    say(f"push    {name} to {repository} ({'private' if private else 'public, if it is new'})")
    for name, content in files.items():
        say(f"  {size_of(content):>12,} bytes  {name}")
    say(f"  {sum(size_of(content) for content in files.values()):>12,} bytes in all")
    token = get_token()
    if not token:
        raise UserError(
            "push: there is no token for the hub. Log in with `hf auth login`, or set HF_TOKEN (with write access)"
        )
    if not yes:
        confirm()
    with clear_errors(repository):
        page = upload(files, repository, private, token)
    say(f"  uploaded: {page}")
    return page


def files_of(named: RunName, repository: str) -> Upload:
    """What is uploaded: nothing but the card, the result, the configuration without local paths, and the grid.

    Raises:
        UserError: it is no run's folder, or the run left no result or no card.
    """
    run = named.folder
    config, result = run_config(run, "push: "), find_in_run(named)
    card, own = checkpoint_of(result, config) if result.step is not None else (None, Upload())
    if card is None and not (run / CARD).exists():
        raise UserError(f"push: {run} has no {CARD}, so nobody would know what it is. Finish the run, or write one")
    card = card or (run / CARD).read_text(encoding="utf-8")
    files: Upload = {CARD: for_repository(card, repository).encode(), **own}
    if result.lora is not None and not own:
        files[result.lora.name] = result.lora
    if result.transformer is not None:
        parts = sorted(file for file in result.transformer.iterdir() if file.suffix in ENDINGS and file.is_file())
        files |= {f"{result.transformer.name}/{file.name}": file for file in parts}
    text = shareable(config).model_dump_json(by_alias=True, indent=2)
    files[CONFIG] = f"{text}\n".encode()
    if (run / GRID).exists():
        files[GRID] = run / GRID
    return files


def checkpoint_of(named: Named, config: TrainConfig) -> tuple[str, Upload]:
    """The card of a checkpoint, and its LoRA with the header of a result, which names no local folders.

    Raises:
        UserError: it is not a LoRA's, or damaged.
    """
    from safetensors.torch import save

    from simpletune.config.resolve import resolve_model_folder
    from simpletune.runs import checkpoint
    from simpletune.runs.summary import summary_at
    from simpletune.system.safetensors_file import WeightReader

    if named.lora is None or named.run is None:
        raise UserError(
            f"push: {named.name} is a checkpoint of a {config.adapter.method} run: trained weights without the model "
            f"around them, which no other tool loads. Only a finished one can be pushed"
        )
    saved = checkpoint.read(named.lora.parent)
    summary = summary_at(named.run, resolve_model_folder(config), saved)
    metadata = checkpoint.metadata_of(shareable(config), saved.step)
    content = save(WeightReader([named.lora]).get_all(), {"format": "pt", **metadata})
    return card_of(named.run, config, summary, saved.manifest), {named.lora.name: content}


def size_of(content: Path | bytes) -> int:
    """Bytes of a file or of content."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def confirm() -> None:
    """Ask at the terminal.

    Raises:
        UserError: there is no terminal, or the answer is no.
    """
    if not sys.stdin.isatty():
        raise UserError("push: nothing was uploaded: there is no terminal to ask at. If you want this, add --yes")
    try:
        answer = input("Upload this? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("push: nothing was uploaded")


def upload(files: Upload, repository: str, private: bool, token: str) -> str:
    """Make the repository if there is none, and commit the files.

    Returns:
        The repository's page.

    Raises:
        UserError: it was to be private, and there is a public one.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=token, library_name="simpletune")
    page = api.create_repo(repository, private=private or None, exist_ok=True)
    if private and not api.model_info(repository).private:  # one that exists stays as visible as it is
        raise UserError(f"push: {repository} exists and is public: nothing was uploaded. Use another name")
    additions = [
        CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
        for name, content in files.items()
    ]
    api.create_commit(repository, additions, commit_message="Upload by simpletune push")
    return str(page)


@contextmanager
def clear_errors(repository: str) -> Iterator[None]:
    """The hub's refusals as messages.

    Raises:
        UserError: for each of them.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except HFValidationError as error:
        raise UserError(f"push: {repository} is no name for a repository ({error})") from None
    except HfHubHTTPError as error:
        raise UserError(f"push: {_refusal(repository, error)}") from None
    except OfflineModeIsEnabled:
        raise UserError("push: HF_HUB_OFFLINE is set, so nothing is uploaded. Unset it and try again") from None
    except (HTTPError, ConnectionError, TimeoutError) as error:
        reason = type(error).__name__  # its text may hold a signed address
        raise UserError(f"push: the hub cannot be reached ({reason}). Check the network and try again") from None
    except RuntimeError as error:  # hf_xet's, of large files
        raise UserError(f"push: the upload failed ({type(error).__name__}). Try again: no commit was made") from None


def _refusal(repository: str, error: HfHubHTTPError) -> str:
    """What an HTTP status means here, and what to do."""
    owner, status = repository.partition("/")[0], error.response.status_code
    known = {
        401: "the hub does not know the token (401). Log in again with `hf auth login`, or mend HF_TOKEN",
        403: f"the token may not write to {repository} (403). Use one with write access that belongs to {owner}",
        404: f"{repository} was not found (404). Check the owner's name, and that the token may see it",
    }
    said = f": {' '.join(error.server_message.split())[:300]}" if error.server_message else ""
    return known.get(status, f"the hub answered {status}{said}. No commit was made: try again later")
