"""A server's models: the base with its LoRAs, and optionally the full model that a run trained.

Both stay in memory if there is room; otherwise a request for one loads it in place of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from simpletune.adapters.files.attach import load_loras
from simpletune.adapters.methods.layers import ADAPTER, innermost_layer, move_updates, outer_layers, wrap
from simpletune.apps.serve.requests import BASE
from simpletune.config.schema import TrainConfig
from simpletune.engine.denoiser import Denoiser
from simpletune.runs.text_side import with_embeddings
from simpletune.runs.weights import BASE as BASE_WEIGHTS
from simpletune.runs.weights import Embedding, Weights, load_weights
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.modulation_plan import DetachedModulation
from simpletune.system.console import say
from simpletune.system.options import UserError
from simpletune.system.stage_timer import GIB

ROOM = 2  # a second model must fit this many times: generation and prompt encoding need memory too


@dataclass(frozen=True)
class ServedModels:
    """Models that a server offers by name besides ``base``."""

    loras: Mapping[str, Path] = field(default_factory=dict)  # files for the base
    tuned: tuple[str, Weights] | None = None  # a run's full model
    # by model; a name that is neither a LoRA's nor a full model's is the base with its embeddings
    embeddings: Mapping[str, tuple[Embedding, ...]] = field(default_factory=dict)
    common: tuple[Embedding, ...] = ()  # embeddings that every model but the base has

    @property
    def names(self) -> tuple[str, ...]:
        """All names, ``base`` first."""
        tuned = [self.tuned[0]] if self.tuned else []
        return (BASE, *dict.fromkeys([*tuned, *self.loras, *self.embeddings]))

    def weights_of(self, name: str, scale: float = 1.0) -> Weights:
        """Return the weights of a name, for its text side."""
        if self.tuned is not None and name == self.tuned[0]:
            weights = self.tuned[1]
        else:
            weights = Weights(name, lora=self.loras.get(name), scale=scale)
        weights = replace(weights, embeddings=self.embeddings.get(name, ()))
        return weights if name == BASE else with_embeddings(weights, self.common)


class Adapters:
    """LoRAs of one denoiser, which is changed in place; at most one is active at a time.

    A LoRA's layers wrap the base's layers. Switching it off puts the base's own layers back, so the base computes
    exactly as loaded, not with updates of zero."""

    def __init__(self, denoiser: nn.Module, files: Mapping[str, Path], device: torch.device):
        self.denoiser = denoiser
        self._base: dict[str, nn.Module] = {}
        # each LoRA's layers: path in the model, the layer that wraps the base's, the file's own strength
        self._layers: dict[str, list[tuple[str, Any, float]]] = {BASE: []}
        self._active = BASE
        for name, file in files.items():
            load_loras(denoiser, [(file, 1.0)])
            move_updates(denoiser, device)
            self._layers[name] = []
            for path, layer in outer_layers(denoiser):
                self._layers[name].append((path, layer, layer.scaling[ADAPTER]))
                self._base[path] = innermost_layer(layer)
                wrap(denoiser, path, self._base[path])
            if hasattr(denoiser, "peft_config"):
                del denoiser.peft_config  # PEFT's record of the adapter; the next one has the same name

    def use(self, name: str, scale: float) -> None:
        """Activate a LoRA, or with ``base`` none; at scale 1 it has the file's own strength."""
        if name != self._active:
            for path, _, _ in self._layers[self._active]:
                wrap(self.denoiser, path, self._base[path])
            for path, layer, _ in self._layers[name]:
                wrap(self.denoiser, path, layer)
            self._active = name
        for _, layer, own in self._layers[name]:
            layer.scaling[ADAPTER] = own * scale


class ResidentModel(NamedTuple):
    """A denoiser in memory, its modulation if detached, and its LoRAs."""

    denoiser: Denoiser
    modulation: DetachedModulation | None
    adapters: Adapters


class Models:
    """Load every model once at start, so that one that does not fit fails then, with a UserError. ``side`` is that of
    the largest picture in pixels; ``before_step`` is called before each pass through a denoiser."""

    def __init__(
        self,
        config: TrainConfig,
        served: ServedModels,
        device: torch.device,
        side: int,
        before_step: Callable[[], None],
    ):
        self.config = config
        self.served = served
        self.device = device
        self.side = side
        self._before_step = before_step
        self._loaded: dict[str, ResidentModel] = {}
        self._by_turns = False
        first = self._get(BASE)
        if served.tuned is None:
            return
        size = sum(each.nbytes for each in _tensors(first.denoiser).values() if each.device.type == device.type)
        free = free_model_bytes(device)
        self._by_turns = free < ROOM * size
        if self._by_turns:
            say(
                f"{served.tuned[0]} and the base do not fit in memory together, so each request loads the one it "
                f"needs: a second model of {size / GIB:.1f} GiB needs {ROOM * size / GIB:.1f} GiB free, "
                f"and {free / GIB:.1f} are"
            )
        del first
        tuned = self._get(served.tuned[0])
        if not self._by_turns and config.memory.resident_blocks is None:
            share_equal_tensors(self._loaded[BASE].denoiser, tuned.denoiser)

    def use(self, name: str, scale: float) -> tuple[Denoiser, DetachedModulation | None]:
        """Return a served name's denoiser, with its LoRA at a strength, and its modulation if detached."""
        own = self.served.tuned is not None and name == self.served.tuned[0]
        model = self._get(name if own else BASE)
        model.adapters.use(name if name in self.served.loras else BASE, scale)
        return model.denoiser, model.modulation

    def _get(self, name: str) -> ResidentModel:
        if name in self._loaded:
            return self._loaded[name]
        if self._by_turns:
            self._loaded.clear()
            free_memory(self.device)
        weights, loras = BASE_WEIGHTS, self.served.loras
        if name != BASE:
            assert self.served.tuned is not None
            weights, loras = self.served.tuned[1], {}
        denoiser, modulation = load_weights(self.config, weights, self.device, [(self.side, self.side)])
        try:
            adapters = Adapters(denoiser, loras, self.device)
        except UserError as error:
            if modulation is None:
                raise
            remedy = "memory.modulation=plan detached the modulation: for a LoRA on it use --modulation resident"
            raise UserError(f"{error}. {remedy}") from error
        denoiser.register_forward_pre_hook(lambda module, inputs: self._before_step())
        self._loaded[name] = ResidentModel(denoiser, modulation, adapters)
        return self._loaded[name]


def free_model_bytes(device: torch.device) -> int:
    """Return the memory available to a second model: of the GPU or of the host."""
    if device.type == "cuda":
        free_memory(device)
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def share_equal_tensors(model: nn.Module, other: nn.Module) -> None:
    """Share the tensors that are equal in two models: partial fine-tuning leaves most unchanged."""
    ours = _tensors(model)
    for path, tensor in _tensors(other).items():
        same = ours.get(path)
        if same is None or same.shape != tensor.shape or same.dtype != tensor.dtype or same.device != tensor.device:
            continue
        if torch.equal(same, tensor):
            tensor.data = same.data


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
