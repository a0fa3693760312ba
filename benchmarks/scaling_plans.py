"""The trainings whose scaling is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster import Job
from benchmarks.predicted_seconds import config_of
from benchmarks.published import MOSAIC, MOSAIC_BLOG, SCRATCH, SD15_FULL
from simpletune.system.gpus import find_card
from simpletune.system.prices import card_prices

SD3 = Path("configs/more/sd3_from_scratch_256.json")
LORA = Path("configs/more/sd3_medium_lora_r16_int8.json")


class Plan:
    """A training whose scaling is predicted.

    Args:
        card: which it runs on.
        config: its configuration.
        overrides: for the configuration.
        batch: pictures a step.
        pictures: of the whole training; 0: none are given.
        inside: pictures and prompts are encoded in every step.
        published: pictures a second by number of cards.
        source: who published them.
        price: dollars a card and hour; None: today's.
    """

    def __init__(self, card: str, config: Path, overrides: Sequence[str], batch: int, **more: object):
        self.card, self.config, self.overrides, self.batch = card, config, tuple(overrides), batch
        self.images = float(str(more.get("images", 0)))
        self.inside = bool(more.get("inside", False))
        given = more.get("published", {})
        self.published: dict[int, float] = given if isinstance(given, dict) else {}
        self.source = str(more.get("source", ""))
        self.price = float(str(more.get("price", card_prices()[card.lower()].per_hour)))

    def job(self) -> Job:
        """The job, with the largest micro-batch that a card takes."""
        return Job(config_of(self.config, self.overrides, find_card(self.card)), self.batch, self.inside)


PLANS = {
    "SD 2 base from scratch, 256 px": Plan(
        "A100-40GB", SD15_FULL, (*SCRATCH, "data.resolution=256", "train.batch_size=16"), 2048, images=1126.4e6,
        published={8: 1100, 16: 2180, 32: 4080, 64: 8530, 128: 11600}, source=MOSAIC, price=2,
    ),
    "SD 2 base from scratch, 512 px": Plan(
        "A100-40GB", SD15_FULL, (*SCRATCH, "data.resolution=512", "train.batch_size=16"), 2048, images=1740.8e6,
        published={8: 290, 16: 585, 32: 1195, 64: 2340, 128: 4590}, source=MOSAIC, price=2,
    ),
    "SD 2 base from scratch, 512 px, encoding in every step": Plan(
        "A100-40GB", SD15_FULL, (*SCRATCH, "data.resolution=512", "train.batch_size=4"), 2048, images=2867.2e6,
        inside=True, published={8: 128.2, 16: 254.0, 32: 485.7, 64: 912.2, 128: 1618.4}, source=MOSAIC_BLOG, price=2,
    ),
    "SD3 from scratch, 256 px": Plan("A100-80GB", SD3, (), 2048, images=1024e6),
    "SD3 from scratch, 512 px": Plan("A100-80GB", SD3, ("data.resolution=512",), 2048, images=512e6),
    "SD3 Medium, LoRA r16, int8, 1024 px": Plan("L4", LORA, ("train.gradient_accumulation=1",), 256, images=1e6),
}  # fmt: skip
