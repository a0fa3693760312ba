"""How other tools read a family's LoRA files: what the rows are made of that a family states beside its names.

Those that stand here hold for every family. Determined from runs of diffusers 0.42.1 and, for SD3, ComfyUI v0.3.64 (on
the CPU), otherwise from their sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

TOOLS = DIFFUSERS, COMFYUI, FORGE = "diffusers", "ComfyUI", "Forge"


class Fact(StrEnum):
    """What a file may have; ``adapters.files.compatibility`` says of a header whether it does, and in which words."""

    DORA = "modules with DoRA's magnitudes, of LoRA, LoKr or LoHa"
    DECOMPOSED = "modules of LoKr or LoHa with magnitudes: their kinds"
    BY_INPUT = "magnitudes of the inputs in every module that has some"
    CONSTRAINED = "OFT whose trainer limits it to a multiple of alpha"
    OFT = "modules of OFT"
    OF_WEIGHT = "modules of DoRA or OFT, which depend on the weight"
    ALL_MAGNITUDES = "PEFT's magnitude in every module"
    NOT_ALL_SCALES = "a module without dora_scale"
    MADE_FOR_COMFYUI = "a dora_scale that ComfyUI applies exactly"
    OTHER_KINDS = "modules other than LoRA: their kinds"
    KEY_WITHOUT_LORA = "a key without 'lora' in its name: the first"
    LOKR = "modules of LoKr alone, with or without magnitudes"
    OUTSIDE = "modules outside the blocks: the first"
    TUCKER = "modules in Tucker form"
    ALPHA = "a module with a tensor of its alpha"
    NO_ALPHA = "a module without a tensor of its alpha"
    ALPHAS = "modules of different alphas"
    RANKS = "modules of different ranks, and no settings in the header"
    SETTINGS = "settings in the header: their scales"
    IGNORED = "scales other than 1 in the header alone: these scales"
    UNMATCHED = "keys that match no layer: their number and the first"
    DROPPED = "modules that the row's tool drops: their number and the first"


class Note(NamedTuple):
    """A caveat."""

    text: str  # "{}" stands for the words of the fact
    fact: Fact | None = None  # only for files with this; None: for all
    partly: bool = False  # whether a file with it is read partly


@dataclass(frozen=True)
class Verdict:
    """How tools read some files. Of a family's rows, the first that fits a tool and a file holds."""

    tools: tuple[str, ...]
    loads: str  # as in ``ToolSupport``
    notes: tuple[Note, ...] = ()
    layouts: tuple[str | None, ...] = ()  # by name; None: of several in one file; empty: of any
    facts: tuple[Fact, ...] = ()  # all of which the files have
    drops: str | None = None
    """A pattern of the modules that the tools drop; silently nothing is left if it is all of them."""


UNTESTED = Note("according to its source, untested")
UNMATCHED = Note("{}", Fact.UNMATCHED, partly=True)
MERGE = "merge it into its base instead"
UNKNOWN_TO_FORGE = 12
"""Forge (b6cfd7fc) returns the model unchanged if a file has more keys that match none of its own."""
FORMS: tuple[Verdict, ...] = (  # DoRA that this package does not train
    Verdict((DIFFUSERS,), "refuses", (Note(f"reads no {{}}: {MERGE}", Fact.DECOMPOSED),), facts=(Fact.DECOMPOSED,)),
    Verdict((DIFFUSERS,), "refuses", (Note(f"reads DoRA by outputs alone, and this one is by inputs: {MERGE}"),),
            facts=(Fact.DORA, Fact.BY_INPUT)),
)  # fmt: skip
DEPENDENT: tuple[Verdict, ...] = (  # DoRA and OFT; Forge supports neither scales per row nor rotations
    Verdict((DIFFUSERS,), "yes", layouts=("diffusers",), facts=(Fact.DORA, Fact.ALL_MAGNITUDES)),
    Verdict((DIFFUSERS,), "refuses", (Note("reads DoRA under its own names alone: export to diffusers"),),
            facts=(Fact.DORA, Fact.ALL_MAGNITUDES)),
    Verdict((DIFFUSERS,), "refuses", (Note(f"its DoRA needs lora_magnitude_vector, and this is ComfyUI's: {MERGE}"),),
            facts=(Fact.DORA, Fact.MADE_FOR_COMFYUI)),
    Verdict((DIFFUSERS,), "refuses", (Note("its DoRA needs lora_magnitude_vector: export to diffusers"),),
            facts=(Fact.DORA,)),
    Verdict((DIFFUSERS,), "refuses", (Note(f"reads no OFT: {MERGE}"),), facts=(Fact.OFT,)),
    Verdict((COMFYUI,), "yes", facts=(Fact.DORA, Fact.BY_INPUT)),
    Verdict((COMFYUI,), "yes", (Note("as plain LoRA, which is wrong: it does not know lora_magnitude_vector"),),
            facts=(Fact.DORA, Fact.NOT_ALL_SCALES)),
    Verdict((COMFYUI,), "yes", (Note("exactly; a version that divides by the norm of the sum would be wrong"),),
            facts=(Fact.DORA, Fact.MADE_FOR_COMFYUI)),
    Verdict((COMFYUI,), "yes", (Note("divides by the norms of the base's rows instead of the sum's: wrong"),),
            facts=(Fact.DORA,)),
    Verdict((COMFYUI,), "yes",
            (Note("wrongly: limits |B - B^T| to alpha, where the trainer has alpha x outputs, so its update is weaker: "
                  f"{MERGE}"),), facts=(Fact.OFT, Fact.CONSTRAINED)),
    Verdict((COMFYUI,), "yes", (Note("exactly at strength 1; strength k changes the weights by k squared"),),
            facts=(Fact.OFT,)),
    Verdict((FORGE,), "yes", (Note("according to its source, untested"),), facts=(Fact.DORA, Fact.BY_INPUT)),
    Verdict((FORGE,), "yes", (Note(f"wrongly: divides dora_scale by the norms of columns: {MERGE}"),),
            facts=(Fact.DORA,)),
    Verdict((FORGE,), "silently nothing", (Note(f"reads no OFT: {MERGE}"),), facts=(Fact.OFT,)),
)  # fmt: skip
ONLY_LORA = Verdict(
    (DIFFUSERS,), "refuses",
    (Note("reads no {}: export to diffusers with --rank, which approximates it by a LoRA", Fact.OTHER_KINDS),),
    facts=(Fact.OTHER_KINDS,),
)  # fmt: skip
