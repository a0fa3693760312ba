"""Find an image-to-text model by folder or hub name, predict its memory, and load it in a precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from simpletune.commands.caption.blip import Blip
from simpletune.commands.caption.captioner import Captioner
from simpletune.commands.caption.florence import Florence
from simpletune.commands.caption.qwen import Qwen
from simpletune.engine.quant.precision import BF16, FP32, Int8, WeightPrecision
from simpletune.engine.tensors import all_tensors, move_own_tensors
from simpletune.models.shared.transformers_folder import ModelFolder, find_folder
from simpletune.models.shared.weights import put_module
from simpletune.system.model_folder import fingerprint

KINDS: dict[str, type[Captioner]] = {name: kind for kind in (Florence, Blip, Qwen) for name in kind.names}
"""The class of each ``model_type`` in a config.json."""

EXAMPLES = "florence-community/Florence-2-base, Qwen/Qwen3-VL-4B-Instruct or Salesforce/blip-image-captioning-large"
PRECISIONS: dict[str, WeightPrecision] = {"bf16": BF16(), "int8": Int8(), "fp32": FP32()}
HEADS = ("lm_head", "cls.predictions.decoder")
"""Output layers, kept unquantised: they may share their weight with the token embedding, and small differences decide
the next token."""


@dataclass(frozen=True)
class CaptionerInfo:
    """Model that is not loaded yet."""

    place: ModelFolder
    kind: type[Captioner]
    digest: str  # digest of its configuration and weights


def find_captioner(name: str) -> CaptionerInfo:
    """Find a model and read its configuration; load no weights."""
    place = find_folder(name, "--model", "model", "florence-community/Florence-2-base")
    found = place.model_type(KINDS, EXAMPLES)
    place.refuse_pickles()
    return CaptionerInfo(place, KINDS[found], fingerprint(place.folder))


def estimate_memory(about: CaptionerInfo, precision: WeightPrecision, batch: int, length: int) -> tuple[int, int]:
    """Predict, from the configuration alone, the bytes on the device of the weights (exact), and of the work on a batch
    of the largest pictures with captions of at most ``length`` tokens (approximate)."""
    dtype = precision.compute_dtype()
    with torch.device("meta"):
        model = about.place.empty(*about.kind.classes(about.place.config()))
    model.tie_weights()
    saved = set(model.state_dict(keep_vars=True))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        # Casts the tensors that a file holds, as transformers does; computed buffers keep their type.
        if tensor.is_floating_point() and (name in saved or isinstance(tensor, nn.Parameter)):
            tensor.data = tensor.to(dtype)
    largest = 0
    for name in quantised_layers(model, precision):
        layer = model.get_submodule(name)
        largest = max(largest, sum(each.nbytes for each in all_tensors(layer)))
        put_module(model, name, precision.convert(layer))
    weights = sum({id(each): each.nbytes for each in all_tensors(model)}.values())
    # The widest layer of either tower, the language model's cache, the scores of the next token, and the largest layer
    # while it is read or dequantised.
    beams = max(1, getattr(model.generation_config, "num_beams", None) or 1)
    shape = about.kind.shape(model)
    towers = max(shape.patches * shape.vision, shape.tokens * shape.text)
    kept = beams * shape.cached * (shape.tokens + length)
    scores = 2 * beams * shape.vocabulary  # fp32, and a sorted copy
    work = batch * (dtype.itemsize * (towers + kept) + 4 * scores)
    return weights, work + largest


def load_captioner(
    about: CaptionerInfo, precision: WeightPrecision, device: torch.device, prompt: str | None
) -> Captioner:
    """Load a model layer by layer; quantise each linear layer on the device as soon as it arrives."""
    kind, _ = about.kind.classes(about.place.config())
    model = about.place.model(kind, precision.compute_dtype())
    captioner = about.kind(about.place, model, prompt)
    for name in quantised_layers(model, precision):
        layer = model.get_submodule(name)
        move_own_tensors(layer, device)
        put_module(model, name, precision.convert(layer))
    model.to(device)
    return captioner


def quantised_layers(model: nn.Module, precision: WeightPrecision) -> list[str]:
    """List the linear layers that a precision quantises: all but those that pick the next token."""
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [
        name
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and precision.quantises(layer) and not name.endswith(HEADS)
        if id(layer.weight) not in shared
    ]
