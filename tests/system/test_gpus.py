"""Cards by every spelling of their names: the right one, or a question, never another."""

from __future__ import annotations

import itertools
import re

import pytest

from simpletune.system import gpus
from simpletune.system.gpus import CARDS, GIB, Card, card_named_by_driver, cards_like, find_card
from simpletune.system.options import UserError


def model(card: Card) -> str:
    """A card's name without its memory."""
    return re.sub(r"-\d+GB$", "", card.name)


def people_write(name: str) -> str:
    """A name as people and NVIDIA write it: ``RTX4070TiSuper`` -> ``RTX 4070 Ti SUPER``."""
    name = re.sub(r"(GTX|RTX|PRO|Quadro|TITAN)", r" \1 ", name)
    words = re.sub(r"(Ti|Super|Laptop|SFF|Ada|MaxQ)", r" \1 ", name).replace("Super", "SUPER").replace("MaxQ", "Max-Q")
    return " ".join(words.replace("-", " ").split())


def spellings(card: Card) -> list[str]:
    """Ways to write a card's name, some with its memory."""
    name = people_write(model(card))
    shorter = [name, re.sub(r"\b[RG]TX ", "", name)]
    if re.match(r"A\d{3,}", name) and card.capability == (8, 6):
        shorter.append(f"RTX {name}")
    branded = [f"{brand}{each}" for brand in ("", "NVIDIA ", "NVIDIA GeForce ") for each in shorter]
    if "Laptop" in card.name:
        branded += [each.replace("Laptop", other) for each in branded for other in ("Laptop GPU", "(Mobile)")]
    if "Ada" in card.name:
        branded += [each.replace("Ada", "Ada Generation") for each in branded]
    if "PRO" in card.name:
        branded += [f"{each} Blackwell" for each in branded] + [f"{name} Blackwell Workstation Edition"]
    sizes = ("", f" {card.gib:g}GB", f" {card.gib:g} GiB", f" ({card.gib:g} GB)", f" {card.gib:g}")
    written = [f"{each}{size}" for each, size in itertools.product(branded, sizes)]
    dashes = [each.replace(" ", "-") for each in written]
    tight = [each.replace(" ", "") for each in branded]
    tight += [f"{each}{card.gib:g}gb" for each in tight if not each.isdigit()]
    cases = itertools.cycle((str, str.lower, str.upper))
    return [case(each) for case, each in zip(cases, dict.fromkeys([*written, *dashes, *tight]), strict=False)]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_spelling_finds_its_card_or_asks_among_its_sizes(card: Card) -> None:
    sizes = {each.name for each in CARDS if model(each) == model(card)}
    assert find_card(card.name) is card
    for text in spellings(card):
        try:
            found = find_card(text).name
        except UserError as error:
            told = set(re.findall(r"(\S+) \(\d+ GiB\)", str(error)))
            assert "is the name of several cards" in str(error) and card.name in told, text
            words = re.search(r"quadro|pro|ada", text, re.IGNORECASE)
            assert told == sizes or (words is None and card.name not in sizes - told), text
        else:
            own = found == card.name or (found in sizes and found.lower() == text.lower())  # a name of the table
            assert own, f"{text}: {found}"


def test_a_name_of_several_cards_asks_and_no_name_begins_another() -> None:
    asked = {
        "RTX 4060 Ti": ["RTX4060Ti-8GB", "RTX4060Ti-16GB"],
        "NVIDIA GeForce RTX 5060 Ti": ["RTX5060Ti-8GB", "RTX5060Ti-16GB"],
        "RTX 3080": ["RTX3080-10GB", "RTX3080-12GB"],
        "RTX 3060": ["RTX3060-6GB", "RTX3060-8GB", "RTX3060-12GB"],
        "A100": ["A100-40GB", "A100-80GB"],
        "V100": ["V100-16GB", "V100-32GB"],
        "RTX 2060": ["RTX2060", "RTX2060-12GB"],
        "RTX 6000": ["QuadroRTX6000", "RTX6000Ada", "RTXPRO6000"],
        "RTX 3080 Laptop": ["RTX3080Laptop-8GB", "RTX3080Laptop-16GB"],
    }
    for text, names in asked.items():
        with pytest.raises(UserError, match="is the name of several cards") as error:
            find_card(text)
        assert re.findall(r"(\S+) \(\d+ GiB\)", str(error.value)) == names
    found = {
        "RTX 5070": "RTX5070",
        "L40": "L40",
        "L4": "L4",
        "A10": "A10",
        "RTX 4070 Super": "RTX4070Super",
        "A6000": "A6000",
        "RTX 4090 Laptop": "RTX4090Laptop",
        "GTX 1650 Ti": "GTX1650TiLaptop",
        "RTX 6000 48GB": "RTX6000Ada",
        "H100": "H100",
        "RTX 6000 Pro Max-Q": "RTXPRO6000MaxQ",
        "GeForce RTX 2070 with Max-Q Design": "RTX2070Laptop",
    }
    assert {text: find_card(text).name for text in found} == found
    for text, told in (
        ("RTX 4090 48GB", r"RTX4090Laptop \(16 GiB\), RTX4090 \(24 GiB\), or the memory alone, as in --device 48GiB"),
        ("RTX3700", r"Did you mean .*RTX3070 or .*\? Give its memory"),
        ("xx", r"unknown card 'xx'\. Give its memory, as in --device 16GiB"),
    ):
        with pytest.raises(UserError, match=told):
            find_card(text)


@pytest.mark.parametrize(
    "text", ["1080 Ti", "NVIDIA GeForce GTX 1060 6GB", "gtx980", "Titan Xp", "GTX TITAN X", "Tesla P40", "K80", "MX150"]
)
def test_a_card_before_turing_is_too_old_for_torch(text: str) -> None:
    with pytest.raises(UserError, match=r"is too old: its CUDA compute capability .* need sm_75 \(GTX 16"):
        find_card(text)


def test_names_and_figures_of_earlier_releases_hold() -> None:
    earlier = {
        "T4": (16, 65, 320),
        "V100-16GB": (16, 125, 900),
        "L4": (24, 121, 300),
        "A10G": (24, 70, 600),
        "A10": (24, 125, 600),
        "L40S": (48, 362, 864),
        "A100-40GB": (40, 312, 1555),
        "A100-80GB": (80, 312, 2039),
        "H100": (80, 989, 3350),
        "H200": (141, 989, 4800),
        "RTX2060": (6, 26, 336),
        "RTX3050-8GB": (8, 18, 224),
        "RTX3060-12GB": (12, 25, 360),
        "RTX3060-6GB": (6, 25, 336),
        "RTX3070": (8, 41, 448),
        "RTX3080-10GB": (10, 60, 760),
        "RTX3090": (24, 71, 936),
        "RTX4060": (8, 30, 272),
        "RTX4060Ti-16GB": (16, 44, 288),
        "RTX4070": (12, 58, 504),
        "RTX4080": (16, 97, 717),
        "RTX4090": (24, 165, 1008),
        "RTX5070Ti": (16, 88, 896),
        "RTX5080": (16, 113, 960),
        "RTX5090": (32, 210, 1792),
    }
    for name, figures in earlier.items():
        card = find_card(name)
        assert (card.gib, card.tflops, card.bandwidth) == figures
        assert card.half_rate == name.startswith("RTX")


def test_derived_rates_agree_with_published_ones() -> None:
    """NVIDIA's, by the boost clocks of its data sheets in MHz."""
    boost = {
        "T4": 1590,
        "L4": 2040,
        "A10": 1695,
        "L40S": 2520,
        "A40": 1740,
        "RTX2060": 1680,
        "RTX3070": 1725,
        "RTX3090": 1695,
        "RTX4060": 2460,
        "RTX4090": 2520,
        "RTX5070Ti": 2452,
        "RTX5090": 2407,
    }
    for name, clock in boost.items():
        card = find_card(name)
        assert card.multiprocessors is not None
        rates = gpus.derived_rates(card.capability, card.multiprocessors, clock, card.half_rate)
        assert rates == pytest.approx((card.tflops, card.fp32_tflops), rel=0.02), name
    published = {"A6000": 154.8, "RTX6000Ada": 364.2, "QuadroRTX6000": 130.5, "RTXPRO6000": 503.8, "TITANRTX": 130.5}
    for name, tflops in published.items():
        assert find_card(name).tflops == pytest.approx(tflops, rel=0.005), name
    for card in CARDS:
        assert 2 <= card.gib <= 270 and card.multiprocessors and card.bandwidth and card.tflops, card.name


def test_cuda_s_names_are_known_with_the_memory_that_torch_reports() -> None:
    named = {
        ("NVIDIA GeForce RTX 4060 Ti", 7.63): ("RTX4060Ti-8GB", 44),
        ("NVIDIA GeForce RTX 4060 Ti", 15.6): ("RTX4060Ti-16GB", 44),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", 5.8): ("RTX3060Laptop", 21.9),
        ("NVIDIA RTX A6000", 47.5): ("A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 47.5): ("RTX6000Ada", 364.2),
        ("Quadro RTX 6000", 23.6): ("QuadroRTX6000", 130.5),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 94.97): ("RTXPRO6000", 503.8),
        ("NVIDIA L40", 44.4): ("L40", 181),
        ("NVIDIA GH200 480GB", 94.5): ("GH200-96GB", 989),
        ("NVIDIA H100 80GB HBM3", 79.1): ("H100", 989),
        ("NVIDIA H100 PCIe", 79.1): ("H100-PCIe", 756),
        ("Tesla V100-SXM2-32GB", 31.7): ("V100-32GB", 125),
        ("NVIDIA A10-24Q", 22.0): ("A10", 125),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19.5): ("A100-40GB", 312),
    }
    for (cuda, gib), (name, tflops) in named.items():
        found = card_named_by_driver(cuda, int(gib * GIB), (8, 9))
        assert (found.name, found.tflops) == (cuda, pytest.approx(tflops, rel=0.01))
        nearest = min(cards_like(cuda), key=lambda each: abs(each.bytes - gib * GIB))
        assert nearest.name == name and abs(found.bytes - gib * GIB) <= 1
        if "MIG" not in cuda and "Q" not in cuda:
            assert find_card(f"{cuda.replace(' 480GB', '')} {gib}GiB").name == name
            assert find_card(f"{cuda.replace(' 480GB', '')} {gib * 1024:.0f} MiB").name == name
    assert cards_like("NVIDIA GB10") == [] and cards_like("AMD Radeon RX 7900 XTX") == []
