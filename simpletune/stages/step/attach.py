"""Attach what trains to a loaded model, and build its optimizer."""

from __future__ import annotations

import torch

from simpletune.adapters.text.update import NAME, TextUpdate
from simpletune.config.schema import TrainConfig
from simpletune.engine.fsdp.fsdp_model import FsdpModel, held_parameters
from simpletune.engine.optim.in_backward import step_in_backward
from simpletune.engine.optim.loss_scale import LossScale
from simpletune.engine.optim.rounding import RoundedOptimizer
from simpletune.models.shared.compile import compile_training
from simpletune.models.shared.denoiser import Denoiser, model_device, model_units
from simpletune.system.console import say
from simpletune.system.options import plural


def attach(
    config: TrainConfig,
    denoiser: Denoiser,
    sizes: int = 1,
    scale: LossScale | None = None,
    text: TextUpdate | None = None,
    place: torch.device | None = None,
) -> torch.optim.Optimizer:
    """Attach the adapter to the loaded model, shard or wrap its blocks, and build the optimizer.

    Args:
        config: the run's configuration.
        denoiser: the loaded transformer.
        sizes: how many picture sizes the run has.
        scale: the loss scale, which updates in the backward pass must remove.
        text: what trains on the text side, which becomes a submodule of the transformer; None: nothing.
        place: the device on which the processes shard the weights; None: each process has all weights.
    """
    assert config.text.trains == (text is not None)
    config.adapter.attach(denoiser, config.train.seed)
    in_backward, blocks = config.memory.optimizer_in_backward, model_units(denoiser)
    config.precision.prepare(blocks)
    fsdp = None if place is None else FsdpModel(denoiser, blocks, place)
    device = model_device(denoiser)
    if config.speed.compile and compile_training(blocks, device, sizes):
        say(f"compile the blocks for {plural(sizes, 'picture size')}; the first step takes at least 30 s longer")
    trains, last = in_backward and config.adapter.trains_base, config.model.ends_with_feed_forward
    offloaded = config.memory.attach(blocks, device, trains, last)
    if text is not None:
        text.attach_lora(config.train.seed)
        denoiser.add_module(NAME, text)
    trained = held_parameters(denoiser)
    ratios, places = [lr_ratio(config, name) for name in trained], None if fsdp is None else fsdp.places
    optimizer = config.optimizer.build(trained.values(), in_backward, ratios, places)
    if in_backward:
        assert isinstance(optimizer, RoundedOptimizer)
        step_in_backward(optimizer, config.train.clip_norm, offloaded, scale)
    return optimizer


def lr_ratio(config: TrainConfig, name: str) -> float:
    """The factor on a trained parameter's learning rate, by its name in the model."""
    own = name.removeprefix(f"{NAME}.")
    return config.adapter.lr_ratio(name) if own == name else config.text.lr_ratio(own, config.optimizer.lr)
