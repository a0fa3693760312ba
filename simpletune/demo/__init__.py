"""What works without a download: a trained tiny SD3 that comes with the tool, and small folders of captioned pictures,
drawn on the spot.

Names that begin with `demo:` stand for them wherever a configuration takes a folder. May import system. Config, lora
and the rooms above may import it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simpletune.options import Json

PREFIX = "demo:"
TINY_SD3 = "demo:tiny-sd3"
SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "tiny_sd3"
"""The tiny SD3's pipeline folder; `make tiny-sd3` made it."""


def resolve(name: str, cache: Path) -> Path:
    """Say where the named thing is; pictures are drawn, unless a former call did.

    Args:
        name: `demo:tiny-sd3`, the pipeline folder that comes with the tool; `demo:pictures`, 32 striped pictures with
            captions that call their style by a trigger word; `demo:subject`, 5 pictures of one particular figure.
        cache: Folder that keeps what was made, under `demo/` and with the version of its maker in the name.

    Returns:
        The folder. It is complete: it was written aside and renamed.

    Raises:
        ValueError: There is no such name.
    """
    if name == TINY_SD3:
        return SHIPPED
    if name not in _MAKERS:
        near = difflib.get_close_matches(name, [TINY_SD3, *_MAKERS], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name}: unknown demo name.{hint} Known are {', '.join([TINY_SD3, *_MAKERS])}.")
    version, make = _MAKERS[name]()
    folder = cache / "demo" / f"{name.removeprefix(PREFIX)}-v{version}"
    if not folder.exists():
        try:
            make(folder)
        except FileExistsError:  # another process was faster, with the same content
            pass
    return folder


def transformer_config() -> Json:
    """The tiny SD3's transformer configuration."""
    return json.loads((SHIPPED / "transformer" / "config.json").read_text())


def _pictures() -> tuple[str, Callable[[Path], None]]:
    from simpletune.demo import pictures

    def make(folder: Path) -> None:
        scenes = pictures.balanced_scenes(32, "striped")
        pictures.write_folder(folder, scenes, seed=0, trigger=pictures.STYLE_TRIGGER)

    return str(pictures.VERSION), make


def _subject() -> tuple[str, Callable[[Path], None]]:
    from simpletune.demo import pictures

    return str(pictures.VERSION), pictures.write_subject_folder


_MAKERS: dict[str, Callable[[], tuple[str, Callable[[Path], None]]]] = {
    "demo:pictures": _pictures,
    "demo:subject": _subject,
}
