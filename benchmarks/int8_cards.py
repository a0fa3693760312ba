"""``int8-cards``: predicted seconds of LoRA steps with and without int8 products and gradients, by card."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.predicted_seconds import config_of
from benchmarks.table import Results, describe_machine
from simpletune.estimate.planning import INT8_PRODUCTS, gains_by_int8
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.timing.datasheet import CORE, LAUNCH, DatasheetSpeeds
from simpletune.estimate.timing.sections import StreamWork
from simpletune.estimate.timing.speeds import HostSpeeds
from simpletune.estimate.timing.timeline import step_seconds
from simpletune.system.gpus import Card, find_card
from simpletune.system.options import Json

CARDS = [*map(find_card, ("RTX3060-12GB", "RTX3090", "RTX4060Ti-16GB", "RTX4090", "L4", "A100-40GB", "H100"))]
RECORDED = find_card("L4")  # all of the cards run the same kernels, with the same attention
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {  # checkpointed, as on a card that holds the bf16 base
    "SD3 Medium": ("configs/more/sd3_medium_lora_r16_int8.json", ("memory.modulation=resident",)),
    "SDXL": ("configs/sdxl_lora_12gb.json", ("memory.checkpointing=all",)),
    "FLUX.2 klein 4B": ("configs/klein_lora_12gb.json", ("memory.feed_forward=auto",)),
}
PLAIN = ("precision.weights=bf16",)
PRODUCTS = tuple(each for each in INT8_PRODUCTS if "rotation" not in each)
KINDS = {"bf16": PLAIN, "int8": PRODUCTS, "rotated": INT8_PRODUCTS}
SLOW_LAUNCH = 30e-6  # seconds, of the dearer of two virtual machines measured
COLUMNS = {
    "what": "model, card", "bf16": "bf16, s", "int8": "int8 products and gradients, s", "rotated": "rotated, s",
    "ratio": "rotated / bf16", "slow_bf16": "bf16, slow launches, s", "slow_rotated": "rotated, slow launches, s",
    "slow_ratio": "rotated / bf16", "proposed": "`plan` proposes them",
}  # fmt: skip
ABOUT = f"""\
A training step of a LoRA of rank 16 at 1024 px with batch 1 and all blocks checkpointed, predicted from the cards' data
sheets: weights in bf16; in int8, with products and input gradients in int8; and those with
`precision.rotation=hadamard`. None of these cards has run the int8 steps. The host is that of its [measured
part](host.md), with launches of {LAUNCH * 1e6:g} us; *slow launches*: of {SLOW_LAUNCH * 1e6:g} us, as in virtual
machines that were measured. Elsewhere they lie between. The longer of card and host counts, so that int8 products,
which queue more, lose where the host limits: SDXL, whose kernels are small, on fast cards, and everything on a slow
host. With `precision.products=auto` a run times both kinds on its own card and host."""


def run(folder: Path, minutes: float, only: str = "") -> Path:
    """Predict the missing rows, and write the table."""
    results = Results(folder / "int8_cards", COLUMNS, "int8-cards")
    recorded: dict[tuple[str, str], Sequence[StreamWork]] = {}
    rows = {f"{model}, {card.name}": partial(predicted, card, model, recorded) for model in MODELS for card in CARDS}
    results.measure(rows, minutes, only, lambda row: f"{row['bf16']:.3f} s, rotated {row['rotated']:.3f} s")
    return results.write_table("int8 products by card", ABOUT, describe_machine())


def predicted(card: Card, model: str, recorded: dict[tuple[str, str], Sequence[StreamWork]]) -> Json:
    """Predict a model's steps on a card, recording those that have not been."""
    found: Json = {}
    for kind, overrides in KINDS.items():
        if (model, kind) not in recorded:
            recorded[model, kind] = sections_of(model, overrides)
        for name, launch in (("", None), ("slow_", SLOW_LAUNCH)):
            speeds = DatasheetSpeeds(card, HostSpeeds(core=CORE, launch=launch))
            found[f"{name}{kind}"] = step_seconds(recorded[model, kind], speeds).seconds
    for name in ("", "slow_"):
        found[f"{name}ratio"] = round(found[f"{name}rotated"] / found[f"{name}bf16"], 2)
    faster = gains_by_int8(card) and found["rotated"] < found["bf16"]
    return found | {"proposed": "yes" if faster else "no"}


def sections_of(model: str, overrides: tuple[str, ...]) -> Sequence[StreamWork]:
    """Record a model's step."""
    file, own = MODELS[model]
    config = config_of(Path(file), (*own, *overrides), RECORDED)
    return simulate(config, capability=RECORDED.capability).sections
