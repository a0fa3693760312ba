"""A run's result and checkpoints as files to take home: as the run wrote them, or converted in a separate process.

A conversion is made once, into ``runs/.web/downloads``, and again only when the file it is of has changed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from simpletune.adapters.files.header import open_lora
from simpletune.adapters.methods.adapter import OUTPUT
from simpletune.apps.web import processes
from simpletune.apps.web.roots import Roots
from simpletune.apps.web.run_state import file_stamp
from simpletune.runs.checkpoint_folders import checkpoint_folder
from simpletune.system.atomic import remove
from simpletune.system.options import UserError

DOWNLOADS = "downloads"
COMFYUI, AS_WRITTEN, HYPERNETWORK = "comfyui", "as-written", "a1111"
FORMATS = {"kohya": "kohya (ComfyUI, Forge)", "comfy": "ComfyUI's own names", "diffusers": "diffusers"}
"""Layouts of LoRA and DoRA."""
NOT_COMFYUI = ("diffusers", "peft")  # layouts of runs that Forge, or an older ComfyUI, does not load
LONGEST, PAUSE = 600.0, 0.1  # seconds of a conversion, and between two looks at it


@dataclass(frozen=True)
class ResultFile:
    """A run's result, or the LoRA of a checkpoint, in a format."""

    roots: Roots
    run: Path
    step: int | None  # of a checkpoint; None: the result
    format: str  # one of ``FORMATS``, ``COMFYUI``: what that loads, or ``AS_WRITTEN``
    method: str  # adapter.method

    @cached_property
    def source(self) -> Path | None:
        """The file that the run wrote; None without it."""
        place = Path() if self.step is None else checkpoint_folder(Path(), self.step)
        return self.roots.find_inside(self.run, str(place / OUTPUT))

    @cached_property
    def layout(self) -> str:
        """The layout of the run's file; empty without it, or if it is damaged or has none."""
        return "" if self.source is None else _layout_of(self.source, file_stamp(self.source))

    @property
    def converts_to(self) -> str | None:
        """The format of ``lora export`` that it takes; None: the run's file is what is wanted."""
        if self.format == AS_WRITTEN or self.format == self.layout:
            return None
        if self.format != COMFYUI:
            return self.format
        if self.method == "hypernetwork":
            return HYPERNETWORK
        return "kohya" if self.layout in NOT_COMFYUI else None

    @property
    def name(self) -> str:
        """The name under which it is saved: the run's, with step and format unless it is the one for ComfyUI."""
        about = "" if self.format == COMFYUI else f"{'' if self.step is None else f'-step-{self.step}'}-{self.format}"
        return f"{processes.plain_name(self.run.name)}{about}{self._suffix}"

    @property
    def _suffix(self) -> str:
        return ".pt" if self.converts_to == HYPERNETWORK else ".safetensors"

    @property
    def file(self) -> Path | None:
        """The file to send; it exists unless it has yet to be converted. None if the run has none."""
        if self.source is None or self.converts_to is None:
            return self.source
        stamp = hashlib.sha256(str(file_stamp(self.source)).encode()).hexdigest()[:12]
        # its stem goes into the file's header as the name of the LoRA
        return self._folder / f"{self._kind}-{stamp}" / f"{processes.plain_name(self.run.name)}{self._suffix}"

    @property
    def _folder(self) -> Path:
        return self.roots.own / DOWNLOADS / processes.job_name("run", self.run.name)

    @property
    def _kind(self) -> str:
        return f"{'result' if self.step is None else self.step}-{self.converts_to}"

    def ready(self) -> Path:
        """Return the file to send, after converting it if need be. Raises UserError if there is none, or it fails."""
        file = self.file
        if file is None:
            of = "result" if self.step is None else f"checkpoint of step {self.step:,}"
            raise UserError(f"{self.run.name} has no file of its {of}")
        if not file.is_file():
            self._convert(file)
        return file

    def _convert(self, file: Path) -> None:
        for old in self._folder.glob(f"{self._kind}-*"):  # of a file that has changed since
            remove(old)
        file.parent.mkdir(parents=True, exist_ok=True)
        weights = f"{self.run}@{self.step}" if self.step is not None else str(self.run)
        words = ["lora", "export", weights, "--format", str(self.converts_to), "--out", str(file), "--overwrite"]
        name = processes.job_name(f"file-{self._kind}", self.run.name)
        try:
            processes.start(self.roots, words, name, title=f"The conversion of {self.run.name}")
        except UserError:
            if not processes.is_running(self.roots, name):
                raise  # else another page was faster: wait for that one
        limit = time.monotonic() + LONGEST
        while processes.is_running(self.roots, name) and time.monotonic() < limit:
            time.sleep(PAUSE)
        if not file.is_file():
            why = processes.last_error(self.roots, name) or "it printed nothing"
            raise UserError(f"The file could not be converted: {why}")


@lru_cache(maxsize=256)
def _layout_of(file: Path, stamp: Hashable) -> str:
    """Return a LoRA file's layout; empty if it is damaged or has none."""
    try:
        return open_lora(file).layout_name or "unknown"
    except (UserError, OSError):
        return ""
