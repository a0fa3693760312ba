"""Predict what an evaluation takes before it begins: the code that draws and embeds runs on fake tensors.

Memory on the device is predicted as for training. Times are operations divided by a rate: a card's sustained one, or
that of products of the same size measured on this CPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from simpletune.config.schema import TrainConfig
from simpletune.estimate.forecast import card_at_hand
from simpletune.estimate.predict import MIB, needed
from simpletune.estimate.simulate_stages import (
    SIMULATED,
    ShapesOnlyModel,
    WholeWindowModulation,
    empty_autoencoder,
    predict_stage,
)
from simpletune.estimate.simulate_text import accounting_of
from simpletune.evaluation.encoders.encoder import About
from simpletune.evaluation.encoders.loading import class_of
from simpletune.evaluation.plan import Plan
from simpletune.memory.fake import fake_tensors
from simpletune.models.flops import trained_of
from simpletune.options import Json, UserError
from simpletune.pipeline.load import empty_base, modulation_of
from simpletune.pipeline.sample import Request, Sampler
from simpletune.runs.weights import precision_of
from simpletune.system.console import duration, say, silent
from simpletune.system.startup import without_collection
from simpletune.tensors import all_tensors

SUSTAINED = 0.5  # of a card's dense peak: 57 of an L4's 121 TFLOP/s in products of this size
TFLOPS = 60.0  # sustained, of a card known by its memory only: an L4's
WITHOUT_TENSOR_CORES = 8  # times slower: fp32 matrix products do not use the tensor cores

CPU = torch.device("cpu")
CAPABILITY = (8, 9)  # without a card: an L4's
ROWS, WIDEST = 256, 2048
"""Size of the products that measure a CPU's rate: rows, and the largest width."""


@dataclass(frozen=True)
class Stage:
    """What a stage takes.

    Args:
        bytes: the largest memory on the device.
        seconds: in total.
    """

    bytes: int
    seconds: float

    def as_json(self) -> Json:
        """The fields in `evaluation.json`."""
        return {"peak_mib": round(self.bytes / MIB, 1), "seconds": round(self.seconds, 1)}


def predict(plan: Plan, encoders: Sequence[About], undrawn: int) -> dict[str, Stage]:
    """Predict every stage, print the prediction, and refuse what does not fit on a card.

    Args:
        plan: the evaluation.
        encoders: to embed with.
        undrawn: how many pictures are still to be drawn.

    Raises:
        UserError: a stage does not fit.
    """
    config, device = plan.session.config, plan.session.device
    first = plan.shots[0].request
    on_card = device.type == "cuda"
    card = card_at_hand(device) if on_card else None
    stages: dict[str, Stage] = {}
    if undrawn:
        capability = card[0].capability if card else CAPABILITY
        stages["text"] = Stage(predict_stage(config, "text", capability).bytes, 0.0)
        stages["draw"] = Stage(drawing_bytes(config, plan), undrawn * drawing_operations(config, first) / rate(plan, 0))
        stages["decode"] = Stage(decoding_bytes(config, first), 0.0)
    pictures = len(plan.points) * len(plan.shots) + len(plan.real)
    for about in encoders:
        size, operations, width = encoding(about)
        stages[about.title] = Stage(size, pictures * operations / rate(plan, width))
    for name, stage in stages.items():
        seconds = f", {duration(stage.seconds)}" if stage.seconds else ""
        say(f"predict {name}: {stage.bytes / MIB:,.0f} MiB{seconds}")
    if card is not None:
        require_room(stages, card[0].bytes - card[1], card[0].name)
    return stages


def require_room(stages: dict[str, Stage], free: int, name: str) -> None:
    """Refuse what does not fit on a card.

    Raises:
        UserError: with the stage and what helps.
    """
    for stage, taken in stages.items():
        if needed(taken.bytes) > free:
            remedy = "--resident-blocks 0 or --vae-tile 512" if stage in ("draw", "decode", "text") else "--device cpu"
            raise UserError(
                f"evaluate: {stage} needs {needed(taken.bytes) / MIB:,.0f} MiB and {name} has {free / MIB:,.0f} free. "
                f"Try {remedy}"
            )


def drawing_bytes(config: TrainConfig, plan: Plan) -> int:
    """The largest memory of drawing one batch."""
    first, model = plan.shots[0].request, config.model
    request = Request("", 0, "", first.width, first.height, min(SIMULATED, first.steps), first.guidance)
    precision = precision_of(config, plan.points[-1].weights)
    batch = min(plan.session.speed.batch_size, len(plan.shots))
    with fake_tensors(), without_collection(), silent():
        transformer = empty_base(model, config.memory, precision, CPU, [(first.width, first.height)])
        transformer.eval().requires_grad_(False)
        detached = modulation_of(transformer, config.memory, precision, CPU)
        whole = None if detached is None else WholeWindowModulation(detached, first.steps, request.steps)
        text = (
            torch.zeros(model.text_tokens, model.text_width, dtype=config.precision.encoder_dtype()),
            torch.zeros(model.pooled_width, dtype=config.precision.encoder_dtype()),
        )
        with accounting_of(all_tensors(transformer)) as accounting:
            sampler = Sampler(transformer, ShapesOnlyModel(model), precision, whole)
            sampler.denoise([request] * batch, [text] * batch, [text] * batch)
    return accounting.peak.bytes


def decoding_bytes(config: TrainConfig, first: Request) -> int:
    """The largest memory of decoding one picture."""
    with fake_tensors(), without_collection(), silent():
        vae = empty_autoencoder(config)
        with accounting_of(all_tensors(vae)) as accounting, torch.no_grad():
            config.model.decode_latents(vae, torch.zeros(1, *config.model.latent_shape(first.width, first.height)))
    return accounting.peak.bytes


def drawing_operations(config: TrainConfig, first: Request) -> float:
    """Operations of the transformer for one picture."""
    passes = first.steps * (2 if first.guidance > 1 else 1)
    return float(passes * config.model.flops(trained_of({}), (first.width, first.height), 1).forward)


def encoding(about: About) -> tuple[int, float, int]:
    """What one picture takes in an encoder.

    Returns:
        Bytes at the peak, operations, and the encoder's width.
    """
    kind = class_of(about)
    with fake_tensors(), without_collection(), silent():
        model = kind.empty(about).float()
        side = kind.side(model.config)
        vision = getattr(model.config, "vision_config", model.config)
        with (
            accounting_of(all_tensors(model)) as accounting,
            FlopCounterMode(display=False) as counter,
            torch.no_grad(),
        ):
            pixels = torch.zeros(1, 3, side, side)
            if kind.reads_prompts:
                model.get_image_features(pixel_values=pixels)
            else:
                model(pixel_values=pixels)
    return accounting.peak.bytes, float(counter.get_total_flops()), int(vision.hidden_size)


def rate(plan: Plan, width: int) -> float:
    """Operations a second.

    Args:
        plan: the evaluation.
        width: of an encoder in fp32; 0 for the transformer.
    """
    device, config = plan.session.device, plan.session.config
    if device.type == "cuda":
        card = card_at_hand(device)[0]
        found = (card.tflops * SUSTAINED if card.tflops else TFLOPS) * 1e12
        return found / (WITHOUT_TENSOR_CORES if width or config.precision.settled == "fp32" else 1)
    return measured_rate(width or int(config.model.known_config().get("caption_projection_dim", 320)))


def measured_rate(width: int) -> float:
    """This CPU's operations a second in products of [256, w] and [w, 4 w] (median of 5)."""
    width = min(width, WIDEST)
    left, right = torch.ones(ROWS, width), torch.ones(width, 4 * width)
    seconds: list[float] = []
    for _ in range(6):
        clock = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - clock)
    return 2 * left.numel() * right.shape[1] / sorted(seconds[1:])[2]
