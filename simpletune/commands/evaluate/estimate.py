"""Predict memory and time of an evaluation before it begins, by drawing and embedding on fake tensors.

As for training, the time of every operation is what ``simpletune calibrate`` measured on this device; otherwise it
follows from the card's data sheet, or from a quick measurement on this CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from simpletune.commands.evaluate.encoders.encoder import EncoderInfo
from simpletune.commands.evaluate.encoders.loading import class_of
from simpletune.commands.evaluate.plan import EvaluationPlan
from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.tensors import all_tensors
from simpletune.estimate.generate_memory import decoding_bytes, generation_bytes
from simpletune.estimate.job_estimate import MIB, needed
from simpletune.estimate.job_time import alone, speeds_of
from simpletune.estimate.run_estimate import card_at_hand
from simpletune.estimate.simulate.simulate_stages import SIMULATED, Recorders, accounting_of, simulate_stage
from simpletune.estimate.timing.constants import constants_file, read_constants
from simpletune.estimate.timing.probes import forget_values
from simpletune.estimate.timing.recorder import Recorder
from simpletune.estimate.timing.speeds import CalibratedSpeeds, Speeds
from simpletune.models.shared.prompts import BATCH
from simpletune.runs.weights import precision_of
from simpletune.system.console import duration, say, silent
from simpletune.system.environment import cpu_name
from simpletune.system.gpus import Card
from simpletune.system.options import Json, UserError
from simpletune.system.startup import without_collection

CPU = torch.device("cpu")
CAPABILITY = (8, 9)  # without a card: an L4's


@dataclass(frozen=True)
class StageEstimate:
    """Memory and time of a stage.

    Args:
        bytes: peak memory on the device.
        seconds: in total.
    """

    bytes: int
    seconds: float

    def as_json(self) -> Json:
        """Return the fields in `evaluation.json`."""
        return {"peak_mib": round(self.bytes / MIB, 1), "seconds": round(self.seconds, 1)}


def estimate_stages(plan: EvaluationPlan, encoders: Sequence[EncoderInfo], undrawn: int) -> dict[str, StageEstimate]:
    """Predict every stage, print the prediction, and refuse what does not fit on a card.

    Args:
        plan: the evaluation.
        encoders: encoders to embed with.
        undrawn: number of pictures still to be drawn.

    Raises:
        UserError: a stage does not fit.
    """
    config, device = plan.session.config, plan.session.device
    first = plan.shots[0].request
    on_card = device.type == "cuda"
    card = card_at_hand(device) if on_card else None
    speeds, source = speeds_at_hand(config.output.cache_folder, card[0] if card else None)
    recorders, stages = Recorders(on_card), dict[str, StageEstimate]()
    if undrawn:
        capability = card[0].capability if card else CAPABILITY
        stages["text"] = text_stage(config, plan, capability, recorders, speeds)
        drawing, precision = Recorder(on_card), precision_of(config, plan.points[-1].weights)
        size = generation_bytes(config, first, precision, batch_of(plan), drawing)
        steps = first.steps / min(SIMULATED, first.steps) / batch_of(plan)
        stages["draw"] = StageEstimate(size, undrawn * steps * alone(drawing.sections, speeds))
        decoding = Recorder(on_card)
        size = decoding_bytes(config, first, decoding)
        stages["decode"] = StageEstimate(size, undrawn * alone(decoding.sections, speeds))
    pictures = len(plan.points) * len(plan.shots) + len(plan.real)
    for about in encoders:
        seen = Recorder(on_card)
        size = encoding(about, seen)
        stages[about.title] = StageEstimate(size, pictures * alone(seen.sections, speeds))
    forget_values()
    say(f"predict by speeds {source}")
    for name, stage in stages.items():
        say(f"predict {name}: {stage.bytes / MIB:,.0f} MiB, {duration(stage.seconds)}")
    if card is not None:
        require_room(stages, card[0].bytes - card[1], card[0].name)
    return stages


def require_room(stages: dict[str, StageEstimate], free: int, name: str) -> None:
    """Refuse stages that do not fit on a card.

    Raises:
        UserError: names the stage and a remedy.
    """
    for stage, taken in stages.items():
        if needed(taken.bytes) > free:
            remedy = "--resident-blocks 0 or --vae-tile 512" if stage in ("draw", "decode", "text") else "--device cpu"
            raise UserError(
                f"evaluate: {stage} needs {needed(taken.bytes) / MIB:,.0f} MiB and {name} has {free / MIB:,.0f} free. "
                f"Try {remedy}"
            )


def speeds_at_hand(cache: Path, card: Card | None) -> tuple[Speeds, str]:
    """Return the speeds of this device, and their origin.

    Args:
        cache: folder of the cache, with calibrations of this machine.
        card: the card; None: the CPU.

    Raises:
        UserError: a calibration cannot be read.
    """
    if card is not None:
        speeds, _, source = speeds_of(card, cache)
        return speeds, source
    file = constants_file(cache, cpu_name(), torch.get_num_threads(), "cpu")
    if file.exists():
        constants = read_constants(file)
        return CalibratedSpeeds(constants), f"calibrated on {constants.device}, {constants.date}"
    from simpletune.estimate.timing.cpu_speed import current_cpu_speeds

    return current_cpu_speeds(), "measured on this CPU now"


def text_stage(
    config: TrainConfig, plan: EvaluationPlan, capability: tuple[int, int], recorders: Recorders, speeds: Speeds
) -> StageEstimate:
    """Predict the encoding of all prompts, none of them cached."""
    taken = simulate_stage(config, "text", capability, recorders).bytes
    prompts = len({text for shot in plan.shots for text in (shot.request.prompt, shot.request.negative_prompt)})
    once = sum(alone(recorder.sections, speeds) for recorder in recorders.values())
    return StageEstimate(taken, prompts / (2 * BATCH) * once)


def batch_of(plan: EvaluationPlan) -> int:
    """Return how many pictures are drawn together."""
    return min(plan.session.speed.batch_size, len(plan.shots))


def encoding(about: EncoderInfo, recorder: Recorder) -> int:
    """Return the peak memory of one picture in an encoder; record the operations."""
    kind = class_of(about)
    with fake_tensors(), without_collection(), silent():
        model = kind.empty(about).float()
        side = kind.side(model.config)
        with accounting_of(all_tensors(model), recorder) as accounting, torch.no_grad():
            pixels = torch.zeros(1, 3, side, side)
            if kind.reads_prompts:
                model.get_image_features(pixel_values=pixels)
            else:
                model(pixel_values=pixels)
    return accounting.peak.bytes
