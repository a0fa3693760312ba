"""Draw a run's pictures without the LoRAs that are used only while training (``model.loras``, training:).

Their layers get the weights of the base without them, read again from its files and quantised, and then those with
them: no memory but one layer's, and the same bits as a base that is loaded so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from simpletune.config.schema import TrainConfig
from simpletune.engine.denoiser import Denoiser, quantised_layer, quantised_layers
from simpletune.engine.memory.machine_weights import is_shared
from simpletune.engine.tensors import own_tensors, set_tensor, to_device
from simpletune.models.shared.weights import put_module
from simpletune.runs.stack import Stack, read_stack, without_assistants
from simpletune.system.options import UserError


class Assistant:
    """The LoRAs that are used only while training, in a loaded base that nothing has changed yet.

    Args:
        config: with folders resolved.
        denoiser: the base, with them.
        device: where it computes.
        processes: how many train.

    Raises:
        UserError: the weights cannot be exchanged.
    """

    def __init__(self, config: TrainConfig, denoiser: Denoiser, device: torch.device, processes: int):
        whole = read_stack(config)
        assert whole is not None
        self.config, self.device, self._with = config, device, whole
        self._without = read_stack(without_assistants(config))
        marked = (
            updates for (updates, _), about in zip(whole.loras, whole.about, strict=True) if "only_training" in about
        )
        # The modules themselves: an adapter wraps them, and a modulation plan takes them out.
        self.layers = {layer: denoiser.get_submodule(layer) for updates in marked for layer in updates}
        shared = any(is_shared(tensor) for module in self.layers.values() for _, tensor in own_tensors(module))
        if processes > 1 and (shared or config.train.uses_fsdp(processes)):
            raise UserError(
                f"{config.model.assistants[0]}: validation pictures are drawn without it, but its layers' weights are "
                "shared by several processes. Use one process, or validation.prompts []"
            )

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Take them out of the base for the duration of this context."""
        self._fill(without_assistants(self.config), self._without)
        try:
            yield
        finally:
            self._fill(self.config, self._with)

    @torch.no_grad()
    def _fill(self, config: TrainConfig, stack: Stack | None) -> None:
        """Write the weights of a base with these LoRAs into the layers, as ``fill_model`` makes them."""
        model, precision = config.model, config.precision
        empty = model.architecture.empty_model(model.files.known_config())
        source, quantised = model.base_tensors(stack), quantised_layers(empty, precision)
        for name, live in self.layers.items():
            fresh: nn.Module = copy.deepcopy(empty.get_submodule(name))
            dtype = None if name in quantised else precision.compute_dtype()
            for own, _ in own_tensors(fresh):
                set_tensor(fresh, own, to_device(source.get(f"{name}.{own}"), self.device, dtype))
            put_module(empty, name, fresh)
            if name in quantised:
                fresh = quantised_layer(empty, name, precision)
            for (_, old), (_, new) in zip(own_tensors(live), own_tensors(fresh), strict=True):
                old.copy_(new)
            put_module(empty, name, nn.Identity())  # frees it
