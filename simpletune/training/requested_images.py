"""Generate a requested picture between two steps: check and predict first, then generate as validation does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from simpletune.adapters.methods.layers import at_strength
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.config.validation import Validation
from simpletune.engine.fp16_blocks import fp16_blocks_of
from simpletune.engine.optim.ema import use_average
from simpletune.models.shared.buckets import STEP
from simpletune.runs.control import GENERATED_ROWS, GenerateRequest, State
from simpletune.runs.folder import GENERATED, append_metrics
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.png import request_values, save_png
from simpletune.stages.sample import ImageRequest
from simpletune.system.atomic import atomic_file
from simpletune.system.options import Json, UserError
from simpletune.system.printable import describe_exception
from simpletune.training.validator import Validator

if TYPE_CHECKING:
    from simpletune.estimate.job_estimate import Estimate


def generate_requested(validator: Validator, predicted: Estimate | None, asked: GenerateRequest, done: int) -> str:
    """Generate one picture with the weights after ``done`` steps, or their average, into the run's ``drawn/``; returns
    its name in the run's folder.

    Raises:
        UserError: the picture cannot be generated, or is predicted not to fit.
    """
    own, core, previews = validator.config, validator.core, validator.previews
    option = validation_for(own, asked)
    size = (option.width or own.resolution, option.height or own.resolution)
    negative = own.model.text.steered_from(option.negative_prompt)
    request = ImageRequest(asked.prompt, asked.seed, negative, *size, option.steps, option.guidance)
    if previews.requests and previews.requests[0].mask is not None:  # paints into the run's own first picture
        first = previews.requests[0]
        request = replace(request, image=first.image, mask=first.mask, strength=first.strength)
    if asked.strength != 1 and own.adapter.trains_base:
        raise UserError(
            f"strength {asked.strength:g}: {own.adapter.method} changes the weights themselves and has no "
            "strength. Use 1"
        )
    require_position_table(core.denoiser, size)
    text, device = previews.text, core.device
    if device.type == "cuda":
        from simpletune.estimate.generate_memory import require_memory

        config = core.config.model_copy(update={"validation": option})
        known = predicted if has_predicted_peak(own, option) else None
        require_memory(config, device, validator.plan.largest(), known, encodes=bool(text.lacking(request.texts)))
    with validator.stages.stage("text"):
        text.fill(request.texts, device)
    with validator.stages.stage("validate"), use_average(core.average), restore_fp16_blocks(core.denoiser):
        with nullcontext() if asked.strength == 1 else at_strength(core.denoiser, asked.strength):
            (image,) = previews.images(core.denoiser, [request])
    name, folder = f"{GENERATED}/step-{done:06d}-{asked.id}.png", validator.folder
    (folder / GENERATED).mkdir(exist_ok=True)
    strength = "" if asked.strength == 1 else f" x {asked.strength:g}"
    with atomic_file(folder / name) as part:
        save_png(image, part, request, **previews.about(f"step {done}{strength}"))
    how = request_values(request) | {"strength": asked.strength}
    append_metrics(folder, {"step": done, "file": name, "id": asked.id, **how}, GENERATED_ROWS)
    return name


def answer_generate(
    validator: Validator, predicted: Estimate | None, asked: GenerateRequest, done: int
) -> tuple[State, Json]:
    """Generate a requested picture, and return the answer; a failure does not fail the run."""
    try:
        return "done", {"file": generate_requested(validator, predicted, asked, done)}
    except UserError as error:
        return "refused", {"why": str(error)}
    except Exception as error:  # a requested picture must not fail the run
        why = f"drawing failed ({describe_exception(error)}); training continues"
    free_memory(validator.core.device)
    return "failed", {"why": why}


def validation_for(config: TrainConfig, asked: GenerateRequest) -> Validation:
    """Return the run's validation settings with a request's changes.

    Raises:
        UserError: the run's configuration does not allow it; the message is that of ``check``.
    """
    fields = {"negative_prompt", "steps", "guidance", "width", "height"}
    data = config.model_dump(mode="json", by_alias=True)
    changes = asked.model_dump(include=fields, exclude_none=True)
    changes |= {"prompts": [asked.prompt], "images": None, "masks": None}
    data["validation"] = {**data["validation"], **changes}
    return validate(data, f"request {asked.id}", needs_data=False, needs_model=False).validation


def has_predicted_peak(config: TrainConfig, option: Validation) -> bool:
    """Return whether the run's validation, whose memory was predicted, generates pictures that take as much memory."""
    own = config.validation
    alike = ("width", "height", "steps", "guidance")
    return own.prompts != [] and all(getattr(own, name) == getattr(option, name) for name in alike)


def require_position_table(denoiser: nn.Module, size: tuple[int, int]) -> None:
    """Check that the model's position table covers a picture's size.

    Raises:
        UserError: the picture is larger than the table, which ``memory.crop_positions`` may have cropped.
    """
    side = getattr(getattr(denoiser, "pos_embed", None), "pos_embed_max_size", None)
    if side is not None and max(size) > side * STEP:
        raise UserError(
            f"{size[0]}x{size[1]}: this run holds positions for {side * STEP} pixels a side. Use a smaller picture, or "
            "start the run with memory.crop_positions=false"
        )


@contextmanager
def restore_fp16_blocks(denoiser: nn.Module) -> Iterator[None]:
    """Undo the effect of a picture's fp16 overflows within this context, so that later evaluations do not change."""
    blocks = fp16_blocks_of(denoiser)
    before = None if blocks is None else blocks.wide_in_generation
    try:
        yield
    finally:
        if blocks is not None and before is not None:
            blocks.wide_in_generation = before
