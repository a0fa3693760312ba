"""Which models and pictures need no download? Trained tiny models that ship with the tool, and folders of captioned
pictures, made when first used.

Wherever a configuration takes a folder, a name that begins with `demo:` refers to them.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from simpletune.system.package import ASSETS

PREFIX = "demo:"
TINY_SD3, TINY_SDXL, TINY_KLEIN = "demo:tiny-sd3", "demo:tiny-sdxl", "demo:tiny-klein"
MODELS = {name: ASSETS / name.removeprefix(PREFIX).replace("-", "_") for name in (TINY_SD3, TINY_SDXL, TINY_KLEIN)}
"""Pipeline folders, created by `make tiny-sd3`, `make tiny-sdxl` and `make tiny-klein`."""
SHIPPED = MODELS[TINY_SD3]
STYLE, IMAGES, SUBJECT = DATA = ("demo:style", "demo:pictures", "demo:subject")

ENCODERS = {
    f"{PREFIX}{name}": SHIPPED.parent / "tiny_encoders" / name.replace("-", "_") for name in ("tiny-dino", "tiny-clip")
}
"""Folders of the two encoders that know the tiny models' pictures, created by `make tiny-encoders`."""


def resolve(name: str, cache: Path) -> Path:
    """Locate a demo folder: one of `MODELS`, pipeline folders that ship with the tool; `demo:style`, 64 striped
    pictures, each with three captions that name the style by a trigger word; `demo:pictures`, 32 of them with one
    caption each; `demo:subject`, 5 pictures of one particular figure. Generates pictures into `cache` if they are not
    there. Raises ValueError if the name is unknown."""
    if name in MODELS:
        return MODELS[name]
    known = [*MODELS, *DATA]
    if name not in DATA:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name}: unknown demo name.{hint} Use one of {', '.join(known)}.")
    from simpletune.data.demo import demo_scenes

    folder = cache / "demo" / f"{name.removeprefix(PREFIX)}-v{demo_scenes.VERSION}"
    if not folder.exists():
        try:
            if name == SUBJECT:
                demo_scenes.write_subject_folder(folder)
            else:
                whole, trigger = name == STYLE, demo_scenes.STYLE_TRIGGER
                scenes = demo_scenes.balanced_scenes(64 if whole else 32, "striped")
                demo_scenes.write_folder(folder, scenes, seed=0, trigger=trigger, all_captions=whole)
        except FileExistsError:  # another process created the same content first
            pass
    return folder
