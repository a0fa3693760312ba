"""Predict the memory of drawing pictures before anything is loaded, and refuse what does not fit on the card."""

from __future__ import annotations

from collections.abc import Sequence

from simpletune.commands.generate.session import GenerationSession
from simpletune.estimate.generate_memory import decoding_bytes, generation_bytes
from simpletune.estimate.job_estimate import MIB, needed
from simpletune.estimate.run_estimate import WITHOUT_GPU, card_at_hand
from simpletune.estimate.simulate.simulate_stages import simulate_stage
from simpletune.runs.weights import Weights, precision_of
from simpletune.stages.sample import PictureRequest
from simpletune.system.console import say
from simpletune.system.options import UserError


def require_memory(session: GenerationSession, models: Sequence[Weights], requests: Sequence[PictureRequest]) -> None:
    """Predict and print the memory of every stage; on the CPU nothing is refused.

    Text encoders, transformer and autoencoder are never in memory together."""
    config = session.config
    card, held = card_at_hand(session.device) if session.device.type == "cuda" else (None, 0)
    largest = max(requests, key=lambda request: (request.width * request.height, request.guidance > 1))
    precisions = {precision_of(config, weights).weights: precision_of(config, weights) for weights in models}
    batch = min(session.speed.batch_size, len(requests))
    stages = {
        "text": simulate_stage(config, "text", WITHOUT_GPU if card is None else card.capability).bytes,
        "draw": max(generation_bytes(config, largest, precision, batch) for precision in precisions.values()),
        "decode": decoding_bytes(config, largest),
    }
    for name, size in stages.items():
        say(f"predict {name}: {size / MIB:,.0f} MiB")
        if card is not None and needed(size) + held > card.bytes:
            raise UserError(
                f"{name} needs {needed(size) / MIB:,.0f} MiB (predicted) and {card.name} has "
                f"{(card.bytes - held) / MIB:,.0f} free. Draw smaller pictures, or end what uses the card"
            )
