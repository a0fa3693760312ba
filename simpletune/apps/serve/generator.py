"""Generate a server's images: the models, the autoencoder, and a cache of encoded prompts in memory.

Only one thread may use it. It writes no files: neither prompts nor pictures of a request reach the disk.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from simpletune.adapters.text.encoding import TextEncoding, encode_prompts
from simpletune.adapters.text.side import TextSide
from simpletune.apps.serve.models import Models, ServedModels
from simpletune.apps.serve.requests import BASE, ServedImage
from simpletune.commands.generate.generate import base_loras
from simpletune.config.schema import TrainConfig
from simpletune.models.families import Model
from simpletune.models.shared.conditioning import Conditioning
from simpletune.runs.text_side import stand_ins_of, text_side_of
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.load import load_autoencoder
from simpletune.stages.png import save_png
from simpletune.stages.sample import Sampler, generate_images
from simpletune.system.stage_timer import GIB, peak_rss_gib

MAX_PROMPTS = 64  # SD3 Medium's take 2.7 MB each in bf16


class PromptCache:
    """Embeddings of the most recently used prompts, by prompt and by the text side that read them.

    Each prompt is encoded alone, so its embedding does not depend on other requests.
    """

    def __init__(self, model: Model, dtype: torch.dtype, device: torch.device):
        self.model = model
        self.dtype = dtype
        self.device = device
        self._cached: OrderedDict[tuple[str, str], Conditioning] = OrderedDict()

    def fill(self, prompts: Iterable[str], side: TextSide) -> None:
        """Encode the prompts that are not cached; load each encoder once for all of them."""
        wanted = list(dict.fromkeys(prompts))[:MAX_PROMPTS]
        for prompt in wanted:
            if (side.key, prompt) in self._cached:
                self._cached.move_to_end((side.key, prompt))
        missing = [prompt for prompt in wanted if (side.key, prompt) not in self._cached]
        if not missing:
            return
        found = encode_prompts(self.model, missing, self.device, self.dtype, side, lambda: free_memory(self.device))
        self._cached.update({(side.key, prompt): embeddings for prompt, embeddings in found.items()})
        while len(self._cached) > MAX_PROMPTS:
            self._cached.popitem(last=False)

    def load(self, prompt: str, side: TextSide) -> Conditioning:
        """Return the conditioning of a prompt that ``fill`` has encoded."""
        return self._cached[side.key, prompt]


class ImageGenerator:
    """Generate images of at most ``side`` pixels a side, one at a time. Raises UserError if weights are missing or a
    LoRA does not fit the model."""

    def __init__(self, config: TrainConfig, served: ServedModels, device: torch.device, side: int):
        self.config = config
        self.served = served
        self.device = device
        dtype = config.precision.encoder_dtype()
        self._check_cancelled: Callable[[], None] = lambda: None
        self.models = Models(config, served, device, side, lambda: self._check_cancelled())
        self.vae = load_autoencoder(config, device)
        self.text = PromptCache(config.model, dtype, device)
        self._stand_ins = stand_ins_of([served.weights_of(name) for name in served.names], config.text)
        self._sides: dict[tuple[str, float], TextSide] = {}
        for name in served.names:  # embeddings that do not fit the model fail now
            TextEncoding(config.model, dtype, text_side_of(served.weights_of(name), self._stand_ins))

    def encode(self, images: Sequence[ServedImage]) -> None:
        """Encode the prompts of images into the cache, each with the text side of its model."""
        wanted: dict[str, tuple[TextSide, list[str]]] = {}
        for image in images:
            side = self.side_of(image)
            wanted.setdefault(side.key, (side, []))[1].extend(image.request.texts)
        for side, prompts in wanted.values():
            self.text.fill(prompts, side)

    def side_of(self, image: ServedImage) -> TextSide:
        """Return the embeddings and the text encoders' updates that an image is generated with."""
        name, scale = image.lora, image.scale
        if (name, scale) not in self._sides:
            if len(self._sides) >= MAX_PROMPTS:
                self._sides.clear()
            self._sides[name, scale] = text_side_of(self.served.weights_of(name, scale), self._stand_ins)
        return self._sides[name, scale]

    def generate(self, image: ServedImage, check_cancelled: Callable[[], None]) -> bytes:
        """Generate one image, encoding its prompts if they are not cached. Calls ``check_cancelled`` before every
        sampling step, which raises to stop the work. Returns a PNG with the text chunks of ``simpletune generate``."""
        check_cancelled()
        side = self.side_of(image)
        self.text.fill(image.request.texts, side)
        denoiser, modulation = self.models.use(image.lora, image.scale)
        self._check_cancelled, config = check_cancelled, self.config
        try:
            sampler = Sampler(denoiser, config.model, config.precision, modulation, objective=config.objective)
            images = generate_images(
                sampler, self.vae, config.model, [image.request], partial(self.text.load, side=side)
            )
        finally:
            self._check_cancelled = lambda: None
        model, loras, label = config.model.files.weights_from, [], image.lora
        if image.lora in self.served.loras:
            loras, label = [(image.lora, image.scale)], f"LoRA {image.lora} x {image.scale:g}"
        elif image.lora in self.served.embeddings:
            label = f"embeddings {image.lora}"
        elif image.lora != BASE:
            model = image.lora
        png, sampled = io.BytesIO(), config.objective.sampler
        under = base_loras(config) if model == config.model.files.weights_from else {}
        save_png(images[0], png, image.request, weights=label, model=model, **under, loras=loras, sampler=sampled)
        return png.getvalue()

    def peak_bytes(self) -> dict[str, float]:
        """Return the peak memory so far, by kind."""
        peaks = {"process": peak_rss_gib() * GIB}
        if self.device.type == "cuda":
            peaks["device"] = float(torch.cuda.max_memory_allocated(self.device))
        return peaks
