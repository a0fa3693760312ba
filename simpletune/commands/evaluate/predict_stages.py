"""Predict memory and time of an evaluation before it begins, by generating and embedding on fake tensors.

As for training, the time of every operation is what ``simpletune doctor --calibrate`` measured on this device;
otherwise it follows from the card's data sheet, or from a quick measurement on this CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from simpletune.commands.evaluate.encoders import EncoderInfo
from simpletune.commands.evaluate.plan import EvaluationPlan
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.tensors import all_tensors
from simpletune.estimate.generate_memory import decoding_bytes, generation_bytes
from simpletune.estimate.job_estimate import MIB, shortage
from simpletune.estimate.job_time import section_seconds, speeds_of
from simpletune.estimate.run_estimate import card_at_hand
from simpletune.estimate.simulate.reports import SIMULATED
from simpletune.estimate.simulate.simulate_stages import Recorders, accounting_of, simulate_stage
from simpletune.estimate.timing.constants import constants_file, read_constants
from simpletune.estimate.timing.probes import forget_values
from simpletune.estimate.timing.recorder import Recorder
from simpletune.estimate.timing.speeds import CalibratedSpeeds, Speeds
from simpletune.models.text.encoder import BATCH
from simpletune.runs.weights import precision_of
from simpletune.system.console import duration, say, silence
from simpletune.system.environment import cpu_name
from simpletune.system.gpus import Card
from simpletune.system.options import UserError
from simpletune.system.startup import pause_collection

CAPABILITY = (8, 9)  # without a card: an L4's


@dataclass(frozen=True)
class StageEstimate:
    """Memory and time of a stage."""

    bytes: int  # peak memory on the device
    seconds: float  # in total


def estimate_stages(plan: EvaluationPlan, encoders: Sequence[EncoderInfo], missing: int) -> dict[str, StageEstimate]:
    """Predict every stage with this many pictures to generate, print it, and refuse what does not fit on a card."""
    config, device = plan.session.config, plan.session.device
    first = plan.shots[0].request
    on_card = device.type == "cuda"
    card = card_at_hand(device) if on_card else None
    speeds, source = speeds_at_hand(config.output.cache_folder, card[0] if card else None)
    recorders, stages = Recorders(partial(Recorder, on_card)), dict[str, StageEstimate]()
    if missing:
        # all prompts, as if none were cached
        taken = simulate_stage(config, "text", card[0].capability if card else CAPABILITY, recorders).bytes
        prompts = len({text for shot in plan.shots for text in shot.request.texts})
        once = sum(section_seconds(recorder.sections, speeds) for recorder in recorders.values())
        stages["text"] = StageEstimate(taken, prompts / (2 * BATCH) * once)
        batch = min(plan.session.speed.batch_size, len(plan.shots))  # pictures generated together
        generation, precision = Recorder(on_card), precision_of(config, plan.points[-1].weights)
        size = generation_bytes(config, first, precision, batch, generation)
        steps = first.steps / min(SIMULATED, first.steps) / batch
        stages["draw"] = StageEstimate(size, missing * steps * section_seconds(generation.sections, speeds))
        decoding = Recorder(on_card)
        size = decoding_bytes(config, first, decoding)
        stages["decode"] = StageEstimate(size, missing * section_seconds(decoding.sections, speeds))
    images = len(plan.points) * len(plan.shots) + len(plan.real)
    for about in encoders:
        seen = Recorder(on_card)
        size = encoding_bytes(about, seen)
        stages[about.title] = StageEstimate(size, images * section_seconds(seen.sections, speeds))
    forget_values()
    say(f"predict by speeds {source}")
    for name, stage in stages.items():
        say(f"predict {name}: {stage.bytes / MIB:,.0f} MiB, {duration(stage.seconds)}")
    if card is not None:
        for name, stage in stages.items():
            remedy = "--resident-blocks 0 or --vae-tile 512" if name in ("draw", "decode", "text") else "--device cpu"
            if short := shortage(f"evaluate: {name}", stage.bytes, *card):
                raise UserError(f"{short}. Use {remedy}")
    return stages


def speeds_at_hand(cache: Path, card: Card | None) -> tuple[Speeds, str]:
    """Return the speeds of the card, or of this CPU, and their origin; the cache folder has calibrations."""
    if card is not None:
        speeds, _, source = speeds_of(card, cache)
        return speeds, source
    file = constants_file(cache, cpu_name(), torch.get_num_threads(), "cpu")
    if file.exists():
        constants = read_constants(file)
        return CalibratedSpeeds(constants), f"calibrated on {constants.device}, {constants.date}"
    from simpletune.estimate.timing.cpu_speed import current_cpu_speeds

    return current_cpu_speeds(), "measured on this CPU now"


def encoding_bytes(about: EncoderInfo, recorder: Recorder) -> int:
    """Return the peak memory of one picture in an encoder; record the operations."""
    kind = about.kind
    with fake_tensors(), pause_collection(), silence():
        model = kind.empty(about).float()
        side = kind.side(model.config)
        with accounting_of(all_tensors(model), recorder) as accounting, torch.no_grad():
            pixels = torch.zeros(1, 3, side, side)
            if kind.reads_prompts:
                model.get_image_features(pixel_values=pixels)
            else:
                model(pixel_values=pixels)
    return accounting.peak.bytes
