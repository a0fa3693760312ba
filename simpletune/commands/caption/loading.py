"""Find an image-to-text model by folder or hub name, predict its memory, and load it in a precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from simpletune.commands.caption.blip import Blip
from simpletune.commands.caption.captioner import Captioner, CaptionerSizes
from simpletune.commands.caption.florence import Florence
from simpletune.commands.caption.qwen import Qwen
from simpletune.engine.quant.int8 import Int8
from simpletune.engine.quant.plain import BF16, FP32
from simpletune.engine.quant.precision import WeightPrecision
from simpletune.engine.tensors import all_tensors, move_own_tensors
from simpletune.models.shared.transformers_folder import ModelFolder, find_folder
from simpletune.models.shared.weights import put_module
from simpletune.system.model_folder import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS: dict[str, type[Captioner]] = {name: kind for kind in (Florence, Blip, Qwen) for name in kind.names}
"""The class of each ``model_type`` in a config.json."""

EXAMPLES = "florence-community/Florence-2-base, Qwen/Qwen3-VL-4B-Instruct or Salesforce/blip-image-captioning-large"
PRECISIONS: dict[str, WeightPrecision] = {"bf16": BF16(), "int8": Int8(), "fp32": FP32()}
HEADS = ("lm_head", "cls.predictions.decoder")
"""Output layers, kept unquantised: they may share their weight with the token embedding, and small differences decide
the next token."""


@dataclass(frozen=True)
class CaptionerInfo:
    """Model that is not loaded yet.

    Args:
        place: its folder.
        kind: its captioner class.
        digest: digest of its configuration and weights.
    """

    place: ModelFolder
    kind: type[Captioner]
    digest: str


@dataclass(frozen=True)
class CaptionerMemory:
    """Predicted bytes on the device.

    Args:
        weights: the model's weights, exact.
        work: a batch of the largest pictures, approximate: the widest layer of either tower, the language model's
            cache, the scores of the next token, and the largest layer while it is read or dequantised.
    """

    weights: int
    work: int

    @property
    def total(self) -> int:
        """Sum of weights and work."""
        return self.weights + self.work


def find_captioner(name: str) -> CaptionerInfo:
    """Find a model and read its configuration; load no weights.

    Raises:
        UserError: there is no such model, its kind is unknown, or it has no safetensors.
    """
    place = find_folder(name, "--model", "model", "florence-community/Florence-2-base")
    found = place.model_type(KINDS, EXAMPLES)
    place.refuse_pickles()
    return CaptionerInfo(place, KINDS[found], fingerprint(place.folder))


def estimate_memory(about: CaptionerInfo, precision: WeightPrecision, batch: int, length: int) -> CaptionerMemory:
    """Predict memory from the configuration alone.

    Args:
        about: the model.
        precision: precision of its weights.
        batch: pictures per batch.
        length: maximum number of tokens in a caption.

    Raises:
        UserError: the configuration does not describe such a model.
    """
    with torch.device("meta"):
        model = about.place.empty(*about.kind.classes(about.place.config()))
    model.tie_weights()
    _cast(model, precision.compute_dtype())
    largest = 0
    for name in quantised_layers(model, precision):
        layer = model.get_submodule(name)
        largest = max(largest, _bytes(layer))
        put_module(model, name, precision.convert(name, layer))
    weights = sum({id(each): each.nbytes for each in all_tensors(model)}.values())
    beams = max(1, getattr(model.generation_config, "num_beams", None) or 1)
    work = work_bytes(about.kind.shape(model), precision.compute_dtype().itemsize, batch, beams, length)
    return CaptionerMemory(weights, work + largest)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the tensors that a file holds, as transformers does; computed buffers keep their type."""
    saved = set(model.state_dict(keep_vars=True))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and (name in saved or isinstance(tensor, nn.Parameter)):
            tensor.data = tensor.to(dtype)


def work_bytes(shape: CaptionerSizes, itemsize: int, batch: int, beams: int, length: int) -> int:
    """Return the bytes that a batch takes besides the weights: activations of the larger tower, cache and scores.

    Args:
        shape: sizes of the model.
        itemsize: bytes per number.
        batch: pictures per batch.
        beams: beams of the search for each picture.
        length: maximum number of tokens in a caption.
    """
    towers = max(shape.patches * shape.vision, shape.tokens * shape.text)
    kept = beams * shape.cached * (shape.tokens + length)
    scores = 2 * beams * shape.vocabulary  # fp32, and a sorted copy
    return batch * (itemsize * (towers + kept) + 4 * scores)


def load_captioner(
    about: CaptionerInfo, precision: WeightPrecision, device: torch.device, prompt: str | None
) -> Captioner:
    """Load a model layer by layer; quantise each linear layer on the device as soon as it arrives.

    Raises:
        UserError: the folder is damaged, or the kind does not accept the prompt.
    """
    kind, _ = about.kind.classes(about.place.config())
    model = about.place.model(kind, precision.compute_dtype())
    captioner = about.kind(about.place, model, prompt)
    _place(model, precision, device)
    return captioner


def _place(model: PreTrainedModel, precision: WeightPrecision, device: torch.device) -> None:
    for name in quantised_layers(model, precision):
        layer = model.get_submodule(name)
        move_own_tensors(layer, device)
        put_module(model, name, precision.convert(name, layer))
    model.to(device)


def quantised_layers(model: nn.Module, precision: WeightPrecision) -> list[str]:
    """List the linear layers that a precision quantises: all but those that pick the next token."""
    return list(_quantised(model, precision))


def _quantised(model: nn.Module, precision: WeightPrecision) -> Iterator[str]:
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and precision.quantises(layer) and not name.endswith(HEADS):
            if id(layer.weight) not in shared:
                yield name


def _bytes(layer: nn.Module) -> int:
    return sum(each.nbytes for each in all_tensors(layer))
