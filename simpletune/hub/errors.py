"""The hub's failures in plain words: what happened, why, and what to do.

No message repeats what the hub or the library said: that could hold a token or a signed address.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from simpletune.options import UserError
from simpletune.system.disk import DiskFull, reason_full

if TYPE_CHECKING:
    from simpletune.hub.download import HubFile, Repository


class Unreachable(UserError):
    """The hub does not answer or refuses to: what is in the cache may still serve."""


def class_names(error: BaseException) -> set[str]:
    """Names of an error's class and its bases.

    huggingface_hub hands on errors of its HTTP client and exports their base alone (``errors.HTTPError``); the kinds
    below it (``TimeoutException``, ``ProxyError``) are told apart by name, so that the client is not imported here.
    """
    return {kind.__name__ for kind in type(error).__mro__}


@contextmanager
def clear_errors(repository: Repository, file: HubFile | None = None) -> Iterator[None]:
    """Say what went wrong with the hub in one paragraph: value, rule, remedy.

    Args:
        repository: that was asked for.
        file: that is being fetched.

    Raises:
        UserError: for everything that the hub, the network or the disk can do; ``Unreachable`` if it may pass.
    """
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        yield
    except HFValidationError:
        raise UserError(f"{repository.name} is no name the hub allows (owner/name). Check it") from None
    except LocalEntryNotFoundError as error:
        raise _explain(error.__cause__ or error, repository, file) from None
    except (HTTPError, EntryNotFoundError, OSError, RuntimeError) as error:  # RuntimeError: hf_xet's
        raise _explain(error, repository, file) from None


def _explain(error: BaseException, repository: Repository, file: HubFile | None) -> UserError:
    """The error for a person."""
    from huggingface_hub import errors

    name, cache = repository.name, repository.cache.parent
    if isinstance(error, errors.OfflineModeIsEnabled):
        return Unreachable(
            f"{name} is not in the local cache, and HF_HUB_OFFLINE forbids asking the hub. "
            "Unset it, or give a local folder"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_answer(error, repository, file)
    if "ProxyError" in class_names(error):
        return Unreachable(f"{name}: the proxy refuses the connection to the hub. Check HTTPS_PROXY and NO_PROXY")
    if isinstance(error, (errors.HTTPError, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError)):
        return _explain_silence(error, name, file)
    if kind := reason_full(error):
        return DiskFull(
            f"{name}: the disk of {cache} {kind}; files that were fetched whole stay. "
            "Free space, or set HF_HOME to a larger disk, and start again"
        )
    if isinstance(error, OSError) and error.errno:
        return UserError(f"{name}: {cache} cannot be written ({error.strerror}). Set HF_HOME to another folder")
    without_xet = ", set HF_HUB_DISABLE_XET=1" if isinstance(error, RuntimeError) else ""
    return Unreachable(
        f"{name} cannot be fetched ({type(error).__name__}). Try again{without_xet}, or give a local folder"
    )


def _explain_silence(error: BaseException, name: str, file: HubFile | None) -> UserError:
    """No answer, or half of one."""
    slow = bool(class_names(error) & {"TimeoutException", "TimeoutError"})
    if file is not None:
        what = "nothing came for too long" if slow else "the connection was cut"
        return UserError(
            f"{name}: {what} while {file.path} ({file.size:,} bytes) was fetched. "
            "Start again: this file begins anew, files that are whole stay"
            + (" (HF_HUB_DOWNLOAD_TIMEOUT sets the seconds to wait)" if slow else "")
        )
    what = "the hub did not answer in time" if slow else f"the hub cannot be reached ({type(error).__name__})"
    return Unreachable(
        f"{name} is not in the local cache, and {what}. Check the network and HTTPS_PROXY, try again, "
        "or give a local folder"
    )


def _explain_answer(error: BaseException, repository: Repository, file: HubFile | None) -> UserError:
    """A status that is not 200. The hub answers 401 for what does not exist, too, when it does not know who asks."""
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
            f"{name} is gated, and the account of your token has not accepted its licence (403). "
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
        return Unreachable(f"{name}: the hub does not accept your token (401): mistyped or expired? Anew, {login}")
    if status == 403:
        return Unreachable(f"{name}: your token may not read it (403). Use one with read access: {login}")
    if status == 429:
        return Unreachable(f"{name}: the hub asks for fewer requests (429). Wait some minutes and start again")
    return Unreachable(
        f"{name}: the hub has trouble of its own (status {status}). Try again later, or give a local folder"
    )
