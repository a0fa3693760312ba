"""Show what a run has changed: pictures of base and tuned model from the same noise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import chain, count
from pathlib import Path
from typing import TypeVar

import torch
from PIL import Image

from simpletune.adapters.methods.layers import at_strength
from simpletune.config.schema import TrainConfig
from simpletune.engine.denoiser import Denoiser, model_device
from simpletune.models.shared.conditioning import Conditioning
from simpletune.runs.folder import BASE, START, STRENGTHS, pictures_at
from simpletune.runs.repair import set_aside
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.load import load_autoencoder
from simpletune.stages.png import comparison_key, generation_parameters, request_values, save_png
from simpletune.stages.sample import ImageRequest, Sampler, generate_images, shown_inputs
from simpletune.stages.step.attention import use_attention
from simpletune.stages.step.train_step import TrainStep
from simpletune.stages.step.variant import restore_base
from simpletune.stages.text_cache import TextCache
from simpletune.system.atomic import atomic_file, atomic_folder, remove
from simpletune.system.console import detail, progress, say
from simpletune.system.sheets import grid, spread_steps

GRID = "grid.png"
STRIP = "strengths.png"
COLUMNS = 12
"""Steps in the grid, evenly spread from the first to the last: the memory that it takes must not grow with the run."""
INPUT = "input"
T = TypeVar("T")


class Previews:
    """Generates validation pictures into ``samples/``: ``base/`` and one folder per step.

    Args:
        folder: the run's ``samples`` folder.
        core: step core, with the trained text side and the modulation that was removed from the denoiser, if any.
    """

    def __init__(
        self,
        config: TrainConfig,
        requests: list[ImageRequest],
        text: TextCache,
        folder: Path,
        core: TrainStep | None = None,
    ):
        self.config, self.requests, self.text, self.folder = config, requests, text, folder
        self.core, self.modulation = core, None if core is None else core.modulation
        self._unreadable: set[Path] = set()
        self._asked: dict[tuple[Path, int], str] = {}  # what pictures were asked to be, by file and time

    def folder_of(self, step: int) -> Path:
        """Return the folder of the pictures after ``step`` steps, 0: of the LoRA that training begins with."""
        return self.folder / (f"step-{step:06d}" if step else START)

    def generate(self, denoiser: Denoiser, step: int) -> None:
        """Generate with the model after ``step`` steps, 0: with the LoRA that training begins with."""
        if not self.requests:
            return
        drawn = {1: self.images(denoiser, self.requests)}  # by strength
        for strength in STRENGTHS if self.config.concept is not None and step else ():
            if strength not in (0, 1):  # of the base, and without a strength
                with at_strength(denoiser, strength):
                    drawn[strength] = self.images(denoiser, self.requests)
        self._write_inputs()
        state = f"step {step}" if step else START
        with atomic_folder(self.folder_of(step)) as part:
            for strength, images in drawn.items():
                folder = part if strength == 1 else part / pictures_at(self.folder, step, strength).name
                named = state if strength == 1 else f"{state}, strength {strength}"
                for number, (image, request) in enumerate(zip(images, self.requests, strict=True)):
                    save_png(image, folder / name_of(number), request, **self._metadata(request, named))

    def generate_base(self, denoiser: Denoiser, step: int) -> None:
        """Generate the pictures of the base that are not there: all before the first step; later those that are lost or
        of other requests, unless the base itself is trained."""
        adapter, folder = self.config.adapter, self.folder / BASE
        if not step:
            remove(folder)  # of a start that was ended before its first checkpoint
        lacking = [number for number, file in enumerate(self._find(folder)) if file is None]
        if not lacking or (step and adapter.trains_base):
            return
        with nullcontext() if adapter.trains_base else restore_base(adapter, denoiser):
            images = self.images(denoiser, [self.requests[number] for number in lacking])
        self._write_inputs()
        folder.mkdir(parents=True, exist_ok=True)
        # Each takes a free name: a checkpoint knows the checksums of those that are there.
        taken = {file.name for file in folder.iterdir()}
        for image, number in zip(images, lacking, strict=True):
            name = next(name for name in map(name_of, chain([number], count())) if name not in taken)
            taken.add(name)
            request = self.requests[number]
            with atomic_file(folder / name) as part:
                save_png(image, part, request, **self._metadata(request, BASE))

    def _metadata(self, request: ImageRequest, state: str) -> dict[str, object]:
        """Return a validation picture's metadata besides its request: with a digest of what it paints into, if
        anything."""
        shown = shown_inputs(request)
        pixels = b"".join(image.tobytes() for image in shown.values())
        return {**self.about(state), **({"inputs": hashlib.sha256(pixels).hexdigest()[:16]} if shown else {})}

    @cached_property
    def _keys(self) -> list[tuple[str, str]]:
        """What each request asks for, with a digest of what it paints into, and as version 0.1.0 recorded it."""
        recorded = [(request_values(request), request) for request in self.requests]
        return [
            (comparison_key({**how, **self._metadata(request, "")}), comparison_key(how)) for how, request in recorded
        ]

    def _find(self, folder: Path) -> list[Path | None]:
        """Return a state's picture of each request; None: it has none of exactly this request. Sets damaged ones
        aside."""
        known: dict[str, Path] = {}
        for file in sorted(folder.glob("prompt-*.png")):
            stamp = file, file.stat().st_mtime_ns  # reading how it was generated decodes it
            if stamp not in self._asked and (how := self._read(file, generation_parameters)) is not None:
                self._asked[stamp] = comparison_key(how)
            if stamp in self._asked:
                known.setdefault(self._asked[stamp], file)
        return [next((known[key] for key in keys if key in known), None) for keys in self._keys]

    def _read(self, file: Path, read: Callable[[Path], T]) -> T | None:
        """Read a picture, or about it. None: it is damaged, and set aside, or cannot be read, which is said once."""
        try:
            return read(file)
        except (OSError, SyntaxError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                if file not in self._unreadable:
                    self._unreadable.add(file)
                    say(f"warning {file} cannot be read ({error.strerror}); the sheet is drawn without it")
            else:
                set_aside(file, "is damaged")
        return None

    def _write_inputs(self) -> None:
        """Write what is painted into, for inpainting: ``input/picture-NN.png`` and ``mask-NN.png``."""
        shown = list(enumerate(map(shown_inputs, self.requests)))
        if not any(inputs for _, inputs in shown):
            return
        with atomic_folder(self.folder / INPUT) as part:
            for number, inputs in shown:
                for name, image in inputs.items():
                    image.save(part / f"{name}-{number:02d}.png")

    def about(self, state: str) -> dict[str, str]:
        """Return a picture's metadata besides its request."""
        return {"run": self.config.name, "weights": state, "sampler": self.config.objective.sampler}

    def images(self, denoiser: Denoiser, requests: Sequence[ImageRequest]) -> list[Image.Image]:
        """Generate pictures of requests with encoded prompts; leaves denoiser and device as they were."""
        device = model_device(denoiser)
        was_training = denoiser.training
        denoiser.eval()
        config = self.config
        kernel = partial(use_attention, config.speed.attention)
        free_memory(device)  # training leaves torch's cache fragmented, and these stages may not fit into the fragments
        drawn_with = nullcontext() if self.core is None else self.core.base_to_draw()
        with drawn_with, progress("drawing", len(requests), "pictures", detail) as advance:
            vae = load_autoencoder(config, device)
            try:
                sampler = Sampler(
                    denoiser,
                    config.model,
                    config.precision,
                    self.modulation,
                    attention=kernel,
                    objective=config.objective,
                    drawn=advance,
                )
                return generate_images(sampler, vae, config.model, requests, self.load)
            finally:
                del vae
                free_memory(device)
                denoiser.train(was_training)

    @torch.no_grad()
    def load(self, prompt: str) -> Conditioning:
        """Load the conditioning of one prompt, passed through the trained text side."""
        cached = self.text.load(prompt)
        text, inputs = None if self.core is None else self.core.text, self.text.inputs([prompt])
        if self.core is None or text is None or inputs is None:
            return cached
        device = self.core.device
        on_device = inputs.map(lambda tensor: tensor.to(device))
        updated: Conditioning = text(cached.map(lambda tensor: tensor[None].to(device)), on_device)
        return updated.map(lambda tensor: tensor[0])

    def write_grid(self) -> Path | None:
        """Write one picture with a row per prompt and a column per state, of at most ``COLUMNS`` steps. A cell is empty
        where a state has no picture of exactly the row's request."""
        if not self.requests:
            return None
        columns: list[tuple[str, list[Image.Image | None]]] = []
        found = {state: self._find(state) for state in sorted(self.folder.glob("step-*"))}
        steps = spread_steps([state for state, files in found.items() if any(files)], COLUMNS)
        for state in (self.folder / BASE, self.folder / START, *steps):
            files = found[state] if state in found else self._find(state)
            cells = [None if file is None else self._read(file, load_image) for file in files]
            if any(cells):
                title = state.name if state.name in (BASE, START) else f"step {int(state.name[5:])}"
                columns.append((title, cells))
        rows = [
            (
                f"{request.prompt}  (seed {request.seed})",
                [*shown_inputs(request).values(), *(cells[number] for _, cells in columns)],
            )
            for number, request in enumerate(self.requests)
        ]
        file = self.folder / GRID
        grid(rows, [*shown_inputs(self.requests[0]), *(title for title, _ in columns)]).save(file)
        return file

    def write_strip(self, step: int) -> Path | None:
        """Write one picture with a row per prompt and a column per strength, for a slider."""
        if not self.requests or self.config.concept is None:
            return None
        columns = [self._find(pictures_at(self.folder, step, strength)) for strength in STRENGTHS]
        rows = [
            (
                f"{request.prompt}  (seed {request.seed})",
                [None if (file := column[number]) is None else self._read(file, load_image) for column in columns],
            )
            for number, request in enumerate(self.requests)
        ]
        file = self.folder / STRIP
        grid(rows, [f"strength {strength}" for strength in STRENGTHS]).save(file)
        return file


def name_of(number: int) -> str:
    """Return the file of a validation picture."""
    return f"prompt-{number:02d}.png"


def load_image(file: Path) -> Image.Image:
    """Load a whole picture into memory. Raises OSError, SyntaxError or ValueError if the file is damaged."""
    with Image.open(file) as image:
        return image.convert("RGB")
