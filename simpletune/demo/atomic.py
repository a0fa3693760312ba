"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Fill a temporary sibling and rename it to `folder` when the block ends well.

    Args:
        folder: Where the content shall stand. Must not exist, or be an empty folder.

    Yields:
        The sibling to write into, on the same file system. A killed process leaves only that.

    Raises:
        FileExistsError: `folder` holds something already, now or by the time the content is ready.
    """
    _refuse_if_filled(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    sibling = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        sibling.chmod(0o755)  # mkdtemp makes it private to this user
        yield sibling
        _refuse_if_filled(folder)
        os.replace(sibling, folder)
    finally:
        shutil.rmtree(sibling, ignore_errors=True)


def _refuse_if_filled(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: nothing is overwritten. Remove it or name another.")
