"""Read and write a checkpoint's state.json, whose last value is the SHA-256 of all bytes before it.

A change of any byte is detected.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from simpletune.system.options import Json, UserError

CHECKSUM = "state_sha256"
_END = re.compile(rf', "{CHECKSUM}": "([0-9a-f]{{64}})"\}}\Z'.encode())
_UNCHECKED = {"step", "config", "manifest", "optimizer", "processes", "torch", "sha256"}  # keys without a checksum


class DamagedCheckpoint(UserError):
    """Report a checkpoint that has changed since it was written."""


def with_checksum(values: Json) -> str:
    """Serialise the values of a state.json."""
    text = json.dumps(values)
    return f'{text[:-1]}, "{CHECKSUM}": "{hashlib.sha256(text[:-1].encode()).hexdigest()}"}}'


def read_state(file: Path) -> Json:
    """Read the values of a state.json.

    Args:
        file: path of the state.json.

    Raises:
        ValueError: the file has changed since it was written.
        UserError: an older version wrote the file, without a checksum.
    """
    data = file.read_bytes()
    end = _END.search(data)
    if end is None:
        _refuse_older(data, file)
        raise ValueError("its checksum is missing")
    if hashlib.sha256(data[: end.start()]).hexdigest().encode() != end[1]:
        raise ValueError("its checksum does not match")
    values: Json = json.loads(data)
    return values


def _refuse_older(data: bytes, file: Path) -> None:
    """Refuse a valid file without a checksum, which an older version wrote; a damaged file has a broken key."""
    values = json.loads(data)
    if isinstance(values, dict) and set(values) == _UNCHECKED:
        raise UserError(
            f"--resume: {file} has no checksum, because an older version of simpletune wrote it, so damage could go "
            "unnoticed. Continue with that version, or start a new run under another name"
        )
