"""Graphics cards by name: how much memory a program finds on them, and how fast they are. Imports no torch."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from simpletune.options import UserError

GIB = 2**30
FOUND = 0.965  # of what a consumer card is sold with: torch finds 11.75 GiB of 12, 5.80 of 6, 23.68 of 24
FOUND_WITH_ECC = 0.9175  # of GDDR6 with error correction: torch finds 14.75 GiB of a T4's 16, 22.03 of an L4's 24
LINK_3, LINK_4, LINK_5 = 12.0, 24.0, 48.0  # GB/s that 16 lanes of PCI Express move in one direction


@dataclass(frozen=True)
class Card:
    """A card, as its maker describes it.

    Args:
        name: short.
        gib: of memory, as sold.
        capability: CUDA's compute capability.
        tflops: dense products of bf16, fp16 where there is no bf16, in fp32 sums; None: not known.
        bandwidth: of its memory, GB/s; None: not known.
        link: to the host, GB/s.
        found: share of ``gib`` that torch finds.
    """

    name: str
    gib: float
    capability: tuple[int, int]
    tflops: float | None = None
    bandwidth: float | None = None
    link: float = LINK_4
    found: float = FOUND

    @property
    def driver(self) -> str:
        """A pattern of the name that CUDA gives it; several sizes of a card share one."""
        words = re.findall(r"[A-Z]+\d*|\d+|[a-z]+", self.name.partition("-")[0])
        model = re.sub(r"(RTX)(\d)", r"\1 ?\2", "".join(words)).replace("Ti", " ?Ti")
        return rf"\b{model}\b(?! ?(?:Ti|SUPER|Super|Laptop|D|Ada|NVL|PCIe)\b)"

    @property
    def bytes(self) -> int:
        """What torch finds: ``torch.cuda.get_device_properties().total_memory``."""
        return int(self.gib * self.found * GIB)

    @property
    def has_bf16(self) -> bool:
        """Whether its tensor cores multiply bf16."""
        return self.capability >= (8, 0)


# Source: NVIDIA's data sheets and architecture papers; dense figures. What torch finds: error messages of users.
CARDS = (
    Card("T4", 16, (7, 5), 65, 320, LINK_3, FOUND_WITH_ECC),
    Card("V100-16GB", 16, (7, 0), 125, 900, LINK_3, 0.985),
    Card("L4", 24, (8, 9), 121, 300, found=FOUND_WITH_ECC),
    Card("A10G", 24, (8, 6), 70, 600, found=FOUND_WITH_ECC),
    Card("A10", 24, (8, 6), 125, 600, found=FOUND_WITH_ECC),
    Card("L40S", 48, (8, 9), 362, 864, found=FOUND_WITH_ECC),
    Card("A100-40GB", 40, (8, 0), 312, 1555, found=0.985),
    Card("A100-80GB", 80, (8, 0), 312, 2039, found=0.985),
    Card("H100", 80, (9, 0), 989, 3350, LINK_5, 0.985),
    Card("H200", 141, (9, 0), 989, 4800, LINK_5, 0.985),
    Card("RTX2060", 6, (7, 5), 26, 336, LINK_3),
    Card("RTX3050-8GB", 8, (8, 6), 18, 224, LINK_4 / 2),
    Card("RTX3060-12GB", 12, (8, 6), 25, 360),
    Card("RTX3060-6GB", 6, (8, 6), 25, 336),
    Card("RTX3070", 8, (8, 6), 41, 448),
    Card("RTX3080-10GB", 10, (8, 6), 60, 760),
    Card("RTX3090", 24, (8, 6), 71, 936),
    Card("RTX4060", 8, (8, 9), 30, 272, LINK_4 / 2),
    Card("RTX4060Ti-16GB", 16, (8, 9), 44, 288, LINK_4 / 2),
    Card("RTX4070", 12, (8, 9), 58, 504),
    Card("RTX4080", 16, (8, 9), 97, 717),
    Card("RTX4090", 24, (8, 9), 165, 1008),
    Card("RTX5070Ti", 16, (12, 0), 88, 896, LINK_5),
    Card("RTX5080", 16, (12, 0), 113, 960, LINK_5),
    Card("RTX5090", 32, (12, 0), 210, 1792, LINK_5),
)


def card_of(text: str) -> Card:
    """The card of a name, or one with so many GiB: ``L4``, ``rtx 4090``, ``12 GiB``, ``12GB``.

    A plain size is taken as what a consumer card is sold with, of the generation of the L4.

    Raises:
        UserError: it is neither.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*Gi?B?", text.strip(), re.IGNORECASE)
    if size:
        if not 0 < float(size[1]) <= 1024:
            raise UserError(f"--device: {text} is no size of a card. Use 1 to 1024 GiB")
        return Card(f"{size[1]} GiB", float(size[1]), (8, 9))
    by_name = {_plain(card.name): card for card in CARDS}
    begun = [card for name, card in by_name.items() if name.startswith(_plain(text))]
    found = by_name.get(_plain(text)) or (begun[0] if len(begun) == 1 else None)
    if found is not None:
        return found
    near = [by_name[name].name for name in difflib.get_close_matches(_plain(text), by_name, cutoff=0.4)]
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    names = ", ".join(card.name for card in CARDS)
    raise UserError(f"--device: {text!r} is not known. {hint}Give its memory, as in --device 16GiB, or one of {names}")


def card_named_by_driver(name: str, total: int, capability: tuple[int, int]) -> Card:
    """The card at hand.

    Args:
        name: as CUDA gives it, such as ``NVIDIA GeForce RTX 4090``.
        total: bytes that torch finds.
        capability: of the device.
    """
    like = min(cards_like(name), key=lambda card: abs(card.bytes - total), default=None)
    gib = total / GIB
    if like is None:
        return Card(name, gib, capability, found=1.0)
    return Card(name, gib, capability, like.tflops, like.bandwidth, like.link, found=1.0)


def cards_like(name: str) -> list[Card]:
    """The cards of the table that CUDA's name of a device may mean."""
    return [card for card in CARDS if re.search(card.driver, name)]


def peak_tflops(device: str) -> float | None:
    """Dense products at the most, by a device's name as CUDA gives it; None: not known."""
    return next((card.tflops for card in cards_like(device)), None)


def _plain(text: str) -> str:
    """Letters and digits in lower case, without the maker's words."""
    words = re.sub(r"nvidia|geforce|tesla|quadro", "", text.lower())
    return re.sub(r"[^a-z0-9]", "", words)
