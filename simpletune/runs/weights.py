"""Runs and their results as models to draw with: which weights a name stands for, and loading them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.adapters.lora import OUTPUT as LORA_FILE
from simpletune.config.schema import TrainConfig, cache_of_bases
from simpletune.hub.fetch import is_hub_name
from simpletune.hub.files import repository_file
from simpletune.models.buckets import Size
from simpletune.options import UserError
from simpletune.quant.plain import BF16, FP32
from simpletune.quant.precision import WeightPrecision
from simpletune.runs.checkpoint import AVERAGE, TRAINABLE, list_checkpoints
from simpletune.runs.folder import CONFIG, newest_run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from simpletune.models.transformer import Transformer
    from simpletune.pipeline.modulation_plan import Modulation

TRANSFORMER = "transformer"


@dataclass(frozen=True)
class Weights:
    """Weights to draw with.

    Args:
        label: what they are, in words.
        lora: a LoRA file beside the base, if any.
        scale: strength of the LoRA.
        transformer: the folder of a fine-tuned transformer, if any.
        merged: fold the LoRA into the weights, as a full model.
        trained: a checkpoint's file of trained weights that replace the base's, if any.
        short: the label in few letters, for the head of a column.
        more: further LoRAs on the same base at once, with their strengths.
    """

    label: str
    lora: Path | None = None
    scale: float = 1.0
    transformer: Path | None = None
    merged: bool = False
    trained: Path | None = None
    short: str = ""
    more: tuple[tuple[Path, float], ...] = ()

    @property
    def loras(self) -> list[tuple[Path, float]]:
        """All LoRAs with their strengths."""
        return [] if self.lora is None else [(self.lora, self.scale), *self.more]

    @property
    def title(self) -> str:
        """The head of a column."""
        return self.short or self.label


BASE = Weights("base")


def run_config(run: Path) -> TrainConfig:
    """The configuration of a run.

    Raises:
        UserError: it is no run's folder.
    """
    file = run / CONFIG
    if not file.exists():
        raise UserError(f"--run: {run} has no {CONFIG}: it is not a run's folder")
    return TrainConfig.model_validate_json(file.read_text())


def find_run(named: Path | None, runs: Path) -> Path:
    """The run that was named, or the newest."""
    return named or newest_run(runs)


def lora_weights(name: str, scale: float) -> Weights:
    """A LoRA by its file, its folder, or its hub repository.

    Raises:
        UserError: there is none of that name.
    """
    path = Path(name)
    if is_hub_name(name):
        path = repository_file(name, LORA_FILE)
    elif path.is_dir():
        path = path / LORA_FILE
    if not path.is_file():
        raise UserError(f"--lora: {name} does not exist. Give a LoRA file, a run's folder, or a hub name (owner/name)")
    return Weights(f"LoRA {name} x {scale:g}", lora=path, scale=scale, short=f"{Path(name).stem} x {scale:g}")


def split_scale(text: str, default: float | None = None) -> tuple[str, float | None]:
    """A name and the strength after its last colon: ``my.safetensors:0.8``.

    Args:
        default: where there is no strength.

    Raises:
        UserError: what stands after the colon is not a number, and before it something that exists.
    """
    name, colon, scale = text.rpartition(":")
    if not colon or Path(text).exists():
        return text, default
    try:
        return name, float(scale)
    except ValueError:
        if name and Path(name).exists():
            raise UserError(f"{text}: the strength {scale!r} is not a number. Write {name}:0.8, say") from None
        return text, default


def checkpoints_of(run: Path, scale: float = 1.0) -> list[Weights]:
    """What a run's checkpoints hold, oldest first.

    Raises:
        UserError: it has none.
    """
    found = list_checkpoints(run)
    if not found:
        raise UserError(f"--checkpoints: {run} has no checkpoint. Leave the option out, or name another run")
    states = []
    for step, folder in found:
        if (folder / LORA_FILE).exists():
            label, short = f"{run} step {step} x {scale:g}", f"{run.name} step {step}"
            states.append(Weights(label, lora=folder / LORA_FILE, scale=scale, short=short))
        else:
            file = folder / (AVERAGE if (folder / AVERAGE).exists() else TRAINABLE)
            states.append(Weights(f"{run} step {step}", trained=file, short=f"{run.name} step {step}"))
    return states


def combine(all_of_them: list[Weights]) -> Weights:
    """LoRAs that are drawn with at once: their updates add up."""
    first, *rest = all_of_them
    label = " + ".join(weights.label for weights in all_of_them)
    return replace(first, label=label, more=tuple(pair for weights in rest for pair in weights.loras))


def result_of(run: Path, scale: float = 1.0) -> Weights:
    """What a run has trained.

    Raises:
        UserError: it left no result.
    """
    if (run / TRANSFORMER).is_dir():
        return Weights(f"{run}/{TRANSFORMER}", transformer=run / TRANSFORMER, short=f"full {run.name}")
    if (run / LORA_FILE).exists():
        short = f"LoRA {run.name} x {scale:g}"
        return Weights(f"LoRA {run / LORA_FILE} x {scale:g}", lora=run / LORA_FILE, scale=scale, short=short)
    raise UserError(f"--run: {run} holds no {LORA_FILE} and no {TRANSFORMER}/. Let it finish, or name another run")


def full_model_of(run: Path) -> Weights:
    """What a run has trained, as a full model: its transformer, or its LoRA folded into the base."""
    weights = result_of(run)
    if weights.lora is None:
        return weights
    return Weights(f"base with {weights.lora} folded in", lora=weights.lora, merged=True)


def precision_of(config: TrainConfig, weights: Weights) -> WeightPrecision:
    """How the weights are held: as the configuration says, but what is written over the base's is not quantised."""
    precision = config.precision
    if (weights.merged or weights.trained) and not precision.trainable:
        return BF16() if precision.compute == "bf16" else FP32()
    return precision


def load_weights(
    config: TrainConfig, weights: Weights, device: torch.device, sizes: Collection[Size]
) -> tuple[Transformer, Modulation | None]:
    """The transformer with these weights.

    Nothing trains here, so with the modulation plan the modulation is taken out whatever the weights are, with the
    updates that a LoRA may have made to it.

    Args:
        config: with folders resolved; its precision holds, but for a merged model, which is not quantised.
        weights: which.
        device: where to.
        sizes: (width, height) in pixels of the pictures to draw.

    Returns:
        The transformer, and its modulation if it was taken out.
    """
    from simpletune.lora.attach import fold_lora, load_loras
    from simpletune.pipeline.load import device_of, load_base, modulation_of

    model, cache, precision = config.model, cache_of_bases(config), precision_of(config, weights)
    if weights.transformer is not None:
        model = model.model_copy(update={"transformer": str(weights.transformer), "init": "pretrained"})
        cache = None  # a result is drawn with a few times; a base, by every run
    transformer = load_base(config.model_copy(update={"model": model, "precision": precision}), device, sizes, cache)
    if weights.trained is not None:
        overwrite(transformer, weights.trained)
    if weights.loras:
        load_loras(transformer, weights.loras)
    if weights.merged:
        fold_lora(transformer)
    modulation = modulation_of(transformer, config.memory, precision, device)
    config.memory.attach(transformer.transformer_blocks, device_of(transformer))
    return transformer, modulation


def overwrite(transformer: nn.Module, file: Path) -> None:
    """Put a checkpoint's trained weights in the place of the base's.

    Raises:
        UserError: they are of another model.
    """
    from simpletune.system.safetensors_file import WeightReader

    reader, parameters = WeightReader([file]), dict(transformer.named_parameters())
    lost = sorted(reader.names - set(parameters))
    if lost:
        raise UserError(f"{file}: {len(lost)} of its tensors are not in this model: {', '.join(lost[:5])}")
    for name in sorted(reader.names):
        tensor = reader.get(name)
        if tensor.shape != parameters[name].shape:
            shapes = f"{list(tensor.shape)}, and the model {list(parameters[name].shape)}"
            raise UserError(f"{file}: {name} has shape {shapes}: it is of another model")
        parameters[name].data.copy_(tensor)
