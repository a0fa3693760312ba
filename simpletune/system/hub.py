"""Files of the Hugging Face hub: choose those of a model, check the disk, download, and explain every failure.

Every failure is a ``UserError`` with value, rule and remedy. No message repeats text from the hub or its library: it
could contain a token or a signed URL.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.system.checksums import sha256_of
from simpletune.system.console import progress, say
from simpletune.system.disk import DiskFull, describe_full_disk, free_disk_bytes
from simpletune.system.model_folder import HALF, NAMES, weight_files
from simpletune.system.options import UserError, plural
from simpletune.system.shell import login_command

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm

WEIGHT_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+$")
HUB_FILE = re.compile(r"^([\w.-]+/[\w.-]+)/([\w./-]+\.safetensors)$")
DESCRIPTIONS = (".json", ".txt", ".model", ".jinja")
LAST = (
    "config.json",
    "tokenizer_config.json",
    "scheduler_config.json",
)  # fetched last, and with its weights the part is complete
ALONE = ("transformer", "vae")  # parts that may have their own repository
TRIES = 3  # attempts per file, for failures that huggingface_hub does not retry
PAUSE = 2.0  # seconds before the second attempt; twice that before the third
STALLED = 60.0  # seconds without a byte, after which a download with hf_xet is given up
LOOK = 1.0  # seconds between looks at a download that is silent
RETRIED = {"ConnectError", "TimeoutException", "ProxyError"}  # huggingface_hub retried these, or a retry cannot help
LOCAL_FOLDER = "use a local folder"
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Repository:
    """A repository on the hub at one revision."""

    name: str  # owner/name
    revision: str | None = None  # branch, tag or commit; None: main
    kind: str = "model"  # or "dataset"

    @property
    def cache(self) -> Path:
        """Folder of the repository in the hub's cache (HF_HUB_CACHE, HF_HOME)."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"{self.kind}s--{self.name.replace('/', '--')}"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository as the hub lists it."""

    repository: Repository
    commit: str
    path: str  # inside the repository
    size: int  # bytes
    sha256: str | None  # of files in large-file storage; None for small ones

    @property
    def place(self) -> Path:
        """The file's path in the hub's cache, whether it exists or not."""
        return self.repository.cache / "snapshots" / self.commit / self.path

    @property
    def bytes_to_fetch(self) -> int:
        """The size, or 0 if a file with the same content is in the cache (from another commit)."""
        return 0 if (self.repository.cache / "blobs" / str(self.sha256)).exists() else self.size


NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class HubPart:
    """A part of a pipeline on the hub."""

    repository: Repository
    part: str  # the sub-folder: transformer, tokenizer_2, ...
    weights: bool  # whether the weights are needed, or only the configuration
    check: Callable[[Path], None] | None = field(default=None, compare=False)
    """Is given the folder of its config.json before anything else is fetched; a ``UserError`` prevents the rest."""


_FETCHED: dict[HubPart, Path] = {}


class Unreachable(UserError):
    """The hub does not respond or refuses access; the cache may still have the files."""


def is_hub_name(name: str) -> bool:
    """Return whether a name is a hub repository (owner/name) rather than a folder or file."""
    is_path = name.startswith(".") or name.endswith(WEIGHT_FILES) or Path(name).exists()
    return not is_path and HUB_NAME.match(name) is not None


def hub_file(name: str) -> tuple[str, str] | None:
    """Split the name of a file on the hub (owner/name/style.safetensors) into repository and file; None for another
    name, such as a path that begins with a folder of this machine."""
    match = HUB_FILE.match(name)
    if match is None or name.startswith(".") or Path(name.partition("/")[0]).exists():
        return None
    return match[1], match[2]


def has_token() -> bool:
    """Return whether a token for the Hub is set here: in the environment, or by a login."""
    from huggingface_hub import get_token

    return get_token() is not None


def commit_of(folder: Path | None) -> str | None:
    """Return the commit of a part's folder in the hub's cache; None if it lies elsewhere."""
    snapshot = next((each for each in folder.parents if each.parent.name == "snapshots"), None) if folder else None
    is_cached = snapshot is not None and re.match("(model|dataset)s--", snapshot.parents[1].name)
    return snapshot.name if snapshot is not None and is_cached else None


def part_folder(part: HubPart) -> Path:
    """Return the local folder of a part on the hub; fetch it if necessary."""
    if part not in _FETCHED:
        fetch([part])
    return _FETCHED[part]


def fetch(parts: Sequence[HubPart], optional: Mapping[str, str] = NOTHING) -> None:
    """Fetch parts that are not in the hub's cache; start only if all of them fit on the disk. ``optional``: the
    settings that do without a part, by its name."""
    folders: dict[HubPart, Path] = {}
    wanted: list[HubFile] = []
    checked: list[tuple[HubFile, Callable[[Path], None]]] = []
    for part in dict.fromkeys(parts):
        try:
            files = needed_files(part, listing(part.repository))
        except Unreachable:
            folder = cached_folder(part)
            if folder is None:
                raise
            say(f"{part.repository.name}: the hub is offline or unreachable; {part.part} comes from the cache")
            folders[part] = folder
        else:
            folders[part] = files[0].place.parent
            wanted += files
            if part.check is not None:
                checked += [(file, part.check) for file in files if file.place.name == "config.json"]
    _require_room(wanted, optional)
    for file, check in checked:
        if not file.place.exists():
            _fetch_file(file)
        check(file.place.parent)
    fetch_files(wanted)
    _FETCHED.update(folders)


def needed_files(part: HubPart, files: Sequence[HubFile]) -> list[HubFile]:
    """List the files of a part in fetching order, without other precisions and frameworks."""
    name, prefix = part.repository.name, f"{part.part}/"
    if not any(file.path.startswith(prefix) for file in files):
        if part.part not in ALONE or not any(file.path == "config.json" for file in files):
            held = ", ".join(sorted({f.path.split("/")[0] for f in files if "/" in f.path})) or "no folders"
            raise UserError(
                f"{name} has no {prefix} folder (diffusers' layout), only {held}. Name a pipeline of model.family, or "
                "set model.family to the pipeline's"
            )
        prefix = ""
    inside = {file.path.removeprefix(prefix): file for file in files if file.path.startswith(prefix)}
    inside = {path: file for path, file in inside.items() if "/" not in path}
    chosen = [file for path, file in inside.items() if path.endswith(DESCRIPTIONS) and ".fp16." not in path]
    if part.weights:
        weights = _chosen_weights(inside)
        if not weights:
            raise UserError(
                f"{name}: {prefix or 'the repository'} has no {NAMES[0]}.safetensors, only {', '.join(inside)}. "
                "Name a repository with safetensors weights"
            )
        chosen = weights + chosen
    return sorted(chosen, key=lambda file: (file.path.endswith(LAST), not file.path.endswith(".safetensors")))


def _chosen_weights(inside: dict[str, HubFile]) -> list[HubFile]:
    """List the weight files that ``weight_files`` will read: the shards if there is an index, else the single file, in
    half precision only if there is no other."""
    for name in NAMES:
        shards = [file for path, file in inside.items() if re.fullmatch(rf"{name}-\d+-of-\d+\.safetensors", path)]
        if f"{name}.safetensors.index.json" in inside and shards:
            return shards
        if f"{name}.safetensors" in inside:
            return [inside[f"{name}.safetensors"]]
    halves = (f"{name}{HALF}.safetensors" for name in NAMES)
    return [inside[path] for path in halves if path in inside][:1]


def repository_file(name: str, file: str, revision: str | None = None) -> Path:
    """Return the local path of a file on the hub; fetch it if necessary."""
    repository = Repository(name, revision)
    try:
        found = [each for each in listing(repository) if each.path == file]
    except Unreachable:
        if not (place := _snapshot(repository) / file).exists():
            raise
        return place
    if not found:
        raise UserError(f"{name} has no {file}. Check the name")
    fetch_files(found)
    return found[0].place


def files_folder(name: str, files: Sequence[str], revision: str | None = None) -> Path | None:
    """Return the local folder of some of a repository's files; fetch them if necessary. None: it lacks one of them, or
    it cannot be reached and they are not in the cache."""
    repository = Repository(name, revision)
    try:
        found = [each for each in listing(repository) if each.path in files]
    except Unreachable:
        folder = _snapshot(repository)
        return folder if all((folder / file).exists() for file in files) else None
    if len(found) < len(files):
        return None
    fetch_files(found)
    return found[0].place.parent


def data_set_folder(name: str, patterns: list[str]) -> Path:
    """Return the local folder of a data set's files that match the patterns; fetch them if necessary."""
    repository = Repository(name, kind="dataset")
    try:
        held = listing(repository)
    except Unreachable:
        if not _snapshot(repository).is_dir():
            raise
        return _snapshot(repository)
    found = [file for file in held if any(fnmatch(file.path, pattern) for pattern in patterns)]
    if not found:
        first = ", ".join(file.path for file in held[:8]) or "nothing"
        raise UserError(f"{name} has no file that matches {' or '.join(patterns)}, only {first}. Check the name")
    fetch_files(found)
    return repository.cache / "snapshots" / found[0].commit


def model_folder(name: str, revision: str | None = None) -> Path:
    """Return the local folder of a whole model in transformers' layout; fetch it if necessary, safetensors only."""
    repository = Repository(name, revision)
    try:
        files = [file for file in listing(repository) if "/" not in file.path]
    except Unreachable:
        if not (folder := _snapshot(repository) / "config.json").exists():
            raise
        return folder.parent
    weights = _chosen_weights({file.path: file for file in files})
    described = [file for file in files if file.path.endswith(DESCRIPTIONS)]
    if not weights or not any(file.path == "config.json" for file in described):
        held = ", ".join(file.path for file in files[:8]) or "no files"
        raise UserError(
            f"{name} has no model.safetensors with a config.json, only {held}. Name a repository that has them"
        )
    fetch_files([*weights, *sorted(described, key=lambda file: file.path == "config.json")])
    return weights[0].place.parent


@lru_cache(maxsize=16)
def listing(repository: Repository) -> tuple[HubFile, ...]:
    """List a repository's files."""
    from huggingface_hub import HfApi, constants

    # One request; snapshot_download(dry_run=True) makes one for each file, and tells no sums.
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


def _snapshot(repository: Repository) -> Path:
    """Return the cache folder of the last commit that was fetched completely."""
    from huggingface_hub import constants

    revision = repository.revision or constants.DEFAULT_REVISION
    note = repository.cache / "refs" / revision
    return repository.cache / "snapshots" / (note.read_text(encoding="utf-8").strip() if note.is_file() else revision)


def cached_folder(part: HubPart) -> Path | None:
    """Return the part's folder in the hub's cache if it is complete, without contacting the hub."""
    here = _snapshot(part.repository)
    for folder in (here / part.part, *([here] if part.part in ALONE else [])):
        if any((folder / name).exists() for name in LAST):
            try:
                if part.weights:
                    weight_files(folder)
            except UserError:
                return None
            return folder
    return None


def fetch_files(files: Sequence[HubFile]) -> None:
    """Fetch missing files if they fit on the disk; record the commit for later use without a network."""
    from huggingface_hub import constants

    if missing := _require_room(files):
        size, cache = sum(file.bytes_to_fetch for file in missing), missing[0].repository.cache.parent
        names = ", ".join(dict.fromkeys(file.repository.name for file in missing))
        count, free = plural(len(missing), "file"), free_disk_bytes(cache)
        say(f"fetching {size / GIB:.2f} GiB in {count} from {names} to {cache} ({free / GIB:.0f} GiB free)")
    for file in missing:  # one by one: snapshot_download's eight at once would lose the parts of eight when it is ended
        _fetch_file(file)
    # After the files, where the library notes it before: without a network, the last complete commit is used.
    for repository, commit in dict.fromkeys((file.repository, file.commit) for file in files):
        note = repository.cache / "refs" / (repository.revision or constants.DEFAULT_REVISION)
        if note.name != commit and (not note.exists() or note.read_text(encoding="utf-8") != commit):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(commit, encoding="utf-8")


def _require_room(files: Sequence[HubFile], optional: Mapping[str, str] = NOTHING) -> list[HubFile]:
    """Return the files that are missing. Raises DiskFull if they do not fit on the disk."""
    missing = [file for file in files if not file.place.exists()]
    if missing:
        size, cache = sum(file.bytes_to_fetch for file in missing), missing[0].repository.cache.parent
        free = free_disk_bytes(cache)
        names = ", ".join(dict.fromkeys(file.repository.name for file in missing))
        if size > free:
            spared = {
                setting: sum(file.size for file in missing if file.path.startswith(f"{part}/"))
                for part, setting in optional.items()
            }
            remedy = "".join(f", or set {how} (saves {size / GIB:.1f} GiB)" for how, size in spared.items() if size)
            raise DiskFull(
                f"{names}: the download needs {size / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free at {cache}. "
                f"Free {(size - free) / GIB:.2f} GiB, set HF_HOME to a larger disk{remedy}"
            )
    return missing


def _fetch_file(file: HubFile) -> None:
    """Download one file into huggingface_hub's cache, and check the SHA-256 of a large one."""
    large = file.sha256 is not None
    with explain_hub_errors(file.repository, file):
        shown = progress(f"fetch {file.path}", -(-file.size // MIB), "MiB") if large else nullcontext(lambda: None)
        with shown as count, _watch(count) as watched:
            _download(file, *watched)
        if large and sha256_of(file.place) != file.sha256:
            for damaged in (file.place.resolve(), file.place):
                damaged.unlink(missing_ok=True)
            raise UserError(
                f"{file.repository.name}: {file.path} arrived damaged (wrong sha256) and was deleted. Start again"
            )


def _download(file: HubFile, bar: type[tqdm], stalled: threading.Event) -> None:
    """Call huggingface_hub, without hf_xet once that has failed or stood still, and up to ``TRIES`` times for failures
    that it does not retry itself."""
    from huggingface_hub import constants, get_session, hf_hub_download
    from huggingface_hub.utils._runtime import is_xet_available

    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_without_addresses)
    attempt = 1
    while True:
        get_session().timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT  # its request for hf_xet's token has none (2.4)
        uses_xet = file.sha256 is not None and is_xet_available()
        try:
            hf_hub_download(
                file.repository.name,
                file.path,
                repo_type=file.repository.kind,
                revision=file.commit,
                cache_dir=constants.HF_HUB_CACHE,
                endpoint=constants.ENDPOINT,
                etag_timeout=constants.HF_HUB_ETAG_TIMEOUT,
                tqdm_class=bar,
            )
            return
        except Exception as error:
            if uses_xet:
                fault = (
                    f"nothing has arrived for {STALLED:g} s" if stalled.is_set() else f"failed ({type(error).__name__})"
                )
                say(f"fetch {file.path}: {fault}; tries again without xet (HF_HUB_DISABLE_XET=1: from the start)")
                constants.HF_HUB_DISABLE_XET = True  # for all files to come; the library reads the variable only once
            elif attempt == TRIES or not _is_temporary(error):
                raise
            else:
                attempt += 1
                say(f"fetch {file.path}: {type(error).__name__}, attempt {attempt} of {TRIES}")
                time.sleep(PAUSE * (attempt - 1))


@contextmanager
def _watch(count: Callable[[], None]) -> Iterator[tuple[type[tqdm], threading.Event]]:
    """Give a progress bar for huggingface_hub that shows nothing and calls ``count`` once per megabyte, and an event
    that says that hf_xet, which may wait for hours, was aborted: nothing had arrived for ``STALLED`` seconds."""
    from huggingface_hub.utils import tqdm
    from huggingface_hub.utils._xet import abort_xet_session

    ended, stalled = threading.Event(), threading.Event()
    counted, moved = 0, inf  # until there is a bar: perhaps another process fetches the file, and holds its lock

    class Counter(tqdm):
        """Of bytes. hf_xet has two, for the network and the disk; the one that is ahead counts."""

        def __init__(self, **_: object):
            nonlocal moved
            super().__init__(disable=True)
            self.bytes, moved = 0, time.monotonic()

        def update(self, n: float | None = 1) -> None:
            nonlocal counted, moved
            self.bytes, moved = self.bytes + int(n or 0), time.monotonic()  # negative when a download starts over
            while counted < self.bytes // MIB:
                counted += 1
                count()

    def look() -> None:
        while not ended.wait(LOOK):
            if time.monotonic() - moved >= STALLED:
                stalled.set()
                abort_xet_session()
                return

    threading.Thread(target=look, daemon=True).start()
    try:
        yield Counter, stalled
    finally:
        ended.set()


def _is_temporary(error: Exception) -> bool:
    """Return whether a failure may be temporary but huggingface_hub (2.4) gave up without a retry.

    It resumes an interrupted GET and retries a HEAD; it does neither after a 5xx response to a GET, a reset connection,
    an interrupted HEAD or a file of the wrong size (an OSError without errno).
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    if isinstance(error, HTTPError):
        return not _class_names(error) & RETRIED
    return type(error) is OSError and error.errno is None


def _without_addresses(record: logging.LogRecord) -> bool:
    """Remove URLs from huggingface_hub's warnings: a signed URL gives every reader of the log access to the file."""
    record.msg, record.args = re.sub(r"https?://\S*[^\s:]", "the hub", record.getMessage()), ()
    return True


@contextmanager
def explain_hub_errors(repository: Repository, file: HubFile | None = None) -> Iterator[None]:
    """Turn failures of the hub, the network or the disk into a UserError, of requesting a repository or fetching a file
    of it; into Unreachable if the cache may still have the files."""
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        yield
    except HFValidationError:
        raise UserError(f"{repository.name} is not a valid name on the hub (owner/name). Check it") from None
    except LocalEntryNotFoundError as error:
        raise _explain(error.__cause__ or error, repository, file) from None
    except (HTTPError, EntryNotFoundError, OSError, RuntimeError) as error:  # RuntimeError: hf_xet's
        raise _explain(error, repository, file) from None


def _class_names(error: BaseException) -> set[str]:
    """Return the names of an error's class and its bases."""
    # huggingface_hub raises its HTTP client's errors but exports only their base class (errors.HTTPError). Comparing
    # subclasses (TimeoutException, ProxyError) by name avoids importing the client.
    return {kind.__name__ for kind in type(error).__mro__}


def _explain(error: BaseException, repository: Repository, file: HubFile | None) -> UserError:
    from huggingface_hub import errors

    name, cache = repository.name, repository.cache.parent
    if isinstance(error, errors.OfflineModeIsEnabled):
        return Unreachable(
            f"{name} is not in the local cache, and HF_HUB_OFFLINE forbids access to the hub. "
            f"Unset it, or {LOCAL_FOLDER}"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_answer(error, repository, file)
    if "ProxyError" in _class_names(error):
        return Unreachable(f"{name}: the proxy refuses the connection to the hub. Check HTTPS_PROXY and NO_PROXY")
    if isinstance(error, (errors.HTTPError, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError)):
        # a missing or interrupted response
        slow = bool(_class_names(error) & {"TimeoutException", "TimeoutError"})
        if file is not None:
            what = "the download timed out" if slow else "the connection was interrupted"
            return UserError(
                f"{name}: {what} while fetching {file.path} ({file.size:,} bytes). "
                "Start again: this file is fetched from the start, complete files are kept"
                + (" (HF_HUB_DOWNLOAD_TIMEOUT sets the seconds to wait)" if slow else "")
            )
        what = "the hub did not respond in time" if slow else f"the hub cannot be reached ({type(error).__name__})"
        return Unreachable(
            f"{name} is not in the local cache, and {what}. Check the network and HTTPS_PROXY, try again, or "
            f"{LOCAL_FOLDER}"
        )
    if kind := describe_full_disk(error):
        return DiskFull(
            f"{name}: the disk of {cache} {kind}; complete files are kept. "
            "Free space, or set HF_HOME to a larger disk, and start again"
        )
    if isinstance(error, OSError) and error.errno:
        return UserError(f"{name}: {cache} cannot be written ({error.strerror}). Set HF_HOME to another folder")
    without_xet = ", set HF_HUB_DISABLE_XET=1" if isinstance(error, RuntimeError) else ""
    return Unreachable(f"{name} cannot be fetched ({type(error).__name__}). Try again{without_xet}, or {LOCAL_FOLDER}")


def _explain_answer(error: BaseException, repository: Repository, file: HubFile | None) -> UserError:
    """Explain an HTTP status. Without a token, the hub answers 401 for repositories that do not exist, too."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    assert isinstance(error, HfHubHTTPError)
    name, folder = repository.name, "datasets/" if repository.kind == "dataset" else ""
    page = f"huggingface.co/{folder}{name}"
    status, login = error.response.status_code, f"log in with `{login_command()}` or set HF_TOKEN"
    if isinstance(error, GatedRepoError) and status == 403:
        return Unreachable(
            f"{name} is gated, and your token's account has not accepted its licence (403). "
            f"Accept it at {page}; a fine-grained token must also allow reading gated repositories"
        )
    if isinstance(error, GatedRepoError):
        how = "the token was not accepted" if get_token() else "no token was sent"
        return Unreachable(f"{name} is gated, and {how} ({status}). Accept its licence at {page}, then {login}")
    if isinstance(error, RevisionNotFoundError):
        return UserError(
            f"{name} has no revision {repository.revision!r} (404). Check the revision: a branch, tag or commit"
        )
    if isinstance(error, RepositoryNotFoundError) or (status == 404 and file is None):
        return Unreachable(f"{name} was not found on the hub, or it is private ({status}). Check the name, or {login}")
    if status == 404 and file is not None:
        return UserError(f"{name} has no {file.path} (404). Check that the name is right")
    if status == 401:
        return Unreachable(f"{name}: the hub rejects your token (401): is it mistyped or expired? To renew it, {login}")
    if status == 403:
        return Unreachable(f"{name}: your token has no read access (403). Use one that has: {login}")
    if status == 429:
        return Unreachable(f"{name}: the hub limits the rate of requests (429). Wait a few minutes and start again")
    return Unreachable(f"{name}: the hub has an internal error (status {status}). Try again later, or {LOCAL_FOLDER}")
