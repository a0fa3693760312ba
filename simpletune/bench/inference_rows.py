"""The rows of ``bench inference``: ways to draw the same pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PICTURES = 4


@dataclass(frozen=True)
class Way:
    """One way to draw.

    Args:
        diffusers: with diffusers' pipeline.
        cached: whether prompts are read from the cache; if not, every round encodes them, encoders loaded for it.
        weights: ``precision.weights``; None: as diffusers holds them.
        lora: live, fused, or none.
        batch: pictures drawn together.
        reuse: steps for which one guidance difference serves.
        guided: with classifier-free guidance.
        compiled: blocks compiled.
        memory: options of ``memory``.
    """

    diffusers: bool = False
    cached: bool = True
    weights: str | None = None
    lora: str = ""
    batch: int = 1
    reuse: int = 1
    guided: bool = True
    compiled: bool = False
    memory: tuple[tuple[str, Any], ...] = ()


PLAN, STREAMED = ("modulation", "plan"), ("resident_blocks", 0)
BASELINE, BASELINE_LORA = "diffusers", "diffusers, LoRA r16"
ROWS: dict[str, Way] = {
    BASELINE: Way(diffusers=True),
    "simpletune, prompts new": Way(cached=False),
    "simpletune": Way(),
    f"batch {PICTURES}": Way(batch=PICTURES),
    "modulation plan": Way(memory=(PLAN,)),
    "compiled blocks": Way(compiled=True),
    "exact, together": Way(batch=PICTURES, memory=(PLAN,), compiled=True),
    "lossy: guidance difference for 2 steps": Way(reuse=2),
    "lossy, with the exact ones": Way(batch=PICTURES, memory=(PLAN,), compiled=True, reuse=2),
    "no guidance": Way(guided=False),
    BASELINE_LORA: Way(diffusers=True, lora="live"),
    "LoRA r16": Way(lora="live"),
    "LoRA r16, fused": Way(lora="fused"),
    "int8": Way(weights="int8"),
    "int8, plan": Way(weights="int8", memory=(PLAN,)),
    "nf4, plan": Way(weights="nf4", memory=(PLAN,)),
    "int8, plan, every block streamed": Way(weights="int8", memory=(PLAN, STREAMED)),
    f"{BASELINE}, again at the end": Way(diffusers=True),
}
