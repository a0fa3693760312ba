"""The rows of ``inference``: different ways to draw the same pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

IMAGES = 4


@dataclass(frozen=True)
class Way:
    """One way to draw.

    Args:
        diffusers: use diffusers' pipeline.
        cached: read prompts from the cache; if false, every round loads the encoders and encodes them.
        weights: ``precision.weights``; None: the type of diffusers' weights.
        lora: live, fused, or none.
        batch: pictures per pass.
        reuse: steps that share one guidance difference.
        guided: use classifier-free guidance.
        compiled: compile the blocks.
        memory: options of ``memory``.
        steps: share of the sampling steps to take.
        more_steps: of a row with fewer steps, the row that takes all of them and is otherwise the same.
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
    steps: float = 1.0
    more_steps: str = ""


PLAN, STREAMED = ("modulation", "plan"), ("resident_blocks", 0)
BASELINE, BASELINE_LORA = "diffusers", "diffusers, LoRA r16"
ROWS: dict[str, Way] = {
    BASELINE: Way(diffusers=True),
    "simpletune, prompts new": Way(cached=False),
    "simpletune": Way(),
    f"batch {IMAGES}": Way(batch=IMAGES),
    "modulation plan": Way(memory=(PLAN,)),
    "compiled blocks": Way(compiled=True),
    "exact, together": Way(batch=IMAGES, memory=(PLAN,), compiled=True),
    "lossy: guidance difference for 2 steps": Way(reuse=2),
    "lossy, with the exact ones": Way(batch=IMAGES, memory=(PLAN,), compiled=True, reuse=2),
    "half the steps": Way(steps=0.5, more_steps="simpletune"),
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
COLUMNS = {
    "what": "", "seconds_per_picture": "s/picture", "pictures_per_second": "pictures/s",
    "faster": "times diffusers, equal steps", "fewer_steps": "times more by fewer steps",
    "encode": "encode, s", "denoise": "denoise, s", "decode": "decode, s", "peak_mib": "peak, MiB",
    "differs": "latents differ by", "first": "load and first picture, s",
}  # fmt: skip
ABOUT = """\
{model}, {size} px, {steps} steps, guidance {guidance:g}, {pictures} pictures per round from one prompt, {compute}
computation, fastest of {rounds} rounds, one process. *Encode*: prompt and negative prompt, divided by the pictures of a
round; *prompts new* loads the text encoders for it, the other rows read the cache; diffusers keeps its encoders in
memory. *Times more by fewer steps*: what a row with fewer steps gains over the same row with all of them, whose
*times diffusers* it repeats, so that drawing faster and drawing less are told apart. *Peak*: {peak}. *Latents differ
by*: root mean square difference from diffusers' latents with the same seeds and LoRA, maximum over the pictures;
latents have a variance of about 1. Rows with other precisions, with fewer steps, without guidance, and rows marked
lossy draw pictures that differ from diffusers'; all others agree up to rounding. *Times diffusers*: on the CPU
relative to rounds of diffusers interleaved with the row's own, so that other work on the machine slows both; on a
GPU relative to diffusers' row. The deviation of diffusers' own rows from 1 is the table's noise."""
