"""What runs, checkpoints and LoRAs hold as weights to draw with, and loading them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.config.schema import TrainConfig, cache_of_bases
from simpletune.models.buckets import Size
from simpletune.options import UserError
from simpletune.quant.plain import BF16, FP32
from simpletune.quant.precision import WeightPrecision
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.names import Named, RunName, find_in_run, find_lora, split_scale

if TYPE_CHECKING:
    import torch
    from torch import nn

    from simpletune.models.transformer import Transformer
    from simpletune.pipeline.modulation_plan import Modulation


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


def weights_of(named: Named, scale: float = 1.0) -> Weights:
    """What a name stands for, as weights to draw with.

    Args:
        named: the name.
        scale: strength of a LoRA whose name has none.
    """
    scale = scale if named.scale is None else named.scale
    run, step = named.run, named.step
    title = None if run is None or step is None else f"{run.name} step {step}"
    if named.transformer is not None:
        label, short = str(named.transformer), f"full {run.name}" if run is not None else named.transformer.name
        return Weights(label, transformer=named.transformer, short=short)
    if named.trained is not None:
        return Weights(named.name, trained=named.trained, short=title or Path(named.name).name)
    if title is not None:
        label, short = f"LoRA {named.name} x {scale:g}", title if scale == 1 else f"{title} x {scale:g}"
    elif run is not None:
        label, short = f"LoRA {named.lora} x {scale:g}", f"LoRA {run.name} x {scale:g}"
    else:
        label, short = f"LoRA {named.name} x {scale:g}", f"{Path(named.name).stem} x {scale:g}"
    return Weights(label, lora=named.lora, scale=scale, short=short)


def lora_weights(text: str, scale: float = 1.0, option: str = "") -> Weights:
    """A LoRA by its file, its run or checkpoint, or its hub repository.

    Args:
        text: the name.
        scale: the strength, where the name has none.
        option: that the name was given by.

    Raises:
        UserError: there is none of that name, or it is a full model.
    """
    return weights_of(find_lora(text, option, f"Draw with it by --run {split_scale(text)[0]}"), scale)


def checkpoints_of(run: Path, scale: float = 1.0) -> list[Weights]:
    """What a run's checkpoints hold, oldest first.

    Raises:
        UserError: it has none.
    """
    found = list_checkpoints(run)
    if not found:
        raise UserError(f"--checkpoints: {run} has no checkpoint. Leave the option out, or name another run")
    return [weights_of(find_in_run(RunName(run, step)), scale) for step, _ in found]


def combine(all_of_them: list[Weights]) -> Weights:
    """LoRAs that are drawn with at once: their updates add up."""
    first, *rest = all_of_them
    label = " + ".join(weights.label for weights in all_of_them)
    return replace(first, label=label, more=tuple(pair for weights in rest for pair in weights.loras))


def result_of(run: Path, scale: float = 1.0, step: int | None = None) -> Weights:
    """What a run has trained.

    Args:
        run: its folder.
        scale: strength of a LoRA.
        step: of the checkpoint that is meant; None: the result.

    Raises:
        UserError: it has no result.
    """
    return weights_of(find_in_run(RunName(run, step)), scale)


def full_model_of(run: Path, step: int | None = None) -> Weights:
    """What a run has trained, as a full model: its transformer, or its LoRA folded into the base."""
    weights = result_of(run, step=step)
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
