"""Load the weights of runs, checkpoints and LoRAs for inference."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.config.schema import TrainConfig, cache_of_bases
from simpletune.engine.quant.precision import BF16, FP32, WeightPrecision
from simpletune.models.shared.buckets import Size
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.stack import read_stack
from simpletune.runs.weights_names import CheckpointRef, WeightsRef, find_in_run, find_lora, split_scale
from simpletune.system.options import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from simpletune.engine.denoiser import Denoiser
    from simpletune.stages.modulation_plan import DetachedModulation


Embedding = tuple[Path, str | None]
"""An embedding file, and the token to use for it; None: the file's own."""


@dataclass(frozen=True)
class Weights:
    """Weights to generate with: the base's, and what changes or replaces them."""

    label: str
    lora: Path | None = None  # file to apply to the base
    scale: float = 1.0  # strength of the LoRA
    denoiser: Path | None = None  # folder of a fine-tuned denoiser
    merged: bool = False  # merge the LoRA into the weights
    trained: Path | None = None  # checkpoint file of trained weights that replace the base's
    short: str = ""  # label for a column title
    more: tuple[tuple[Path, float], ...] = ()  # further LoRAs to apply at once, with their strengths
    embeddings: tuple[Embedding, ...] = ()  # learned, of tokens
    alone: bool = False  # without the LoRAs that the run trained on top of

    @property
    def loras(self) -> list[tuple[Path, float]]:
        """All LoRAs with their strengths."""
        return [] if self.lora is None else [(self.lora, self.scale), *self.more]

    @property
    def title(self) -> str:
        return self.short or self.label


BASE = Weights("base")
ALONE = Weights("base alone", alone=True)
"""The base without ``model.loras``."""


def find_weights(named: WeightsRef, scale: float = 1.0) -> Weights:
    """Return the weights of a resolved name; ``scale`` is the strength of a LoRA if the name has none."""
    scale = scale if named.scale is None else named.scale
    run, step = named.run, named.step
    title = None if run is None or step is None else f"{run.name} step {step}"
    embeddings = tuple((file, None) for file in named.embeddings)
    if named.is_text_alone:
        return Weights(f"embeddings {named.name}", short=title or Path(named.name).name, embeddings=embeddings)
    if named.denoiser is not None:
        label, short = str(named.denoiser), f"full {run.name}" if run is not None else named.denoiser.name
        return Weights(label, denoiser=named.denoiser, short=short, embeddings=embeddings)
    if named.trained is not None:
        short = title or Path(named.name).name
        return Weights(named.name, trained=named.trained, short=short, embeddings=embeddings)
    if title is not None:
        label, short = f"LoRA {named.name} x {scale:g}", title if scale == 1 else f"{title} x {scale:g}"
    elif run is not None:
        label, short = f"LoRA {named.lora} x {scale:g}", f"LoRA {run.name} x {scale:g}"
    else:
        label, short = f"LoRA {named.name} x {scale:g}", f"{Path(named.name).stem} x {scale:g}"
    return Weights(label, lora=named.lora, scale=scale, short=short, embeddings=embeddings)


def lora_weights(text: str, scale: float = 1.0, option: str = "") -> Weights:
    """Find a LoRA by file, run, checkpoint or hub name; ``option`` is the prefix of messages."""
    return find_weights(find_lora(text, option, f"Use --run {split_scale(text)[0]} instead"), scale)


def checkpoints_of(run: Path, scale: float = 1.0) -> list[Weights]:
    """List the weights of a run's checkpoints, oldest first."""
    found = list_checkpoints(run)
    if not found:
        raise UserError(f"--checkpoints: {run} has no checkpoint. Remove the option, or name another run")
    return [run_result(run, scale, step) for step, _ in found]


def combine(all_of_them: list[Weights]) -> Weights:
    """Combine LoRAs to apply at once; their updates add up."""
    first, *rest = all_of_them
    label = " + ".join(weights.label for weights in all_of_them)
    embeddings = tuple(dict.fromkeys(each for weights in all_of_them for each in weights.embeddings))
    more = tuple(pair for weights in rest for pair in weights.loras)
    return replace(first, label=label, more=more, embeddings=embeddings)


def run_result(run: Path, scale: float = 1.0, step: int | None = None) -> Weights:
    """Return the result of a run, or its checkpoint of a step."""
    return find_weights(find_in_run(CheckpointRef(run, step)), scale)


def full_model_of(run: Path, scale: float = 1.0, step: int | None = None) -> Weights:
    """Return the result of a run as a full model: its denoiser, or its LoRA merged into the base."""
    weights = run_result(run, scale, step)
    if weights.lora is None:
        return weights
    label = f"base with {weights.lora} merged" + (f" x {scale:g}" if scale != 1 else "")
    return Weights(label, lora=weights.lora, scale=scale, merged=True, embeddings=weights.embeddings)


def precision_of(config: TrainConfig, weights: Weights) -> WeightPrecision:
    """Choose the precision: the configuration's, but unquantised for merged or replaced weights."""
    precision = config.precision
    if (weights.merged or weights.trained) and not precision.trainable:
        return (
            FP32()
            if precision.settled_compute == "fp32"
            else BF16.model_validate({"compute": precision.settled_compute})
        )
    return precision


def load_weights(
    config: TrainConfig, weights: Weights, device: torch.device, sizes: Collection[Size]
) -> tuple[Denoiser, DetachedModulation | None]:
    """Load the denoiser with these weights, and its modulation if it was removed.

    Args:
        config: configuration with folders resolved.
        sizes: (width, height) in pixels of the pictures to generate.
    """
    from simpletune.adapters.files.attach import fold_lora, load_loras
    from simpletune.engine.denoiser import model_device, model_units
    from simpletune.stages.load import load_base, modulation_of

    model, cache = config.model.without_assistants(), cache_of_bases(config)
    precision = precision_of(config, weights)
    if weights.denoiser is not None:
        model = model.model_copy(update={model.denoiser: str(weights.denoiser), "init": "pretrained", "loras": []})
        cache = None  # unlike a base, a result is loaded only a few times
    if weights.alone:
        model = model.model_copy(update={"loras": []})
    config = config.model_copy(update={"model": model, "precision": precision})
    denoiser = load_base(config, device, sizes, cache, read_stack(config))
    if weights.trained is not None:
        overwrite(denoiser, weights.trained)
    if weights.loras:
        load_loras(denoiser, weights.loras)
    if weights.merged:
        fold_lora(denoiser)
    # Nothing trains here, so the plan always removes the modulation, including a LoRA's updates to it.
    modulation = modulation_of(denoiser, config, device)
    config.memory.attach(model_units(denoiser), model_device(denoiser))
    return denoiser, modulation


def overwrite(denoiser: nn.Module, file: Path) -> None:
    """Replace base weights by a checkpoint's trained weights, which must be this model's."""
    from simpletune.system.safetensors_file import WeightReader

    reader, parameters = WeightReader([file]), dict(denoiser.named_parameters())
    lost = sorted(reader.names - set(parameters))
    if lost:
        raise UserError(
            f"{file}: {len(lost)} of its tensors are not in this model ({', '.join(lost[:5])}). Use its own base model"
        )
    for name in sorted(reader.names):
        tensor = reader.get(name)
        if tensor.shape != parameters[name].shape:
            shapes = f"{list(tensor.shape)}, but the model has {list(parameters[name].shape)}"
            raise UserError(f"{file}: {name} has shape {shapes}. Use its own base model")
        parameters[name].data.copy_(tensor)
