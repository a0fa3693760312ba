"""The model behind a server: one base, several LoRAs that are put in and taken out exactly, prompts kept in memory.

Only one thread may use it. Nothing here writes a file: neither prompts nor pictures of a request reach the disk.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import nn

from simpletune.adapters.lora_layers import ADAPTER, lora_layers
from simpletune.config.schema import TrainConfig
from simpletune.lora.attach import load_lora
from simpletune.models import Model
from simpletune.options import UserError
from simpletune.pipeline.encode import free_memory
from simpletune.pipeline.png import save_png
from simpletune.pipeline.sample import Embeddings, Sampler, draw
from simpletune.runs.weights import Weights, load_weights
from simpletune.serve.requests import BASE, ImageRequest
from simpletune.system.stage_timer import GIB, peak_rss_gib

MAX_PROMPTS = 64  # of SD3 Medium 2.7 MB each in bf16


class PromptCache:
    """Embeddings of the prompts that were used last.

    Each prompt goes through the encoders by itself, so its embedding does not depend on what else is waiting.

    Args:
        model: with folders resolved.
        dtype: the type in which encoders run.
        device: where they run.
    """

    def __init__(self, model: Model, dtype: torch.dtype, device: torch.device):
        self.prompts, self.device = model.prompts(dtype), device
        self._cached: OrderedDict[str, Embeddings] = OrderedDict()

    def fill(self, prompts: Iterable[str]) -> int:
        """Encode what is not there; each encoder is loaded once for all of them.

        Returns:
            How many prompts were encoded.
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
        """(prompt_embeds [t, e], pooled [p]) of a prompt that was filled in."""
        return self._cached[prompt]


class LoraLayer(NamedTuple):
    """One layer of a LoRA: where it belongs, PEFT's layer, and the file's own strength."""

    path: str
    layer: Any
    scaling: float


class Adapters:
    """LoRAs of one transformer, of which one or none is in it at a time.

    A LoRA's layers stand around the base's own layers. To switch it off they are taken out and the base's layers put
    back: what is left is the base as it was loaded, not a base with updates of zero.

    Args:
        transformer: loaded, changed in place.
        files: LoRA files by name.
        device: where it computes.
    """

    def __init__(self, transformer: nn.Module, files: Mapping[str, Path], device: torch.device):
        self.transformer = transformer
        self._base: dict[str, nn.Module] = {}
        self._layers: dict[str, list[LoraLayer]] = {BASE: []}
        self._active = BASE
        for name, file in files.items():
            self._read(name, file, device)

    def _read(self, name: str, file: Path, device: torch.device) -> None:
        load_lora(self.transformer, file)
        layers: list[LoraLayer] = []
        for path, layer in list(lora_layers(self.transformer)):
            for pair in (layer.lora_A, layer.lora_B):
                pair.to(device)  # beside streamed weights they were made on the host
            layers.append(LoraLayer(path, layer, layer.scaling[ADAPTER]))
            self._base[path] = layer.get_base_layer()
            _replace(self.transformer, path, self._base[path])
        if hasattr(self.transformer, "peft_config"):
            del self.transformer.peft_config  # PEFT's note that an adapter of this name is inside
        self._layers[name] = layers

    def use(self, name: str, scale: float) -> None:
        """Have this LoRA inside, at this strength, and no other.

        Args:
            name: of a LoRA, or ``base``.
            scale: 1 is the file's own strength.
        """
        if name != self._active:
            for path, _, _ in self._layers[self._active]:
                _replace(self.transformer, path, self._base[path])
            for path, layer, _ in self._layers[name]:
                _replace(self.transformer, path, layer)
            self._active = name
        for _, layer, own in self._layers[name]:
            layer.scaling[ADAPTER] = own * scale


def _replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


class ImageGenerator:
    """Generates images, one at a time.

    Args:
        config: with folders resolved.
        base: the weights under every LoRA.
        loras: files by name.
        device: where to.
        side: width and height of the largest picture, in pixels.

    Raises:
        UserError: weights are missing, or a LoRA does not fit the model.
    """

    def __init__(self, config: TrainConfig, base: Weights, loras: Mapping[str, Path], device: torch.device, side: int):
        self.config, self.device = config, device
        dtype = config.precision.encoder_dtype()
        self.transformer, self.modulation = load_weights(config, base, device, [(side, side)])
        try:
            self.adapters = Adapters(self.transformer, loras, device)
        except UserError as error:
            if self.modulation is None:
                raise
            remedy = "memory.modulation=plan has taken the modulation out: for a LoRA of it give --modulation resident"
            raise UserError(f"{error}. {remedy}") from error
        self.vae = config.model.load_vae(device, dtype, config.memory.vae_tile)
        self.text = PromptCache(config.model, dtype, device)
        self._check_cancelled: Callable[[], None] = lambda: None
        self.transformer.register_forward_pre_hook(lambda module, inputs: self._check_cancelled())

    def encode(self, prompts: Sequence[str]) -> None:
        """Have these prompts' embeddings in memory."""
        self.text.fill(prompts)

    def generate(self, image: ImageRequest, check_cancelled: Callable[[], None]) -> bytes:
        """Generate one image; its prompts are encoded if they are not cached.

        Args:
            image: what to generate.
            check_cancelled: called before every sampling step; what it raises ends the work.

        Returns:
            A PNG whose text chunks say how it was made.
        """
        check_cancelled()
        self.text.fill([image.request.prompt, image.request.negative_prompt])
        self.adapters.use(image.lora, image.scale)
        self._check_cancelled = check_cancelled
        try:
            sampler = Sampler(self.transformer, self.config.model, self.config.precision, self.modulation)
            pictures = draw(sampler, self.vae, self.config.model, [image.request], self.text.load)
        finally:
            self._check_cancelled = lambda: None
        return to_png(pictures[0], image, self.config.model.transformer or self.config.model.pretrained)

    def peak_bytes(self) -> dict[str, float]:
        """Peak memory so far, by kind."""
        peaks = {"process": peak_rss_gib() * GIB}
        if self.device.type == "cuda":
            peaks["device"] = float(torch.cuda.max_memory_allocated(self.device))
        return peaks


def to_png(picture: Image.Image, image: ImageRequest) -> bytes:
    """A PNG with the text chunks that ``simpletune generate`` writes."""
    label = BASE if image.lora == BASE else f"LoRA {image.lora} x {image.scale:g}"
    buffer = io.BytesIO()
    save_png(picture, buffer, image.request, weights=label)
    return buffer.getvalue()
