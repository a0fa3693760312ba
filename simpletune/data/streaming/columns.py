"""The columns to read from a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simpletune.system.options import UserError


@dataclass(frozen=True)
class Columns:
    """The columns to read from a data set.

    Args:
        picture: the column of the pictures' bytes.
        caption: the column of the captions; None: there is one prompt for all.
        size: the columns of the pictures' widths and heights in pixels; None: they are not needed.
    """

    picture: str
    caption: str | None
    size: tuple[str, str] | None = None

    def named(self) -> dict[str, str]:
        """The columns, by the configuration field that names them."""
        found = {"image_column": self.picture}
        if self.caption is not None:
            found["caption_column"] = self.caption
        return found | (dict(zip(("width_column", "height_column"), self.size, strict=True)) if self.size else {})


def require_columns(columns: Columns, known: Sequence[str], where: str) -> None:
    """Check that a data set has the columns that are read.

    Args:
        columns: the columns to read.
        known: the columns that it has.
        where: the file that lists them.

    Raises:
        UserError: a column is missing.
    """
    for field, name in columns.named().items():
        if name in known:
            continue
        more = " (data.aspect=square needs no sizes)" if field in ("width_column", "height_column") else ""
        raise UserError(f"data.{field}: {where} has no column {name!r}. Use one of: {', '.join(known)}{more}")
