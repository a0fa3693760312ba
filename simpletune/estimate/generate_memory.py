"""Predict the memory of generating an image, during training or without it."""

from __future__ import annotations

import torch

from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.quant.precision import WeightPrecision
from simpletune.engine.tensors import all_tensors
from simpletune.estimate.job_estimate import Estimate, estimate, shortage
from simpletune.estimate.run_estimate import card_at_hand
from simpletune.estimate.simulate.reports import SIMULATED
from simpletune.estimate.simulate.simulate_stages import (
    ShapesOnlyModel,
    WholeWindowModulation,
    accounting_of,
    inpainting_input,
    shorten,
)
from simpletune.estimate.timing.recorder import Recorder
from simpletune.models.shared.buckets import Size
from simpletune.stages.load import empty_autoencoder, empty_base, modulation_of
from simpletune.stages.sample import ImageRequest, Sampler
from simpletune.stages.step.synthetic import CPU
from simpletune.system.console import silence
from simpletune.system.options import UserError
from simpletune.system.startup import pause_collection


def require_memory(
    config: TrainConfig, device: torch.device, size: Size, known: Estimate | None, encodes: bool
) -> None:
    """Refuse an image that is predicted not to fit on the CUDA device beside the training state.

    Args:
        config: configuration of the run, with folders and memory resolved and the image's settings as validation.
        size: width and height in pixels of the run's largest bucket.
        known: prediction of the run, if its validation generates images that take as much memory.
        encodes: whether a prompt has to be encoded, by a text encoder beside the training state.
    """
    card, held = card_at_hand(device)
    prediction = known or estimate(simulated_config(config), card.capability, size)
    peaks = {"drawing": prediction.stages["validate"].bytes}
    if encodes:
        peaks["encoding its prompt"] = prediction.stages["text"].bytes + prediction.job.train.steady.bytes
    width, height = config.image_size()
    for what, peak in peaks.items():
        if short := shortage(f"{what} at {width}x{height} beside training", peak, card, held):
            raise UserError(
                f"{short}. Draw a smaller picture, a prompt of the run's validation, or with simpletune generate after "
                "the run"
            )


def simulated_config(config: TrainConfig) -> TrainConfig:
    """Leave out what does not affect the memory of an image, so that similar images share a prediction."""
    option = config.validation
    changes = {"prompts": ["drawn"], "negative_prompt": "", "loss_samples": 0, "seed": 0, "every": None}
    changes |= {"images": None, "masks": None}
    plain = option.model_copy(update={**changes, "guidance": 2.0 if option.guidance > 1 else 1.0, "early_stop": None})
    return config.model_copy(update={"validation": plain})


def generation_bytes(
    config: TrainConfig,
    image: ImageRequest,
    precision: WeightPrecision,
    batch: int,
    recorder: Recorder | None = None,
) -> int:
    """Return the peak memory of generating ``batch`` images together with the denoiser, without decoding; record
    ``SIMULATED`` steps, for the time."""
    model = config.model
    size, steps = (image.width, image.height), min(SIMULATED, image.steps)
    request = ImageRequest("", 0, "", *size, steps, image.guidance)
    with fake_tensors(), pause_collection(), silence():
        denoiser = empty_base(model, config.memory, precision, CPU, [size])
        denoiser.eval().requires_grad_(False)
        detached = modulation_of(denoiser, config.model_copy(update={"precision": precision}), CPU)
        whole = None if detached is None else WholeWindowModulation(detached, image.steps, request.steps)
        text = model.text.blank(config.precision.encoder_dtype())
        with accounting_of(all_tensors(denoiser), recorder) as accounting, torch.no_grad():
            sampler = Sampler(denoiser, ShapesOnlyModel(model), precision, whole, objective=config.objective)
            read = inpainting_input(model, size, batch)
            sampler.denoise([request] * batch, [text] * batch, [shorten(model, text)] * batch, inpainting=read)
    return accounting.peak.bytes


def decoding_bytes(config: TrainConfig, image: ImageRequest, recorder: Recorder | None = None) -> int:
    """Return the peak memory of decoding one image; record the operations, for the time."""
    with fake_tensors(), pause_collection(), silence():
        vae = empty_autoencoder(config)
        with accounting_of(all_tensors(vae), recorder) as accounting, torch.no_grad():
            autoencoder = config.model.autoencoder
            autoencoder.decode(vae, torch.zeros(1, *autoencoder.shape(image.width, image.height)))
    return accounting.peak.bytes
