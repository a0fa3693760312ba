"""Predict the text stage: run every encoder over two batches of prompts. Also counts other stages without training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.attention_workspace import cuda_layouts
from simpletune.engine.memory.kernel_workspace import temporaries
from simpletune.engine.memory.snapshot import HOST, MemorySnapshot
from simpletune.engine.tensors import all_tensors
from simpletune.estimate.timing.recorder import Recorder, StreamWork
from simpletune.models.shared.parts import TextEncoder
from simpletune.models.shared.prompts import BATCH, clip_outputs, empty_clip
from simpletune.models.shared.t5_layers import EMBEDDINGS, EmptyT5, LayeredT5
from simpletune.stages.step.synthetic import CPU


class Recorders(dict[str, Recorder]):
    """Recorders for the parts of a job, by name, on a GPU or a CPU."""

    def __init__(self, cuda: bool = True):
        super().__init__()
        self.cuda = cuda

    def __missing__(self, name: str) -> Recorder:
        return self.setdefault(name, Recorder(self.cuda))


def parts_in_steps(config: TrainConfig) -> set[str]:
    """The parts of the text encoders that run in every training step, instead of once before."""
    resident = config.text.resident(config.model.clip_encoders)
    return {config.model.text_regions()[name].part for name in resident} if resident else set()


Texts = tuple[list[tuple[str, int, MemorySnapshot]], dict[str, list[StreamWork]]]
_TEXTS: dict[str, Texts] = {}


def texts_of(config: TrainConfig) -> Texts:
    """The text encoders' ``text_snapshots`` and their work, cached for runs with the same encoders."""
    model = config.model
    encoders = [(encoder.model, model.known_part(encoder.model).config()) for encoder in model.encoders()]
    about = [model.model_dump(mode="json"), str(config.precision.encoder_dtype()), encoders]
    key = json.dumps(about, sort_keys=True, default=str)
    if key not in _TEXTS:
        recorders = Recorders()
        texts = list(text_snapshots(config, recorders))
        _TEXTS[key] = texts, {name: each.sections for name, each in recorders.items()}
    return _TEXTS[key]


def bytes_in_16_bit(model: nn.Module, without: str = "") -> int:
    """Return the size of a model's parameters at 2 bytes each.

    Args:
        without: name of a tied parameter that files do not repeat.
    """
    return 2 * sum(parameter.numel() for name, parameter in model.named_parameters() if name != without)


@contextmanager
def accounting_of(weights: Iterable[Tensor], recorder: Recorder | None = None) -> Iterator[Accounting]:
    """Make the accounting of a stage without training, where everything allocated counts as activations."""
    layouts = cuda_layouts("flash")
    with Accounting(temporaries(), layouts=layouts) as accounting, accounting.allocating("activations"):
        accounting.register(weights, "weights")
        with recorder.watching(accounting) if recorder else nullcontext():
            yield accounting


def largest(texts: Iterable[tuple[str, int, MemorySnapshot]]) -> MemorySnapshot:
    """Return the largest snapshot of ``text_snapshots``; an empty one without any."""
    nothing = MemorySnapshot(phase="text")
    return max((snapshot for _, _, snapshot in texts), key=lambda snapshot: snapshot.bytes, default=nothing)


def text_snapshots(
    config: TrainConfig, recorders: Recorders | None = None
) -> Iterator[tuple[str, int, MemorySnapshot]]:
    """Yield each text encoder's part, its size at 2 bytes per parameter, and its largest snapshot."""
    dtype = config.precision.encoder_dtype()
    for encoder in config.model.encoders():
        recorder = None if recorders is None else recorders[f"text.{encoder.model}"]
        part = config.model.known_part(encoder.model)
        if encoder.is_t5:
            t5 = LayeredT5(part, dtype, CPU, EmptyT5(part, dtype))
            t5.model.to("meta")  # accelerate creates its empty weights on the CPU under fake tensors
            size, snapshot = bytes_in_16_bit(t5.model, EMBEDDINGS[1]), of_t5(t5, encoder.length or 0, recorder)
        else:
            clip = empty_clip(encoder, part.config()).eval().to(dtype)
            size, snapshot = bytes_in_16_bit(clip), of_clip(encoder, clip, recorder)
        yield encoder.model, size, replace(snapshot, phase="text", module=encoder.name)


def of_clip(encoder: TextEncoder, clip: Any, recorder: Recorder | None = None) -> MemorySnapshot:
    """Run a CLIP encoder over two batches of prompts; the first batch's outputs live until the second's exist."""
    with accounting_of(all_tensors(clip), recorder) as accounting:
        ids = torch.zeros((2 * BATCH, clip.config.max_position_embeddings), dtype=torch.int64)
        for _ in clip_outputs(encoder, clip, ids, CPU, BATCH):
            pass
    return accounting.peak


def of_t5(t5: LayeredT5, length: int, recorder: Recorder | None = None) -> MemorySnapshot:
    """Run a T5 encoder layer by layer over two batches of prompts of ``length`` tokens."""
    with accounting_of((), recorder) as accounting:
        ids = torch.zeros((2 * BATCH, length), dtype=torch.int64)
        accounting.register([ids], HOST)
        for _ in t5.encode(ids, BATCH):
            pass
    return accounting.peak
