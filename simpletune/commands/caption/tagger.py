"""Taggers in the form of WD14, such as SmilingWolf/wd-vit-tagger-v3: an ONNX model scores every tag of a list.

A folder holds model.onnx, and selected_tags.csv with a row for each output. Pictures go in as [n, side, side, 3], BGR,
0 to 255, padded with white to a square.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image

from simpletune.commands.caption.onnx_model import CUDA, open_onnx
from simpletune.models.shared.transformers_folder import ModelFolder
from simpletune.system.checksums import hash_content
from simpletune.system.console import say
from simpletune.system.extras import require_extra
from simpletune.system.hub import files_folder, is_hub_name
from simpletune.system.options import UserError
from simpletune.system.printable import first_line
from simpletune.system.regular_files import read_regular

MODEL, TAGS = "model.onnx", "selected_tags.csv"
RATING, CHARACTER = 9, 4  # categories of tags; 0 is general
THRESHOLD, CHARACTER_THRESHOLD = 0.35, 0.85
SIDE = 448  # of models that take any
TAGS_BYTES = 2**26


@dataclass(frozen=True)
class Tag:
    name: str  # as a caption has it
    category: int


@dataclass(frozen=True)
class TaggerInfo:
    """Tagger that is not loaded yet."""

    place: ModelFolder
    tags: tuple[Tag, ...]  # by output
    digest: str  # digest of both files

    @property
    def bytes(self) -> int:
        return (self.place.folder / MODEL).stat().st_size


@dataclass(frozen=True)
class TagChoice:
    """Which tags are written."""

    threshold: float = THRESHOLD  # least probability of a tag
    character: float = CHARACTER_THRESHOLD  # least probability of a character's name
    blacklist: frozenset[str] = frozenset()  # tags that are never written, in lower case

    def settings(self) -> dict[str, object]:
        """Return the choice in the form of the record; of the blacklist, which may be long, a digest."""
        listed = hashlib.sha256("\n".join(sorted(self.blacklist)).encode()).hexdigest()[:16]
        return {"threshold": self.threshold, "character_threshold": self.character, "blacklist": listed}

    def tags(self, tags: Sequence[Tag], probabilities: np.ndarray) -> list[str]:  # [tags]
        """Return the tags of a picture, the most probable first, without ratings."""
        chosen = []
        for index in np.argsort(-probabilities, kind="stable"):
            tag = tags[index]
            least = self.character if tag.category == CHARACTER else self.threshold
            if tag.category != RATING and probabilities[index] >= least and tag.name.lower() not in self.blacklist:
                chosen.append(tag.name)
        return chosen


def find_tagger(name: str) -> TaggerInfo | None:
    """Find a tagger by its folder or hub name, and read its tags; None if the model is no tagger. Raises UserError if
    the folder is incomplete or its list of tags damaged."""
    folder: Path | None = Path(name)
    if is_hub_name(name):
        folder = files_folder(name, (MODEL, TAGS))
    if folder is None or not folder.is_dir():
        return None
    has_model, has_tags = ((folder / file).is_file() for file in (MODEL, TAGS))
    if not has_tags and (not has_model or (folder / "config.json").is_file()):  # transformers' folders may hold ONNX
        return None
    place = ModelFolder(folder, "--model", "tagger")
    if not (has_model and has_tags):
        raise place.damaged(f"has {MODEL if has_model else TAGS} but no {TAGS if has_model else MODEL}")
    try:
        listed = read_regular(folder / TAGS, TAGS_BYTES)
        digest = hashlib.sha256(listed)
        hash_content(digest, folder / MODEL, [(0, (folder / MODEL).stat().st_size)])
    except OSError as error:
        raise place.damaged(f"cannot be read ({error.strerror})") from None
    return TaggerInfo(place, _read_tags(place, listed), digest.hexdigest()[:16])


def _read_tags(place: ModelFolder, listed: bytes) -> tuple[Tag, ...]:
    try:
        rows = csv.DictReader(io.StringIO(listed.decode("utf-8-sig"), newline=""))
        tags = tuple(Tag(plain_tag(row["name"]), int(row["category"])) for row in rows)
    except (UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError):
        raise place.damaged(f"has a {TAGS} without the columns name and category, a number") from None
    return tags


def plain_tag(name: str) -> str:
    """Replace underscores by spaces except in emoticons, which have no two letters or digits in a row: 0_0, >_<."""
    return name.replace("_", " ") if re.search(r"[^\W_]{2}", name) else name


def read_blacklist(text: str) -> frozenset[str]:
    """Read tags between commas, or a file's tags between commas or line breaks. A text with a comma names no file."""
    if "," not in text and os.path.isfile(text):  # False, too, for a text that is too long for a name
        try:
            text = read_regular(text, TAGS_BYTES).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--blacklist: {text} is no readable text ({error}). Give tags between commas") from None
    return frozenset(plain_tag(tag.strip()).lower() for tag in re.split(r"[,\n]", text) if tag.strip())


class Tagger:
    """A loaded tagger.

    Args:
        about: the tagger.
        choice: which tags are written.
        device: ``auto`` (a card if onnxruntime can use one), ``cuda`` or ``cpu``.

    Raises:
        UserError: onnxruntime is missing, cannot load the model or cannot use the card, or the model has other inputs
            or outputs than a tagger.
    """

    silent = "no tag reaches --threshold"

    def __init__(self, about: TaggerInfo, choice: TagChoice, device: str):
        require_extra("onnxruntime", "tags", "--model: a tagger needs")
        self.about = about
        self.choice = choice
        try:
            self._session = open_onnx(about.place.folder / MODEL, device)
        except ValueError as error:
            raise about.place.damaged(f"has a {MODEL} that onnxruntime cannot load ({error})") from None
        used = self._session.get_providers()[0]
        if device == "cuda" and used != CUDA:
            raise UserError(
                "--device cuda: onnxruntime finds no card. Install onnxruntime-gpu in its place, or use --device cpu"
            )
        say(f"device  {'cuda' if used == CUDA else 'cpu'} (onnxruntime {version('onnxruntime')})")
        self._input = self._session.get_inputs()[0]
        shape = self._input.shape
        if len(shape) != 4 or shape[3] != 3:
            raise about.place.damaged(
                f"has a {MODEL} whose input is {shape}, not pictures of 3 channels, the last axis"
            )
        self.side = shape[1] if isinstance(shape[1], int) else SIDE
        self._require_outputs(self._session.get_outputs()[0].shape[-1])

    def caption(self, images: Sequence[Image.Image], length: int) -> tuple[list[str], list[bool]]:
        """Write the tags of each RGB picture; none is cut off."""
        batch = np.stack([bgr_square(image, self.side) for image in images])  # [n, side, side, 3]
        try:
            (probabilities, *_) = self._session.run(None, {self._input.name: batch})  # [n, tags]
        except Exception as error:
            raise UserError(
                f"tags: onnxruntime failed ({first_line(error)}). Use --batch-size 1 or --device cpu"
            ) from None
        self._require_outputs(probabilities.shape[-1])
        return [", ".join(self.choice.tags(self.about.tags, row)) for row in probabilities], [False] * len(images)

    def _require_outputs(self, outputs: int | str) -> None:
        rows = len(self.about.tags)
        if isinstance(outputs, int) and outputs != rows:
            raise self.about.place.damaged(f"has {rows:,} tags in {TAGS}, and {MODEL} gives {outputs:,}")


def bgr_square(image: Image.Image, side: int) -> np.ndarray:  # [side, side, 3]
    """Pad a picture with white to a square and scale it: BGR, 0 to 255, as the published taggers were trained."""
    longest = max(image.size)
    padded = Image.new("RGB", (longest, longest), "white")
    padded.paste(image, ((longest - image.width) // 2, (longest - image.height) // 2))
    scaled = padded.resize((side, side), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(scaled, np.float32)[..., ::-1])
