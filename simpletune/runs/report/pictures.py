"""Embed validation pictures in a page, scaled down to keep it small."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from simpletune.stages.png import generation_parameters

BASE = "base"
LARGEST = 512  # pixels of the longer side
SHOWN_AS_IS = 128  # small pictures keep every pixel
ROOM = 3 * 2**20  # bytes of all pictures of a page


@dataclass(frozen=True)
class ValidationPicture:
    prompt: str
    seed: str
    step: int  # 0 for the base
    file: Path


def validation_pictures(folder: Path, notes: list[str]) -> list[ValidationPicture]:
    """Find the validation pictures of a run, ordered by prompt, then by step; adds a note for each damaged one."""
    found = []
    for state in sorted((folder / "samples").glob("*/")):
        digits = "0" if state.name == BASE else state.name.removeprefix("step-")
        if not digits.isdigit():
            continue
        for file in sorted(state.glob("prompt-*.png")):
            try:
                how = generation_parameters(file)
            except (OSError, ValueError, SyntaxError) as error:
                notes.append(f"{state.name}/{file.name} cannot be read ({type(error).__name__}) and is left out.")
                continue
            picture = ValidationPicture(str(how.get("prompt", "")), str(how.get("seed", "")), int(digits), file)
            found.append((file.name, picture))
    return [picture for _, picture in sorted(found, key=lambda pair: (pair[0], pair[1].step))]


def painted_inputs(folder: Path, prompt: str) -> dict[str, Path]:
    """The picture and the mask that the validation pictures of one name, such as ``prompt-00.png``, paint into, by what
    they are; empty if they paint into none."""
    files = {kind: folder / "samples" / "input" / prompt.replace("prompt", kind, 1) for kind in ("picture", "mask")}
    return {kind: file for kind, file in files.items() if file.is_file()}


def spread_steps(steps: list[int], room: int) -> list[int]:
    """Select at most ``room`` steps, evenly spread, including the first and the last."""
    if len(steps) <= room:
        return steps
    return [steps[round(number * (len(steps) - 1) / (room - 1))] for number in range(room)]


def data_uri(file: Path, largest: int = LARGEST) -> str:
    """Encode a picture as a WebP data URI, at most ``largest`` pixels wide and high; tiny ones losslessly."""
    with Image.open(file) as image:
        picture = image.convert("RGB")
    tiny = max(picture.size) <= SHOWN_AS_IS
    picture.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=tiny, quality=100 if tiny else 82, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def side_for(count: int) -> int:
    """Choose the longer side in pixels so that ``count`` pictures fit a page (about 0.2 bytes per pixel)."""
    side = LARGEST
    while side > SHOWN_AS_IS and count * side * side // 5 > ROOM:
        side -= 32
    return side
