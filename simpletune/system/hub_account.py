"""The account on the Hub: its token, which the Hub's own library keeps, and what it may download.

No message, and no error that leaves here, repeats a token.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from simpletune.system.hub import Repository, explain_hub_errors, has_token
from simpletune.system.options import UserError

FILE = "model_index.json"  # a small file that every pipeline has, for a question
SECONDS = 5.0  # timeout for the Hub
KEPT = 60.0  # seconds for which an answer is remembered
TOKEN = re.compile(r"hf_[A-Za-z0-9_]{8,200}")
TOKENS = "https://huggingface.co/settings/tokens"
State = Literal["here", "ready", "no token", "refused", "licence", "not found", "unknown"]
"""Of a model: in the cache; may be downloaded; needs a token; the token was refused; its licence has not been accepted;
it does not exist, or is another account's; the Hub gave no answer."""


class Access(NamedTuple):
    """Whether this account may download a model."""

    state: State
    why: str = ""  # a sentence with the remedy, unless it may

    @property
    def may_fail(self) -> bool:
        """Whether a download is known to fail."""
        return self.state in ("no token", "refused", "licence", "not found")


_asked: dict[tuple[str, bool], tuple[float, Access]] = {}


def token_source() -> Literal["", "environment", "stored"]:
    """Return where the token comes from that the Hub's library uses: HF_TOKEN, or a login; empty: there is none."""
    if not has_token():
        return ""
    named = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    return "environment" if any(os.environ.get(name, "").strip() for name in named) else "stored"


def keep_token(text: str) -> str:
    """Have the Hub's library keep a token, if the Hub accepts it; return the account's name. Raises UserError."""
    from huggingface_hub import HfApi, login

    token = text.strip()
    if not TOKEN.fullmatch(token):
        raise UserError(f"This is not a token of the Hub: one begins with hf_ and has no spaces. Copy it from {TOKENS}")
    with _without_tokens():
        account = HfApi().whoami(token=token)
        login(token=token, add_to_git_credential=False)
    _asked.clear()
    return str(account.get("name", ""))


def forget_token() -> None:
    """Delete the token that ``keep_token`` or a login has stored; others that are stored stay. Raises UserError if it
    comes from the environment."""
    from huggingface_hub import get_token, logout
    from huggingface_hub.utils import get_stored_tokens

    if token_source() == "environment":
        raise UserError("The token comes from HF_TOKEN, not from a login. Unset that variable, and start this again")
    token = get_token()
    name = next((name for name, each in get_stored_tokens().items() if each == token), None)
    logout(name)
    _asked.clear()


@contextmanager
def _without_tokens() -> Iterator[None]:
    """Replace errors of the Hub about a token by sentences that do not repeat it."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UserError(
                f"The Hub does not accept this token ({status}): it is mistyped, expired or revoked. Make another at "
                f"{TOKENS}"
            ) from None
        raise UserError(f"The Hub gave no answer about the token (status {status}). Try again later") from None
    except (HTTPError, OSError) as error:
        raise UserError(
            f"The Hub cannot be reached ({type(error).__name__}), and the token was not kept. Check the network"
        ) from None
    except ValueError:  # an organization's, which may not log in
        raise UserError(f"The Hub does not accept this token for a person's account. Make one at {TOKENS}") from None


def known_access(name: str) -> Access | None:
    """Return what ``access_to`` has found lately; None if it has not been asked."""
    found = _asked.get((name, bool(token_source())))
    return found[1] if found is not None and time.monotonic() - found[0] < KEPT else None


def access_to(name: str) -> Access:
    """Ask whether this account may download a model, by a HEAD request for a small file."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    repository = Repository(name)
    if (found := known_access(name)) is not None and not found.may_fail:  # a licence may have been accepted meanwhile
        return found
    source = token_source()
    state: State = "unknown"
    try:
        with explain_hub_errors(repository):
            try:
                get_hf_file_metadata(hf_hub_url(name, FILE), timeout=SECONDS)
            except GatedRepoError as error:
                state = "licence" if error.response.status_code == 403 else "refused" if source else "no token"
                raise
            except HfHubHTTPError as error:
                missing: State = "not found" if isinstance(error, RepositoryNotFoundError) else "unknown"
                state = "refused" if source and error.response.status_code == 401 else missing
                raise
    except UserError as error:
        access = Access(state, str(error))
    else:
        access = Access("ready")
    _asked[name, bool(source)] = time.monotonic(), access
    return access
