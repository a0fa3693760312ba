"""Look up graphics cards by name: usable memory, throughput, bandwidth. Imports no torch."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from simpletune.system.devices import BF16_FROM, under_wsl
from simpletune.system.options import UserError

GIB = 2**30
FOUND = 0.965  # usable share on a consumer card: torch reports 11.75 GiB of 12, 5.80 of 6, 23.68 of 24
FOUND_WITH_ECC = 0.9175  # usable share of GDDR6 with ECC: 14.75 GiB of a T4's 16, 22.03 of an L4's 24
FOUND_UNDER_WSL = 0.9  # of what torch reports: Windows moves a program's memory to the host earlier (WSL issue 41176)
LINK_3, LINK_4, LINK_5 = 12.0, 24.0, 48.0  # GB/s in one direction over 16 lanes of PCI Express 3, 4, 5


@dataclass(frozen=True)
class Card:
    """A card by its data sheet; None: unknown."""

    name: str
    gib: float  # nominal memory
    capability: tuple[int, int]  # CUDA compute capability
    tflops: float | None = None  # dense bf16 throughput with fp32 accumulation (fp16 without bf16 support)
    bandwidth: float | None = None  # of the memory, in GB/s
    link: float = LINK_4  # bandwidth to the host in GB/s
    found: float = FOUND  # share of ``gib`` that torch reports
    fp32_tflops: float | None = None  # throughput outside of the tensor cores
    multiprocessors: int | None = None

    @property
    def bytes(self) -> int:
        """The memory that torch reports (``torch.cuda.get_device_properties().total_memory``)."""
        return int(self.gib * self.found * GIB)

    @property
    def has_bf16(self) -> bool:
        """Whether the tensor cores support bf16."""
        return self.capability >= BF16_FROM


# Dense figures from NVIDIA's data sheets and architecture papers; usable memory from users' error messages.
CARDS = (
    Card("T4", 16, (7, 5), 65, 320, LINK_3, FOUND_WITH_ECC, fp32_tflops=8.1, multiprocessors=40),
    Card("V100-16GB", 16, (7, 0), 125, 900, LINK_3, 0.985, fp32_tflops=15.7, multiprocessors=80),
    Card("L4", 24, (8, 9), 121, 300, found=FOUND_WITH_ECC, fp32_tflops=30.3, multiprocessors=58),
    Card("A10G", 24, (8, 6), 70, 600, found=FOUND_WITH_ECC, fp32_tflops=31.2, multiprocessors=80),
    Card("A10", 24, (8, 6), 125, 600, found=FOUND_WITH_ECC, fp32_tflops=31.2, multiprocessors=72),
    Card("L40S", 48, (8, 9), 362, 864, found=FOUND_WITH_ECC, fp32_tflops=91.6, multiprocessors=142),
    Card("A100-40GB", 40, (8, 0), 312, 1555, found=0.985, fp32_tflops=19.5, multiprocessors=108),
    Card("A100-80GB", 80, (8, 0), 312, 2039, found=0.985, fp32_tflops=19.5, multiprocessors=108),
    Card("H100", 80, (9, 0), 989, 3350, LINK_5, 0.985, fp32_tflops=67, multiprocessors=132),
    Card("H200", 141, (9, 0), 989, 4800, LINK_5, 0.985, fp32_tflops=67, multiprocessors=132),
    Card("RTX2060", 6, (7, 5), 26, 336, LINK_3, fp32_tflops=6.5, multiprocessors=30),
    Card("RTX3050-8GB", 8, (8, 6), 18, 224, LINK_4 / 2, fp32_tflops=9.1, multiprocessors=20),
    Card("RTX3060-12GB", 12, (8, 6), 25, 360, fp32_tflops=12.7, multiprocessors=28),
    Card("RTX3060-6GB", 6, (8, 6), 25, 336, fp32_tflops=12.7, multiprocessors=28),
    Card("RTX3070", 8, (8, 6), 41, 448, fp32_tflops=20.3, multiprocessors=46),
    Card("RTX3080-10GB", 10, (8, 6), 60, 760, fp32_tflops=29.8, multiprocessors=68),
    Card("RTX3090", 24, (8, 6), 71, 936, fp32_tflops=35.6, multiprocessors=82),
    Card("RTX4060", 8, (8, 9), 30, 272, LINK_4 / 2, fp32_tflops=15.1, multiprocessors=24),
    Card("RTX4060Ti-16GB", 16, (8, 9), 44, 288, LINK_4 / 2, fp32_tflops=22.1, multiprocessors=34),
    Card("RTX4070", 12, (8, 9), 58, 504, fp32_tflops=29.1, multiprocessors=46),
    Card("RTX4080", 16, (8, 9), 97, 717, fp32_tflops=48.7, multiprocessors=76),
    Card("RTX4090", 24, (8, 9), 165, 1008, fp32_tflops=82.6, multiprocessors=128),
    Card("RTX5070Ti", 16, (12, 0), 88, 896, LINK_5, fp32_tflops=43.9, multiprocessors=70),
    Card("RTX5080", 16, (12, 0), 113, 960, LINK_5, fp32_tflops=56.3, multiprocessors=84),
    Card("RTX5090", 32, (12, 0), 210, 1792, LINK_5, fp32_tflops=104.8, multiprocessors=170),
)


def find_card(text: str) -> Card:
    """Find a card by name or by memory: ``L4``, ``rtx 4090``, ``12 GiB``, ``12GB``.

    A size means the nominal memory of a consumer card of the L4's generation.

    Raises:
        UserError: the text is neither a known card nor a size.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*Gi?B?", text.strip(), re.IGNORECASE)
    if size:
        if not 0 < float(size[1]) <= 1024:
            raise UserError(f"--device: {text} is out of range. Use 1 to 1024 GiB")
        return Card(f"{size[1]} GiB", float(size[1]), (8, 9))
    by_name = {_plain(card.name): card for card in CARDS}
    begun = [card for name, card in by_name.items() if name.startswith(_plain(text))]
    found = by_name.get(_plain(text)) or (begun[0] if len(begun) == 1 else None)
    if found is not None:
        return found
    near = [by_name[name].name for name in difflib.get_close_matches(_plain(text), by_name, cutoff=0.4)]
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    names = ", ".join(card.name for card in CARDS)
    raise UserError(f"--device: unknown card {text!r}. {hint}Give its memory, as in --device 16GiB, or one of {names}")


def card_named_by_driver(name: str, total: int, capability: tuple[int, int]) -> Card:
    """Describe the device in use by CUDA's name (``NVIDIA GeForce RTX 4090``) and the bytes of memory that torch
    reports, with figures from the table if the card is known. Under WSL, a tenth of its memory is left to Windows."""
    found = FOUND_UNDER_WSL if under_wsl() else 1.0
    like = min(cards_like(name), key=lambda card: abs(card.bytes - total), default=None)
    gib = total / GIB
    if like is None:
        return Card(name, gib, capability, found=found)
    return replace(like, name=name, gib=gib, capability=capability, found=found)


def cards_like(name: str) -> list[Card]:
    """List the cards of the table that match CUDA's device name; those that differ only in memory share one."""
    found = []
    for card in CARDS:
        words = re.findall(r"[A-Z]+\d*|\d+|[a-z]+", card.name.partition("-")[0])
        model = re.sub(r"(RTX)(\d)", r"\1 ?\2", "".join(words)).replace("Ti", " ?Ti")
        if re.search(rf"\b{model}\b(?! ?(?:Ti|SUPER|Super|Laptop|D|Ada|NVL|PCIe)\b)", name):
            found.append(card)
    return found


def file_words(name: str) -> str:
    """CUDA's name of a device as part of a file's: ``NVIDIA GeForce RTX 4090`` -> ``rtx-4090``."""
    words = re.sub(r"\b(NVIDIA|GeForce|Tesla)\b", "", name).lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


def peak_tflops(device: str) -> float | None:
    """Return the peak dense throughput of a device by its CUDA name; None if unknown."""
    return next((card.tflops for card in cards_like(device)), None)


def _plain(text: str) -> str:
    """Reduce a name to lower-case letters and digits, without brand words."""
    words = re.sub(r"nvidia|geforce|tesla|quadro", "", text.lower())
    return re.sub(r"[^a-z0-9]", "", words)
