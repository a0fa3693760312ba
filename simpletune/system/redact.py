"""Remove tokens and passwords from output, and find them in configurations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

HIDDEN = "***"
SHORTEST = 8  # characters: a shorter value of an environment variable may occur in ordinary text
NAMED = re.compile(r"((TOKEN|API_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?|(NOTIFY|WEBHOOK)_URL)$", re.IGNORECASE)
SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}"  # GitHub
    r"|\bwandb_v\d_[A-Za-z0-9_]{20,}"  # wandb's newer keys
    r"|(?<=://)[^\s/@:'\"]*:[^\s/@'\"]+(?=@)"  # user:password@ in a URL
)


def secrets_in_environment() -> list[str]:
    """List the values of environment variables with secret-sounding names, longest first."""
    found = {value for name, value in os.environ.items() if NAMED.search(name) and len(value) >= SHORTEST}
    return sorted((value for value in found if not os.path.exists(value)), key=len, reverse=True)


def redact(text: str, secrets: Sequence[str] | None = None) -> str:
    """Remove tokens and passwords from a text; ``secrets`` are those of the environment, unless already listed."""
    for secret in secrets_in_environment() if secrets is None else secrets:
        text = text.replace(secret, HIDDEN)
    return SHAPES.sub(HIDDEN, text)


def texts_in(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of a JSON value, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts_in(each, f"{path}.{key}" if path else str(key))


def secret_paths(value: Any) -> Iterator[str]:
    """Yield the paths of strings in a JSON value that contain a token or a password."""
    secrets = secrets_in_environment()  # once, because it reads the whole environment
    return (path for path, text in texts_in(value) if redact(text, secrets) != text)
