"""Share one base among several LoRAs: a comparison of ten strengths loads its weights once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch

from simpletune.adapters.files.attach import holds_hypernetwork, load_loras
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.methods.layers import detach, move_updates, rescale
from simpletune.config.schema import TrainConfig
from simpletune.models.shared.buckets import Size
from simpletune.models.shared.compile import compile_blocks
from simpletune.models.shared.denoiser import Denoiser
from simpletune.runs.weights import BASE, Weights, load_weights
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.modulation_plan import DetachedModulation


class SharedBase:
    """A transformer that is loaded once and used by itself or with one set of LoRAs at a time.

    Switching between LoRAs on one base replaces only the LoRA. To draw with the base, all LoRAs are detached, so it
    computes exactly as in a process that never loaded one. Other weights (a full model, a fused LoRA) are loaded when
    needed, after the previous ones are freed.
    """

    def __init__(self, config: TrainConfig, device: torch.device, sizes: Collection[Size], compiled: bool = False):
        self.config, self.device, self.sizes, self.compiled = config, device, sizes, compiled
        self._transformer: Denoiser | None = None
        self._modulation: DetachedModulation | None = None
        self._loaded: Weights | None = None
        self._active: Weights = BASE

    def use(self, weights: Weights) -> tuple[Denoiser, DetachedModulation | None]:
        """Return the transformer with these weights, and its modulation if it was detached. The transformer of an
        earlier call then has these weights too, or is freed."""
        base = self.base_of(weights)
        if self._transformer is None or base != self._loaded:
            self.free()
            self._transformer, self._modulation = load_weights(self.config, base, self.device, self.sizes)
            self._loaded, self._active = base, base
            if self.compiled:
                compile_blocks(self._transformer, self.device)
        if base != replace(BASE, label=""):
            pass  # loaded with their LoRAs
        elif weights.lora == self._active.lora and not (weights.more or self._active.more):
            rescale(self._transformer, weights.scale)
            self._active = weights
        else:
            detach(self._transformer)
            if weights.loras:
                load_loras(self._transformer, weights.loras)
                move_updates(self._transformer, self.device)
            self._active = weights
        return self._transformer, self._modulation

    def grouped_by_base(self, models: Iterable[Weights]) -> list[Weights]:
        """Reorder models so that those on one base are adjacent and no base is loaded twice."""
        bases: dict[Weights, list[Weights]] = {}
        for weights in models:
            bases.setdefault(self.base_of(weights), []).append(weights)
        return [weights for group in bases.values() for weights in group]

    def base_of(self, weights: Weights) -> Weights:
        """Return the weights to load before these can be applied; equal for all that can share a base."""
        shared = weights.lora is not None and not weights.merged
        if shared and self.config.memory.modulation == "plan":
            # Not for a LoRA that changes layers which the modulation plan detached from the transformer.
            # A hypernetwork changes no layer.
            is_conditioning = self.config.model.is_conditioning
            files = [file for file, _ in weights.loras if not holds_hypernetwork(file)]
            shared = not any(is_conditioning(layer) for file in files for layer in read_lora(file))
        return replace(BASE, label="") if shared else replace(weights, label="", short="", embeddings=())

    def free(self) -> None:
        self._transformer = self._modulation = self._loaded = None
        free_memory(self.device)
