"""Show what a run has changed: pictures of base and tuned model from the same noise."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from simpletune.config.schema import TrainConfig
from simpletune.models.shared.denoiser import Denoiser, model_device
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.png import save_png
from simpletune.stages.sample import PictureRequest, Sampler, generate_pictures, shown_inputs
from simpletune.stages.step.attention import attention_by
from simpletune.stages.step.train_step import TrainStep
from simpletune.stages.step.variant import untrained
from simpletune.stages.text_cache import TextCache
from simpletune.system.atomic import atomic_folder
from simpletune.system.sheets import grid

BASE = "base"
GRID = "grid.png"
INPUT = "input"


class Previews:
    """Draws validation pictures into ``samples/``: ``base/`` and one folder per step.

    Args:
        folder: the run's ``samples`` folder.
        core: step core, with the trained text side and the modulation that was removed from the transformer, if any.
    """

    def __init__(
        self,
        config: TrainConfig,
        requests: list[PictureRequest],
        text: TextCache,
        folder: Path,
        core: TrainStep | None = None,
    ):
        self.config, self.requests, self.text, self.folder = config, requests, text, folder
        self.core, self.modulation = core, None if core is None else core.modulation

    def folder_of(self, step: int) -> Path:
        """The folder of the pictures after ``step`` steps, 0: of the base's."""
        return self.folder / (f"step-{step:06d}" if step else BASE)

    def draw(self, denoiser: Denoiser, step: int) -> None:
        """Draw with the model after ``step`` steps; at step 0 with the base, which full fine-tuning changes later."""
        if not self.requests:
            return
        adapter = self.config.adapter
        with untrained(adapter, denoiser) if step == 0 and not adapter.trains_base else nullcontext():
            pictures = self.pictures(denoiser, self.requests)
        self._write_inputs()
        about = self.about(f"step {step}" if step else BASE)
        with atomic_folder(self.folder_of(step)) as part:  # the grid needs all pictures of a step
            for number, (picture, request) in enumerate(zip(pictures, self.requests, strict=True)):
                save_png(picture, part / f"prompt-{number:02d}.png", request, **about)

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

    def pictures(self, denoiser: Denoiser, requests: Sequence[PictureRequest]) -> list[Image.Image]:
        """Draw requests with encoded prompts; leaves transformer and device as they were."""
        device = model_device(denoiser)
        was_training = denoiser.training
        denoiser.eval()
        config = self.config
        kernel = partial(attention_by, config.speed.attention)
        sampler = Sampler(
            denoiser, config.model, config.precision, self.modulation, attention=kernel, objective=config.objective
        )
        free_memory(device)  # training leaves torch's cache fragmented, and these stages may not fit into the fragments
        vae = config.model.load_vae(device, config.model.autoencoder_dtype(config.precision), config.memory.vae_tile)
        try:
            return generate_pictures(sampler, vae, config.model, requests, self.load)
        finally:
            del vae
            free_memory(device)
            denoiser.train(was_training)

    @torch.no_grad()
    def load(self, prompt: str) -> tuple[Tensor, Tensor]:
        """Load (prompt_embeds [t, e], pooled [p]) of one prompt, passed through the trained text side."""
        embeds, pooled = self.text.load(prompt)
        text, inputs = None if self.core is None else self.core.text, self.text.inputs([prompt])
        if self.core is None or text is None or inputs is None:
            return embeds, pooled
        device = self.core.device
        on_device = inputs.map(lambda tensor: tensor.to(device))
        (embeds,), (pooled,) = text(embeds[None].to(device), pooled[None].to(device), on_device)
        return embeds, pooled

    def write_grid(self) -> Path | None:
        """Write one picture with a row per prompt and a column per state."""
        if not self.requests:
            return None
        drawn = [f"prompt-{number:02d}.png" for number in range(len(self.requests))]
        states = [self.folder / BASE, *sorted(self.folder.glob("step-*"))]
        states = [state for state in states if all((state / name).is_file() for name in drawn)]
        rows: list[tuple[str, list[Image.Image]]] = []
        for number, request in enumerate(self.requests):
            images = [*shown_inputs(request).values()]
            images += [Image.open(state / f"prompt-{number:02d}.png") for state in states]
            rows.append((f"{request.prompt}  (seed {request.seed})", images))
        file = self.folder / GRID
        titles = [*shown_inputs(self.requests[0])]
        titles += [BASE if state.name == BASE else f"step {int(state.name[5:])}" for state in states]
        grid(rows, titles).save(file)
        return file
