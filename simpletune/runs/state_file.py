"""A checkpoint's state.json: JSON whose last value is the SHA-256 of all bytes before it.

Any changed byte shows: no value is used that was not written.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from simpletune.options import Json, UserError

CHECKSUM = "state_sha256"
_END = re.compile(rf', "{CHECKSUM}": "([0-9a-f]{{64}})"\}}\Z'.encode())
_UNCHECKED = {"step", "config", "manifest", "optimizer", "processes", "torch", "sha256"}  # as once written, without


class DamagedCheckpoint(UserError):
    """A checkpoint that is not as it was written; an older one may be used."""


def with_checksum(values: Json) -> str:
    """The text of a state.json."""
    text = json.dumps(values)
    return f'{text[:-1]}, "{CHECKSUM}": "{hashlib.sha256(text[:-1].encode()).hexdigest()}"}}'


def read_state(file: Path) -> Json:
    """The values of a state.json.

    Args:
        file: which is read whole.

    Raises:
        ValueError: it is not as it was written.
        UserError: an older version wrote it, without a checksum.
    """
    data = file.read_bytes()
    end = _END.search(data)
    if end is None:
        _refuse_older(data, file)
        raise ValueError("it does not end with its checksum")
    if hashlib.sha256(data[: end.start()]).hexdigest().encode() != end[1]:
        raise ValueError("it does not have its checksum")
    values: Json = json.loads(data)
    return values


def _refuse_older(data: bytes, file: Path) -> None:
    """A whole text without a checksum is of an older version; a damaged one has the key, changed or cut."""
    values = json.loads(data)
    if isinstance(values, dict) and set(values) == _UNCHECKED:
        raise UserError(
            f"--resume: {file} was written by an older version of simpletune, without a checksum: damage to it would "
            "not show. Continue with that version, or start a new run under another name"
        )
