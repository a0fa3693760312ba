"""What works without a download: a tiny SD3 and small folders of captioned pictures, made on the spot.

Names that begin with `demo:` stand for them wherever a configuration takes a folder.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

PREFIX = "demo:"


def resolve(name: str, cache: Path) -> Path:
    """Make the named thing, unless a former call did, and say where it is.

    Args:
        name: `demo:tiny-sd3`, a pipeline folder with random weights; `demo:pictures`, 24 striped pictures with
            captions that call their style by a trigger word; `demo:subject`, 5 pictures of one particular figure.
        cache: Folder that keeps what was made, under `demo/` and with the version of its maker in the name.

    Returns:
        The folder. It is complete: it was written aside and renamed.

    Raises:
        ValueError: There is no such name.
    """
    if name not in _MAKERS:
        near = difflib.get_close_matches(name, _MAKERS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name}: unknown demo name.{hint} Known are {', '.join(_MAKERS)}.")
    version, make = _MAKERS[name]()
    folder = cache / "demo" / f"{name.removeprefix(PREFIX)}-v{version}"
    if not folder.exists():
        try:
            make(folder)
        except FileExistsError:  # another process was faster, with the same content
            pass
    return folder


def transformer_config() -> dict[str, Any]:
    """The tiny SD3's transformer configuration, before it is made."""
    from simpletune.demo.networks import transformer_config as config

    return config(layers=3, text_width=96, pooled_width=32 + 48)


def _tiny_sd3() -> tuple[str, Callable[[Path], None]]:
    from simpletune.demo import pictures, tiny_sd3

    # The pictures' words are the tokenizers' vocabulary, and the latents' scale is measured on them.
    return f"{tiny_sd3.VERSION}.{pictures.VERSION}", tiny_sd3.build


def _pictures() -> tuple[str, Callable[[Path], None]]:
    from simpletune.demo import pictures

    def make(folder: Path) -> None:
        pictures.write_folder(folder, 24, seed=0, style="striped", trigger=pictures.STYLE_TRIGGER)

    return str(pictures.VERSION), make


def _subject() -> tuple[str, Callable[[Path], None]]:
    from simpletune.demo import pictures

    return str(pictures.VERSION), pictures.write_subject_folder


_MAKERS: dict[str, Callable[[], tuple[str, Callable[[Path], None]]]] = {
    "demo:tiny-sd3": _tiny_sd3,
    "demo:pictures": _pictures,
    "demo:subject": _subject,
}
