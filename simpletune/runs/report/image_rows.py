"""Embed validation pictures in a page, scaled down to keep it small."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from simpletune.runs.folder import BASE, START
from simpletune.stages.png import ASKED, comparison_key, generation_parameters

LARGEST = 512  # pixels of the longer side
SHOWN_AS_IS = 128  # small pictures keep every pixel
ROOM = 3 * 2**20  # bytes of all pictures of a page


@dataclass(frozen=True)
class ValidationImage:
    prompt: str
    seed: str
    step: int  # 0 for the base and the start
    file: Path
    asked: str  # ``comparison_key``: equal in pictures that may stand side by side
    is_start: bool = False  # whether it is of the LoRA that the run began with


def validation_images(folder: Path, notes: list[str]) -> list[ValidationImage]:
    """Find the validation pictures of a run, ordered by request, then by step; adds a note for each damaged one."""
    found: list[ValidationImage] = []
    for state in sorted((folder / "samples").glob("*/")):
        digits = "0" if state.name in (BASE, START) else state.name.removeprefix("step-")
        if not digits.isdigit():
            continue
        for file in sorted(state.glob("prompt-*.png")):
            try:
                how = generation_parameters(file)
            except (OSError, ValueError, SyntaxError) as error:
                notes.append(f"{state.name}/{file.name} cannot be read ({type(error).__name__}) and is left out.")
                continue
            prompt, seed = str(how.get("prompt", "")), str(how.get("seed", ""))
            is_start = state.name == START
            found.append(ValidationImage(prompt, seed, int(digits), file, comparison_key(how), is_start))
    found.sort(key=lambda small: (small.step, small.is_start))
    newest = {small.asked: small for small in found}  # whose name tells the request's place
    return sorted(
        found,  # keeps their order within a request
        key=lambda each: (newest[each.asked].file.name, -newest[each.asked].step, each.asked),
    )


def row_titles(asked: Iterable[str], shown: Sequence[str] = ("prompt",)) -> dict[str, str]:
    """Title rows of pictures, by ``comparison_key``: their prompts, with what tells those apart that have the same
    values of ``shown``."""
    rows = {key: json.loads(key) for key in dict.fromkeys(asked)}
    titles = {}
    for key, own in rows.items():
        alike = [each for each in rows.values() if all(each.get(name) == own.get(name) for name in shown)]
        differ = [name for name in ASKED if any(each.get(name) != own.get(name) for each in alike)]
        words = ", ".join(
            f"{name.replace('_', ' ')} {'none' if own.get(name) in (None, '') else own[name]}"
            for name in differ
            if name != "inputs"
        )
        titles[key] = f"{own.get('prompt', '')} ({words})" if words else str(own.get("prompt", ""))
    return titles


def painted_inputs(folder: Path, prompt: str) -> dict[str, Path]:
    """Return the picture and the mask that the validation pictures of one name, such as ``prompt-00.png``, paint into,
    by what they are; empty if they paint into none."""
    files = {kind: folder / "samples" / "input" / prompt.replace("prompt", kind, 1) for kind in ("picture", "mask")}
    return {kind: file for kind, file in files.items() if file.is_file()}


def data_uri(file: Path, largest: int = LARGEST) -> str:
    """Encode a picture as a WebP data URI, at most ``largest`` pixels wide and high; tiny ones losslessly."""
    with Image.open(file) as image:
        small = image.convert("RGB")
    tiny = max(small.size) <= SHOWN_AS_IS
    small.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", lossless=tiny, quality=100 if tiny else 82, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def side_for(count: int) -> int:
    """Choose the longer side in pixels so that ``count`` pictures fit a page (about 0.2 bytes per pixel)."""
    side = LARGEST
    while side > SHOWN_AS_IS and count * side * side // 5 > ROOM:
        side -= 32
    return side
