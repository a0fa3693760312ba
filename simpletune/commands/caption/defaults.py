"""Choose the model that captions if none is named, by the memory of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from simpletune.estimate.job_estimate import largest_peak
from simpletune.system.gpus import Card

WORK = 2**29  # bytes besides the weights for a picture of 1024 x 1024; about 180 MiB are predicted for Qwen3-VL-4B


@dataclass(frozen=True)
class KnownModel:
    """A model on the hub."""

    name: str
    gigabytes: float  # of its download, 1e9 bytes, as public repositories state it; the hub tells the exact size first
    writes: str = "sentences"

    def download(self) -> str:
        """Say how large the download is and where it comes from."""
        return f"{self.gigabytes:.1f} GB from huggingface.co/{self.name}, fetched once"


SMALLEST = KnownModel("florence-community/Florence-2-base", 0.5)
CAPTIONERS = (  # the best first; saved in 16 bits, so the download is as large as the weights in memory
    KnownModel("Qwen/Qwen3-VL-4B-Instruct", 8.9),
    KnownModel("Qwen/Qwen3-VL-2B-Instruct", 4.3),
    SMALLEST,
)
TAGGER = KnownModel("SmilingWolf/wd-vit-tagger-v3", 0.4, "tags")


def default_model(card: Card | None, held: int = 0, precision: str = "bf16") -> KnownModel:
    """Return the best model that fits on a card where other programs use ``held`` bytes; without a card the smallest,
    which a CPU runs fastest."""
    if card is None:
        return SMALLEST
    scale = 2 if precision == "fp32" else 1
    room = largest_peak(card, held)
    return next((each for each in CAPTIONERS if scale * each.gigabytes * 1e9 + WORK <= room), SMALLEST)
