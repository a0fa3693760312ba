"""Seconds of recorded work on a card that has not been calibrated, from published constants, each with its source.

Products run at the rate measured for large ones on such a card, or at a fraction of its data sheet's rate, and slower
if their tiles do not fill the card. Memory traffic runs at a fraction of the data sheet's bandwidth. Every kernel takes
a minimum time. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from simpletune.engine.memory.cuda_libraries import attention_kernel
from simpletune.estimate.timing.speeds import ITEM, LINK, SCALES, Extents, HostSpeeds
from simpletune.system.gpus import CARDS, Card, cards_like

# TFLOP/s of large products in 16 bits and in fp32 by torch, measured by others: github.com/zzc0721/
# torch-performance-test-data, database.md at commit 0785868 (best of squares of 1024 to 10240; where bf16 and fp16 or
# several machines are listed, their mean), its issues 104 (RTX5080), 114 (RTX3080) and 120 (L4: squares of 8192 and
# more, which its 72 W allow for long; 71 for a moment), and github.com/lablup/mlxcel/issues/1654 (V100). H200 and A100
# agree with others' 790 and 268 TFLOP/s.
PRODUCTS = {
    "T4": (42.3, 4.3), "V100": (97.5, 14.0), "L4": (56.6, 10.9), "L40S": (267, 46.9), "A100-40GB": (247, 18.1),
    "A100-80GB": (262, 19.2), "H100": (773, 52.1), "H200": (775, 51.3), "RTX3080": (64.4, 21.0),
    "RTX3090": (76.1, 24.7), "RTX4090": (165, 54.1), "RTX5080": (102.7, 33.1), "RTX5090": (235, 68.4),
}  # fmt: skip
# Shares of the data sheet's rates where no measurement was found: medians of those above, which are 0.47 to 0.84 in 16
# bits, and 0.91 to 1.12 for GeForce cards, whose clocks exceed those of their data sheets (1 is assumed).
OTHERWISE, OTHERWISE_GEFORCE = (0.78, 0.8), (1.0, 0.65)
OF_BANDWIDTH = 0.85  # of the data sheet's: H200 4.3 of 4.8 TB/s, measured by others; L4 270 of 300 GB/s, assumed
# Attention's operations forward and backward, at shares of the products' rate if its tiles fill the card, by kernel
# (``cuda_libraries.attention_kernel``). Flash is FlashAttention-2: up to 73 and 63% of an A100's peak
# (arXiv:2307.08691, abstract), less with heads of width 64, where large products reach 79%. It has Ampere's
# instructions: Hopper runs 312 and 280 TFLOP/s of width 64 for 4,096 tokens (flash-attention#2688, whose card is known
# by its rates), 370 and 290 of width 128 (#1791); a B200 about 360 and 315 of width 64 (#1589), the same assumed of
# 128. Efficient: 20 TFLOP/s forward for a T4's long rows (#2379: 66% of the peak is 2.19 times as fast), fewer assumed
# for ours; backward half of flash's (xformers#362, flash-attention#416). The numbers are Dao-AILab/flash-attention's.
ATTENTION = {
    "flash": (0.8, 0.65), "flash on Hopper, narrow": (0.4, 0.36), "flash on Hopper": (0.48, 0.375),
    "flash on Blackwell": (0.2, 0.18), "efficient": (0.4, 0.3),
}  # fmt: skip
NARROW = 64  # of a head
HOPPER, BLACKWELL = 9, 10  # major versions of data-centre cards
# A sum of products in 16 bits takes as long as one with so many terms more, at the start and end of a tile, on the
# data-centre cards whose memory is fastest: cuBLAS computes 515, 614 and 722 TFLOP/s with 2,048 rows and sums of 2,048,
# 4,096 and 8,192 on an H100 (triton-lang/triton#2339), 143 to 177 for squares of 1,536 to 3,072 on an A100 (#6523). An
# RTX 4090's squares of 2,040 reach 0.95 of its best rate (pytorch#181718). Rates of ``PRODUCTS`` are of long sums.
MORE_TERMS, LONG, SHORTEST = 700, 8192, 512
WIDE = ((8, 0), (9, 0), (10, 0))  # these cards
# Times the rate of bf16 products: twice the data sheet's, less the kernel's scales; assumed. GeForce cards multiply
# bf16 at half of the others' rate when they sum in fp32, as torch does, and int8 at the whole (NVIDIA's architecture
# papers, dense: RTX 3060 101 to 25, 3090 284 to 71, 4090 660 to 165, 5090 838 to 210). For the input's gradient as
# well: for 64 instructions of the tensor cores, which take 1,024 cycles, its machine code for sm_89 has 64
# permutations of bytes and 32 loads of words from shared memory (tile 256x64x64 of benchmarks/results/kernels).
INT8, INT8_GEFORCE = 1.9, 3.8
CONVOLUTION = 0.7  # of the products' rate; assumed
# cuDNN convolves fp32 in TF32 on tensor cores, which torch allows by default (its notes on CUDA semantics): at half the
# rate of 16 bits, in data sheets and as measured (source of PRODUCTS, TFLOP/s: L4 26, RTX 4090 86, A40 59).
TF32, TF32_FROM = 0.5, (8, 0)
KERNEL = 2.5e-6  # seconds of the smallest kernel; the order of magnitude seen on calibrated cards
TILE = 128  # rows and columns that a thread block computes
SMALL_TILE = 64  # rows and columns of the int8 kernels' small tiles
UNKNOWN_BANDWIDTH, UNKNOWN_MULTIPROCESSORS = 300.0, 58  # an L4's
# Seconds of the host for its tasks, without the driver's part: fitted to benchmarks/results/cpu/host.json, steps of
# SD3, SD 1.5 and SDXL with LoRA, LoKr, int8, int8 products and nf4 over a stub of the driver, by
# ``benchmarks.host.fitted`` from the fit to SD3 and SD 1.5 alone, and that from what the tasks take in loops.
# tests/benchmarks/test_host.py compares them and prints a new fit.
HOST = {
    "operation": 13e-6, "view": 4.4e-6, "recorded": 1.2e-6, "backward": 2.8e-6, "module": 3.4e-6, "function": 16e-6,
    "function_backward": 14e-6, "recomputed": 52e-6, "kernel": 53e-6, "tuned": 68e-6,
}  # fmt: skip
CORE = 1.4e-4  # seconds of host_probes.core_seconds on that core: 1.06 times the 1.32e-4 of its least loop
LAUNCH = 2.5e-6  # the driver's part of each kernel's launch: 2 to 3 us; assumed where it was not measured
TWICE_READ = {
    "norm_backward": 1.3, "softmax": 1.2, "strided": 1.5, "group_norm": 1.5, "group_norm_backward": 1.5,
    "unpack_nf4": 1.5,
}  # fmt: skip
"""Factors on the traffic of kinds that do not stream; assumed."""


class DatasheetSpeeds:
    """Speeds of a card by its data sheet; an L4's if only the card's memory is known.

    Args:
        host: what was measured of the machine that holds the card; None: it is not known.
    """

    cuda = True
    rates: Mapping[str, float] = {}  # no single figure is known: curves and shares of the data sheet's rates serve

    def __init__(self, card: Card, host: HostSpeeds | None = None):
        self.card, self.measured = card, host
        self._host = 1.0 if host is None else host.core / CORE
        self.launch = self._host * LAUNCH if host is None or host.launch is None else host.launch
        to_device, to_host = (None, None) if host is None else (host.to_device, host.to_host)
        self._link = {"to_device": to_device or card.link, "to_host": to_host or card.link}
        self.is_known = card.tflops is not None
        self._rate, self._fp32 = (rate * 1e12 for rate in products_of(card))
        self._bandwidth = (card.bandwidth or UNKNOWN_BANDWIDTH) * 1e9 * OF_BANDWIDTH
        self._multiprocessors = card.multiprocessors or UNKNOWN_MULTIPROCESSORS

    def host(self, what: str) -> float:
        """Return the host's seconds for one of its tasks."""
        return self._host * HOST[what]

    def seconds(self, kind: str, dtype: str, extents: Extents) -> float:
        """Predict the seconds of one kernel."""
        if kind in LINK:
            return KERNEL + extents[0] / (self._link[kind] * 1e9)
        if kind == "bias":  # part of the product's kernel
            return 0.0
        if kind == "each":
            count, size = extents
            return max(1, round(count / SCALES)) * KERNEL + size / self._bandwidth
        if kind.startswith(("product", "int8_product", "int8_gradient")):
            m, n, k = extents
            is_int8 = kind.startswith("int8")
            times = INT8_GEFORCE if is_geforce(self.card) else INT8
            rate = self._rate * times if is_int8 else self._rate_of(dtype)
            moved = (m * k + n * k) * (1 if is_int8 else ITEM[dtype]) + m * n * ITEM[dtype]
            filled = self._filled_share_in_int8(m, n) if is_int8 else self._filled_share(m, n, k)
            if not is_int8 and dtype != "fp32" and min(m, n) >= TILE and self.card.capability in WIDE:
                filled *= (1 + MORE_TERMS / LONG) / (1 + MORE_TERMS / max(k, SHORTEST))
            return KERNEL + max(2 * m * n * k / rate / filled, moved / self._bandwidth)
        if kind.startswith("attention"):
            heads, queries, keys, width = extents
            forward, backward = ATTENTION[self.attention(dtype, width, "masked" in kind)]
            products, share = (5, backward) if kind.endswith("_backward") else (2, forward)
            operations = products * 2 * heads * queries * keys * max(width, 32)
            return KERNEL + operations / (self._rate_of(dtype) * share) / self._filled_share(heads * queries, TILE)
        if kind.startswith("convolution"):
            pixels, inputs, outputs = extents
            moved = ITEM[dtype] * (pixels * (inputs + outputs) + 9 * inputs * outputs)
            rate = self._rate_of(dtype)
            if self.card.capability >= TF32_FROM:
                rate = max(rate, self._rate * TF32)
            work = 18 * pixels * inputs * outputs / (rate * CONVOLUTION)
            return KERNEL + max(work / self._filled_share(pixels, outputs), moved / self._bandwidth)
        return KERNEL + TWICE_READ.get(kind, 1.0) * extents[0] / self._bandwidth

    def _rate_of(self, dtype: str) -> float:
        """Return the operations per second of products in a type."""
        return self._fp32 if dtype == "fp32" else self._rate

    def attention(self, dtype: str, width: int, masked: bool = False) -> str:
        """Return the kernel that torch chooses for a type and heads of a width, as ``ATTENTION`` names it."""
        kernel, major = attention_kernel(self.card.capability, dtype, masked=masked), self.card.capability[0]
        if kernel == "flash" and major == HOPPER:
            return "flash on Hopper, narrow" if width <= NARROW else "flash on Hopper"
        return "flash on Blackwell" if kernel == "flash" and major == BLACKWELL else kernel

    def _filled_share(self, m: int, n: int, k: int = 0) -> float:
        """Return the fraction of the card that a product's tiles fill; long sums are split over idle
        multiprocessors."""
        tiles = math.ceil(m / TILE) * math.ceil(n / TILE) * max(1, min(16, k // 1024))
        waves = math.ceil(tiles / self._multiprocessors)
        whole = m * n / (math.ceil(m / TILE) * math.ceil(n / TILE) * TILE * TILE)
        return tiles / (waves * self._multiprocessors) * max(whole, 1 / TILE)

    def _filled_share_in_int8(self, m: int, n: int) -> float:
        """Return the fraction of the card that the int8 kernels' tiles fill. They do not split sums, but tuning finds
        smaller tiles where the usual ones would leave multiprocessors idle."""
        tile = TILE if math.ceil(m / TILE) * math.ceil(n / TILE) >= self._multiprocessors else SMALL_TILE
        tiles = math.ceil(m / tile) * math.ceil(n / tile)
        waves = math.ceil(tiles / self._multiprocessors)
        return m * n / (waves * self._multiprocessors * tile * tile)


def products_of(card: Card) -> tuple[float, float]:
    """Return TFLOP/s of a card's large products, in 16 bits and in fp32; an L4's if the card is unknown."""
    if card.tflops is None or card.fp32_tflops is None:
        return PRODUCTS["L4"]
    named = [each for each in CARDS if each.name == card.name] or cards_like(card.name)
    for like in sorted(named, key=lambda each: abs(each.gib - card.gib)):
        name = like.name if like.name in PRODUCTS else like.name.partition("-")[0]
        measured, of = PRODUCTS.get(name), next(each for each in CARDS if name in (each.name, each.name.split("-")[0]))
        if measured is not None and of.tflops and of.fp32_tflops:  # an H100-PCIe's are scaled from an H100's
            return card.tflops * measured[0] / of.tflops, card.fp32_tflops * measured[1] / of.fp32_tflops
    share, share_fp32 = OTHERWISE_GEFORCE if is_geforce(card) else OTHERWISE
    return card.tflops * share, card.fp32_tflops * share_fp32


def is_geforce(card: Card) -> bool:
    """Return whether a card of the table is a GeForce, which sums 16-bit products in fp32 at half rate."""
    return card.tflops is not None and card.half_rate
