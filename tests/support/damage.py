"""Damage a run's files, for tests and ``make torture``, as a disk, a full quota or a person may."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.tiny_models import tiny_sd3
from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.data.demo import demo_scenes
from simpletune.runs import checkpoint
from simpletune.system.atomic import remove
from simpletune.training.train import train

STEPS = 6

_UNREADABLE: set[str] = set()


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if _UNREADABLE and event in ("open", "os.listdir", "os.scandir") and str(arguments[0]) in _UNREADABLE:
        raise PermissionError(13, "Permission denied", str(arguments[0]))


sys.addaudithook(_refuse)  # root may read everything, whatever its mode


def delete(file: Path, draw: random.Random) -> None:
    """Delete the file."""
    shutil.rmtree(file) if file.is_dir() else file.unlink()


def empty(file: Path, draw: random.Random) -> None:
    """Truncate it to no bytes."""
    file.write_bytes(b"")


def one_byte(file: Path, draw: random.Random) -> None:
    """Truncate it to its first byte."""
    file.write_bytes(file.read_bytes()[:1])


def byte(file: Path, draw: random.Random) -> None:
    """Change one of its bytes."""
    data = bytearray(file.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
    file.write_bytes(data)


def digit(file: Path, draw: random.Random) -> None:
    """Change one of its digits."""
    data = bytearray(file.read_bytes())
    places = [place for place, value in enumerate(data) if chr(value).isdigit()]
    if places:
        place = draw.choice(places)
        data[place] = ord(draw.choice([new for new in "0123456789" if ord(new) != data[place]]))
    file.write_bytes(data)


def folder(file: Path, draw: random.Random) -> None:
    """Replace it by a folder with a file in it."""
    delete(file, draw)
    file.mkdir()
    (file / "inside").write_text("x")


def link(file: Path, draw: random.Random) -> None:
    """Replace it by a dangling link."""
    delete(file, draw)
    file.symlink_to(file.with_name("nowhere"))


def other_kind(file: Path, draw: random.Random) -> None:
    """Replace a folder by a file."""
    delete(file, draw)
    file.write_text("x")


@contextmanager
def unreadable(file: Path) -> Iterator[None]:
    """Forbid reading and writing it within this context."""
    _UNREADABLE.add(str(file))
    try:
        yield
    finally:
        _UNREADABLE.discard(str(file))


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "deleted": delete, "empty": empty, "one byte": one_byte, "byte": byte, "digit": digit, "folder": folder,
    "link": link,
}  # fmt: skip
OF_FOLDERS: dict[str, Callable[[Path, random.Random], None]] = {"deleted": delete, "a file": other_kind, "link": link}
CODES = {0, 2, 3, 4, 5, 6, 130, 143}  # docs/how-to/continue-a-run.md


class Place:
    """A finished run; each test damages a copy of it."""

    def __init__(self, folder: Path, data: dict[str, Any]):
        self.folder, self.data = folder, data
        self.file = folder / "config.json"
        self.file.write_text(json.dumps(data))
        self.run = Path(data["output"]["runs"]) / data["name"]

    def copied(self, folder: Path) -> Place:
        """Copy it to another folder."""
        shutil.copytree(self.folder, folder, symlinks=True)
        output = {**self.data["output"], "runs": str(folder / "runs"), "profiles": str(folder / "profiles")}
        return Place(folder, {**self.data, "output": output})

    def stopped(self) -> Place:
        """Turn it into a run that was killed after step 4."""
        remove(checkpoint.checkpoint_folder(self.run, STEPS))
        for name in ("summary.json", "pytorch_lora_weights.safetensors", "README.md", "report.html", "report.md"):
            (self.run / name).unlink()
        return self

    def checkpoint(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return checkpoint.checkpoint_folder(self.run, step)

    def resume(self, *overrides: str) -> int:
        """``train --resume auto``; its exit code."""
        return main(["train", str(self.file), "--resume", "auto", *overrides])

    def weights(self) -> dict[str, torch.Tensor]:
        """What the run trained."""
        return load_file(self.checkpoint(STEPS) / checkpoint.TRAINABLE)


def make_origin(folder: Path) -> Place:
    """A finished run with checkpoints of steps 2, 4 and 6, and the model, pictures and cache that it needs."""
    inputs, home = folder / "inputs", folder / "origin"
    home.mkdir()
    tiny_sd3.build(inputs / "pipeline", replace(tiny_sd3.MINIMAL, layers=1), seed=1, dtype="fp32")
    demo_scenes.write_folder(inputs / "pictures", demo_scenes.sample_scenes(6, seed=3, style="flat"), seed=3, pixels=32)
    data = {
        "name": "t", "device": "cpu",
        "model": {"pretrained": str(inputs / "pipeline"), "t5_length": 8},
        "data": {"path": str(inputs / "pictures"), "resolution": 32},
        "adapter": {"method": "lora", "rank": 2}, "precision": {"weights": "fp32"}, "optimizer": {"lr": 0.01},
        "train": {"steps": STEPS}, "checkpoint": {"every": 2, "keep_last": 3},
        "validation": {"prompts": ["a disc"], "steps": 1, "loss_samples": 1, "every": 4},
        "profile": {"max_traces": 0}, "tracking": {"tensorboard": False},
        "output": {"runs": str(home / "runs"), "profiles": str(home / "profiles"), "cache": str(inputs / "cache")},
    }  # fmt: skip
    place = Place(home, data)
    train(validate(data, "test"))
    return place


def changed_state(text: bytes, draw: random.Random, kind: str) -> bytes:
    """A text with one bit or one digit changed."""
    data = bytearray(text)
    if kind == "bit":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    else:
        place = draw.choice([found.start() for found in re.finditer(rb"\d", data)])
        data[place] = ord(draw.choice([new for new in "0123456789" if ord(new) != data[place]]))
    return bytes(data)


def commands(place: Place) -> dict[str, list[str]]:
    """Command lines that read the run."""
    draw = ["--steps", "1", "--prompt", "a disc", "--device", "cpu"]
    run = str(place.run)
    return {
        "train": ["train", str(place.file), "--resume", "auto"],
        "report": ["report", run],
        "generate": ["generate", "--run", run, *draw],
        "export": ["export", run, "--format", "kohya", "--out", str(place.folder / "exported.safetensors")],
        "compare": ["compare", "--run", run, *draw, "--output", str(place.folder / "compared")],
    }


def targets(place: Place) -> list[str]:
    """Everything in the run's folder, and its lock, as seen from ``runs``."""
    return sorted(str(entry.relative_to(place.run.parent)) for entry in place.run.parent.rglob("*"))


def damage(place: Place, target: str, kind: str, seed: object = 0) -> None:
    """Damage a file of a run, except by ``unreadable``, which ``answer`` does."""
    entry = place.run.parent / target
    if kind != "unreadable":
        (OF_FOLDERS if entry.is_dir() else DAMAGES)[kind](entry, random.Random(f"{target} {kind} {seed}"))


def answer(place: Place, command: str, hidden: Path | None = None) -> tuple[int, str]:
    """Run a command; return its exit code, and what is wrong with its reaction; empty: nothing.

    Args:
        place: of the run.
        command: of ``commands``.
        hidden: file that cannot be read meanwhile.
    """
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said), unreadable(hidden) if hidden else nullcontext():
        try:
            code = main(commands(place)[command])
        except SystemExit as error:
            code = int(error.code or 0)
        except Exception as error:  # what the user would see as a traceback
            return 1, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if code not in CODES:
        return code, f"exit code {code}"
    return code, "" if code == 0 or "error: " in said.getvalue() else "no message"


def is_alike(place: Place, origin: Place) -> bool:
    """Whether a run trained the same weights as another, bit for bit, and exported them."""
    pairs = [(each.weights(), load_file(each.run / "pytorch_lora_weights.safetensors")) for each in (place, origin)]
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(*pairs, strict=True)
    )
