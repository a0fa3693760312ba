"""``simpletune push``: upload a run's result, card, configuration and pictures to the hub in one commit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simpletune.config.schema import TrainConfig
from simpletune.runs.folder import CONFIG
from simpletune.runs.model_card import CARD, GRID, for_repository, model_card_text, shareable
from simpletune.runs.weights_names import CheckpointRef, WeightsRef, find_in_run, find_run, run_config
from simpletune.system.console import say
from simpletune.system.hub import HUB_NAME
from simpletune.system.options import UserError
from simpletune.system.shell import login_command

Upload = dict[str, Path | bytes]
"""A file or its content, by path in the repository."""
ENDINGS = (".json", ".safetensors")


def push(name: str, repository: str, private: bool, yes: bool) -> str:
    """List the files of a run's result or checkpoint (``RUN@STEP``), ask for confirmation, and upload them to
    owner/name on the hub, which is created if missing; returns its URL."""
    from huggingface_hub import get_token

    if not HUB_NAME.match(repository):
        raise UserError(f"push: {repository!r} is not a repository name. Give owner/name, such as me/my-lora")
    files = files_of(find_run(name), repository)
    say(f"push    {name} to {repository} ({'private' if private else 'public if new'})")
    sizes = {file: len(each) if isinstance(each, bytes) else each.stat().st_size for file, each in files.items()}
    for file, size in sizes.items():
        say(f"  {size:>12,} bytes  {file}")
    say(f"  {sum(sizes.values()):>12,} bytes in total")
    token = get_token()
    if not token:
        raise UserError(
            f"push: no token for the hub was found. Log in with `{login_command()}`, or set HF_TOKEN (with write "
            "access)"
        )
    if not yes:
        confirm()
    with explain_push_errors(repository):
        page = upload(files, repository, private, token)
    say(f"  uploaded: {page}")
    return page


def files_of(named: CheckpointRef, repository: str) -> Upload:
    """Collect the files to upload: only the card, the result, the configuration without local paths, and the grid."""
    run = named.folder
    config, result = run_config(run, "push: "), find_in_run(named)
    card, own = checkpoint_of(result, config) if result.step is not None else (None, Upload())
    if card is None and not (run / CARD).exists():
        raise UserError(f"push: {run} has no {CARD}, which describes the result. Finish the run, or write one")
    card = card or (run / CARD).read_text(encoding="utf-8")
    files: Upload = {CARD: for_repository(card, repository).encode(), **own}
    if result.lora is not None and not own:
        files[result.lora.name] = result.lora
    files |= {file.name: file for file in (result.embeddings if not own else ())}
    if result.denoiser is not None:
        parts = sorted(file for file in result.denoiser.iterdir() if file.suffix in ENDINGS and file.is_file())
        files |= {f"{result.denoiser.name}/{file.name}": file for file in parts}
    text = shareable(config).model_dump_json(by_alias=True, indent=2)
    files[CONFIG] = f"{text}\n".encode()
    if (run / GRID).exists():
        files[GRID] = run / GRID
        if (run / "samples" / "input").is_dir():
            say(f"push    {GRID} shows the pictures that validation painted into: your own, unless you named others")
    return files


def checkpoint_of(named: WeightsRef, config: TrainConfig) -> tuple[str, Upload]:
    """Build the card of a checkpoint and its LoRA file, with a header that names no local folders."""
    from safetensors.torch import save

    from simpletune.config.resolve import resolve_model_folder
    from simpletune.runs import checkpoint
    from simpletune.runs.summary import summary_at
    from simpletune.system.safetensors_file import WeightReader, read_header

    if named.trained is not None or named.run is None:
        raise UserError(
            f"push: {named.name} is a checkpoint of a {config.adapter.method} run: it holds only the trained weights, "
            "which no other tool loads. Finish the run and push its result"
        )
    held = [*([named.lora] if named.lora else []), *named.embeddings]
    saved = checkpoint.read_checkpoint(held[0].parent)
    summary = summary_at(named.run, resolve_model_folder(config), saved)
    metadata = checkpoint.metadata_of(named.run, config, saved.step)
    content: Upload = {}
    for file in held:
        header = {**(read_header(file).get("__metadata__") or {}), **metadata} if file != named.lora else metadata
        content[file.name] = save(WeightReader([file]).get_all(), {"format": "pt", **header})
    return model_card_text(named.run, config, summary, saved.manifest), content


def confirm() -> None:
    """Ask for confirmation at the terminal. Raises UserError if there is none, or the answer is no."""
    if not sys.stdin.isatty():
        raise UserError(
            "push: nothing was uploaded, because no terminal can ask for confirmation. Add --yes to confirm"
        )
    try:
        answer = input("Upload this? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("push: nothing was uploaded")


def upload(files: Upload, repository: str, private: bool, token: str) -> str:
    """Create the repository if missing, and commit the files; returns the repository's URL."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=token, library_name="simpletune")
    page = api.create_repo(repository, private=private or None, exist_ok=True)
    if private and not api.model_info(repository).private:  # create_repo does not change an existing one
        raise UserError(f"push: nothing was uploaded, because {repository} exists and is public. Use another name")
    additions = [
        CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
        for name, content in files.items()
    ]
    api.create_commit(repository, additions, commit_message="Upload by simpletune push")
    return str(page)


@contextmanager
def explain_push_errors(repository: str) -> Iterator[None]:
    """Turn the hub's errors into messages within this context."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except HFValidationError as error:
        raise UserError(f"push: {repository} is not a valid repository name ({error})") from None
    except HfHubHTTPError as error:
        owner, status = repository.partition("/")[0], error.response.status_code
        known = {
            401: f"the hub rejects the token (401). Log in again with `{login_command()}`, or correct HF_TOKEN",
            403: f"the token may not write to {repository} (403). Use one with write access that belongs to {owner}",
            404: f"{repository} was not found (404). Check the owner's name and the token's access",
        }
        detail = f": {' '.join(error.server_message.split())[:300]}" if error.server_message else ""
        other = f"the hub answered {status}{detail}. No commit was made; try again later"
        raise UserError(f"push: {known.get(status, other)}") from None
    except OfflineModeIsEnabled:
        raise UserError("push: nothing was uploaded, because HF_HUB_OFFLINE is set. Unset it and try again") from None
    except (HTTPError, ConnectionError, TimeoutError) as error:
        reason = type(error).__name__  # its text may contain a signed URL
        raise UserError(f"push: cannot reach the hub ({reason}). Check the network and try again") from None
    except RuntimeError as error:  # raised by hf_xet for large files
        raise UserError(f"push: the upload failed ({type(error).__name__}) before the commit. Try again") from None
