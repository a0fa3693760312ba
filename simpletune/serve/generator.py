"""Generate a server's images: the models, the autoencoder, and a cache of encoded prompts in memory.

Only one thread may use it. It writes no files: neither prompts nor pictures of a request reach the disk.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from PIL import Image

from simpletune.config.schema import TrainConfig
from simpletune.families import Model
from simpletune.pipeline.encode import free_memory
from simpletune.pipeline.png import save_png
from simpletune.pipeline.sample import Embeddings, Sampler, draw
from simpletune.serve.models import Models, ServedModels
from simpletune.serve.requests import BASE, ImageRequest
from simpletune.system.stage_timer import GIB, peak_rss_gib

MAX_PROMPTS = 64  # SD3 Medium's take 2.7 MB each in bf16


class PromptCache:
    """Embeddings of the most recently used prompts.

    Each prompt is encoded alone, so its embedding does not depend on other requests.

    Args:
        model: with folders resolved.
        dtype: of the encoders.
        device: of the encoders.
    """

    def __init__(self, model: Model, dtype: torch.dtype, device: torch.device):
        self.prompts, self.device = model.prompts(dtype), device
        self._cached: OrderedDict[str, Embeddings] = OrderedDict()

    def fill(self, prompts: Iterable[str]) -> int:
        """Encode the prompts that are not cached; load each encoder once for all of them.

        Returns:
            The number of prompts that were encoded.
        """
        wanted = list(dict.fromkeys(prompts))[:MAX_PROMPTS]
        for prompt in wanted:
            if prompt in self._cached:
                self._cached.move_to_end(prompt)
        missing = [prompt for prompt in wanted if prompt not in self._cached]
        if not missing:
            return 0
        parts: dict[str, dict[str, Mapping[str, torch.Tensor]]] = {prompt: {} for prompt in missing}
        for encoder in self.prompts.encoders:
            outputs = self.prompts.encode(encoder, missing, self.device, batch_size=1)
            for prompt, output in zip(missing, outputs, strict=True):
                parts[prompt][encoder.name] = output
            free_memory(self.device)
        for prompt in missing:
            self._cached[prompt] = self.prompts.assemble(parts[prompt])
        while len(self._cached) > MAX_PROMPTS:
            self._cached.popitem(last=False)
        return len(missing)

    def load(self, prompt: str) -> Embeddings:
        """Return (prompt_embeds [t, e], pooled [p]) of a cached prompt."""
        return self._cached[prompt]


class ImageGenerator:
    """Generate images, one at a time.

    Args:
        config: with folders resolved.
        served: the models.
        device: to run on.
        side: width and height of the largest picture, in pixels.

    Raises:
        UserError: weights are missing, or a LoRA does not fit the model.
    """

    def __init__(self, config: TrainConfig, served: ServedModels, device: torch.device, side: int):
        self.config, self.served, self.device = config, served, device
        dtype = config.precision.encoder_dtype()
        self._check_cancelled: Callable[[], None] = lambda: None
        self.models = Models(config, served, device, side, lambda: self._check_cancelled())
        self.vae = config.model.load_vae(device, dtype, config.memory.vae_tile)
        self.text = PromptCache(config.model, dtype, device)

    def encode(self, prompts: Sequence[str]) -> None:
        """Encode prompts into the cache."""
        self.text.fill(prompts)

    def generate(self, image: ImageRequest, check_cancelled: Callable[[], None]) -> bytes:
        """Generate one image; its prompts are encoded if they are not cached.

        Args:
            image: to generate.
            check_cancelled: called before every sampling step; raises to stop the work.

        Returns:
            A PNG whose text chunks record how it was made.
        """
        check_cancelled()
        self.text.fill([image.request.prompt, image.request.negative_prompt])
        transformer, modulation = self.models.use(image.lora, image.scale)
        self._check_cancelled = check_cancelled
        try:
            config = self.config
            sampler = Sampler(transformer, config.model, config.precision, modulation, objective=config.objective)
            pictures = draw(sampler, self.vae, config.model, [image.request], self.text.load)
        finally:
            self._check_cancelled = lambda: None
        return to_png(pictures[0], image, self.config, self.served)

    def peak_bytes(self) -> dict[str, float]:
        """Return the peak memory so far, by kind."""
        peaks = {"process": peak_rss_gib() * GIB}
        if self.device.type == "cuda":
            peaks["device"] = float(torch.cuda.max_memory_allocated(self.device))
        return peaks


def to_png(picture: Image.Image, image: ImageRequest, config: TrainConfig, served: ServedModels) -> bytes:
    """Encode a PNG with the same text chunks as ``simpletune generate``."""
    model, loras, label = config.model.weights_from, [], image.lora
    if image.lora in served.loras:
        loras, label = [(image.lora, image.scale)], f"LoRA {image.lora} x {image.scale:g}"
    elif image.lora != BASE:
        model = image.lora
    buffer = io.BytesIO()
    save_png(picture, buffer, image.request, weights=label, model=model, loras=loras, sampler=config.objective.sampler)
    return buffer.getvalue()
