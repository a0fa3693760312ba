"""Explain why a run ended early: a full device, with the options that would save most; the compiler; a stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from simpletune.config.schema import TrainConfig
from simpletune.engine.compile import compiler_error as compiling_failed
from simpletune.engine.tensors import plain_tensors, trained_parameters
from simpletune.runs.checkpoint_folders import last_saved, list_checkpoints
from simpletune.runs.summary import print_stopped
from simpletune.system.options import UserError
from simpletune.system.signals import Stopped
from simpletune.training.trainer import Trainer

MIB = 2**20
SHOWN = 3


@contextmanager
def explain_errors(trainer: Trainer) -> Iterator[None]:
    """Explain a full device, a compiler failure and a stop within this context.

    Raises:
        UserError: instead of the device's or the compiler's error.
    """
    core = trainer.core
    try:
        yield
    except torch.OutOfMemoryError as error:
        kinds = memory_by_kind(core.denoiser, core.optimizer, core.device)
        raise out_of_memory(core.config, kinds, error, trainer.folder) from None
    except RuntimeError as error:
        failed = compiling_failed(error)
        if failed is None:
            raise
        raise failed from error
    except Stopped:
        if trainer.main:
            print_stopped(trainer.folder, trainer.steps)
        raise


def memory_by_kind(denoiser: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Count bytes on the device by kind: frozen and trained weights, gradients, optimizer; on CUDA also the rest."""
    parameters = list(denoiser.parameters())
    trained = list(trained_parameters(denoiser).values())
    states = [value for state in optimizer.state.values() for value in state.values()]
    kinds: dict[str, Sequence[object]] = {
        "frozen weights": [p for p in parameters if not p.requires_grad] + list(denoiser.buffers()),
        "trained weights": trained,
        "gradients": [parameter.grad for parameter in trained],
        "optimizer state": states,
    }
    found = {kind: _bytes(tensors, device) for kind, tensors in kinds.items()}
    if device.type == "cuda":
        found["activations and the rest"] = max(0, torch.cuda.memory_allocated(device) - sum(found.values()))
    return found


def _bytes(tensors: Sequence[object], device: torch.device) -> int:
    """Sum the bytes of storages on a device, each counted once."""
    seen = {}
    for tensor in tensors:
        for plain in plain_tensors(tensor) if isinstance(tensor, torch.Tensor) else ():
            if plain.device.type == device.type:
                storage = plain.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def out_of_memory(config: TrainConfig, kinds: dict[str, int], error: Exception, folder: Path) -> UserError:
    """Build the error that ends a run whose device is full; ``kinds``: bytes by kind, ``config``: demo names
    resolved."""
    from simpletune.estimate.levers import savings

    lines = ["the device's memory is full: " + str(error).partition("\n")[0]]
    lines += [f"  {kind:<26} {size / MIB:>8,.0f} MiB" for kind, size in kinds.items()]

    found = savings(config)[:SHOWN]
    if found:
        lines.append("These options would save most (predicted for the training step; costs in brackets):")
        lines += [
            f"  {' '.join(lever.overrides):<60} -{saved / MIB:,.0f} MiB ({lever.costs})" for lever, saved in found
        ]
    remedy = "Change an option and start again"
    if list_checkpoints(folder):
        remedy = (
            "After a change of memory.*, continue with --resume latest; after a change of adapter, precision or "
            "train.batch_size, start again"
        )
    lines.append(f"{last_saved(folder)}. {remedy}")
    return UserError("\n".join(lines), code=5)
