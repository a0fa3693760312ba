"""Explain the hub's failures: what happened, why, and what to do.

No message repeats text from the hub or the library: it could contain a token or a signed URL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from simpletune.system.disk import DiskFull, reason_full
from simpletune.system.hub.repository import HubFile, Repository
from simpletune.system.options import UserError

LOCAL_FOLDER = "use a local folder"


class Unreachable(UserError):
    """The hub does not respond or refuses access; the cache may still have the files."""


def class_names(error: BaseException) -> set[str]:
    """Return the names of an error's class and its bases.

    huggingface_hub raises its HTTP client's errors but exports only their base class (``errors.HTTPError``). Comparing
    subclasses (``TimeoutException``, ``ProxyError``) by name avoids importing the client.
    """
    return {kind.__name__ for kind in type(error).__mro__}


@contextmanager
def explain_hub_errors(repository: Repository, file: HubFile | None = None) -> Iterator[None]:
    """Turn failures of the hub, the network or the disk into a message with value, rule and remedy.

    Args:
        repository: the requested repository.
        file: the file being fetched.

    Raises:
        UserError: any failure; ``Unreachable`` if the cache may still have the files.
    """
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        yield
    except HFValidationError:
        raise UserError(f"{repository.name} is not a valid name on the hub (owner/name). Check it") from None
    except LocalEntryNotFoundError as error:
        raise _explain(error.__cause__ or error, repository, file) from None
    except (HTTPError, EntryNotFoundError, OSError, RuntimeError) as error:  # RuntimeError: hf_xet's
        raise _explain(error, repository, file) from None


def _explain(error: BaseException, repository: Repository, file: HubFile | None) -> UserError:
    """Choose the message for an error."""
    from huggingface_hub import errors

    name, cache = repository.name, repository.cache.parent
    if isinstance(error, errors.OfflineModeIsEnabled):
        return Unreachable(
            f"{name} is not in the local cache, and HF_HUB_OFFLINE forbids access to the hub. "
            f"Unset it, or {LOCAL_FOLDER}"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_answer(error, repository, file)
    if "ProxyError" in class_names(error):
        return Unreachable(f"{name}: the proxy refuses the connection to the hub. Check HTTPS_PROXY and NO_PROXY")
    if isinstance(error, (errors.HTTPError, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError)):
        return _explain_silence(error, name, file)
    if kind := reason_full(error):
        return DiskFull(
            f"{name}: the disk of {cache} {kind}; complete files are kept. "
            "Free space, or set HF_HOME to a larger disk, and start again"
        )
    if isinstance(error, OSError) and error.errno:
        return UserError(f"{name}: {cache} cannot be written ({error.strerror}). Set HF_HOME to another folder")
    without_xet = ", set HF_HUB_DISABLE_XET=1" if isinstance(error, RuntimeError) else ""
    return Unreachable(f"{name} cannot be fetched ({type(error).__name__}). Try again{without_xet}, or {LOCAL_FOLDER}")


def _explain_silence(error: BaseException, name: str, file: HubFile | None) -> UserError:
    """Explain a missing or interrupted response."""
    slow = bool(class_names(error) & {"TimeoutException", "TimeoutError"})
    if file is not None:
        what = "the download timed out" if slow else "the connection was interrupted"
        return UserError(
            f"{name}: {what} while fetching {file.path} ({file.size:,} bytes). "
            "Start again: this file is fetched from the start, complete files are kept"
            + (" (HF_HUB_DOWNLOAD_TIMEOUT sets the seconds to wait)" if slow else "")
        )
    what = "the hub did not respond in time" if slow else f"the hub cannot be reached ({type(error).__name__})"
    return Unreachable(
        f"{name} is not in the local cache, and {what}. Check the network and HTTPS_PROXY, try again, or {LOCAL_FOLDER}"
    )


def _explain_answer(error: BaseException, repository: Repository, file: HubFile | None) -> UserError:
    """Explain an HTTP status. Without a token, the hub answers 401 for repositories that do not exist, too."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    assert isinstance(error, HfHubHTTPError)
    name, page = (
        repository.name,
        f"huggingface.co/{'datasets/' if repository.kind == 'dataset' else ''}{repository.name}",
    )
    status, login = error.response.status_code, "log in with `hf auth login` or set HF_TOKEN"
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
