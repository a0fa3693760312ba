"""Report how other tools load a LoRA file: which ones, at what scale, and what they silently drop.

Reads the rows of the file's family (``models.shared.lora_verdicts``), and says which of their facts a file has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from simpletune.adapters.files.detect_model import TEXT_ALONE
from simpletune.adapters.files.header import LoraHeader, Module, adapter_words, not_read
from simpletune.adapters.files.keys import DECOMPOSED, DOHA, DOKR, DORA, LOKR, LORA, OFT
from simpletune.adapters.text.embedding_files import SINGLE, Keys
from simpletune.models.families import FAMILIES
from simpletune.models.shared.lora_layout import (
    ALPHA,
    DORA_MARK,
    DORA_SCALE,
    DOWN,
    MAGNITUDE,
    MID,
    OFT_BLOCKS,
    LoraNames,
)
from simpletune.models.shared.lora_verdicts import COMFYUI, DIFFUSERS, FORGE, MERGE, TOOLS, UNKNOWN_TO_FORGE, Fact
from simpletune.models.shared.lora_verdicts import UNTESTED as UNTESTED_NOTE
from simpletune.models.text_layers import ENCODERS, encoder_with, style_of
from simpletune.system.options import join_names

SIMPLETUNE = "simpletune"
A1111 = "A1111"  # tools for embeddings; Forge reads them the same way
UNTESTED = "like Forge, according to its source, untested"
CLOSE = 1e-6
NOT_IN_FORGE = (MAGNITUDE, OFT_BLOCKS)
"""Roles of keys that Forge does not read."""


@dataclass
class ToolSupport:
    """How a tool loads a file."""

    tool: str
    loads: str
    """``yes``, ``partly``, ``silently nothing`` (at most logged), ``refuses`` or ``untested``."""
    notes: list[str] = field(default_factory=list)
    """Caveats: scales that the tool reads differently, keys that it drops."""


def verdicts(header: LoraHeader, refusal: str | None, damaged: bool = False) -> list[ToolSupport]:
    """Return how each tool loads a LoRA of a known family; for other models, only why simpletune refuses it
    (``refusal``)."""
    own = ToolSupport(SIMPLETUNE, "refuses", [refusal]) if refusal else ToolSupport(SIMPLETUNE, "yes")
    names = next(iter(header.family.names), None)  # families that share a file's names share its rows
    if names is None and header.family.model != TEXT_ALONE:
        return [own]
    others = []
    for tool in TOOLS:
        found = ToolSupport(tool, "yes"), list[Module]()
        if names is not None:
            found = _of_wrapped(tool, header, names) or _of_denoiser(tool, header, names)
        verdict, dropped = found
        others.append(verdict)
        if verdict.loads in ("yes", "partly"):
            dropped += _add_text(verdict, header, names)
        if tool == FORGE and verdict.loads in ("yes", "partly"):
            _count_unknown(verdict, header, dropped)
    for verdict in others if damaged else ():
        verdict.notes.append("NaN spreads through the model: pictures are black or noise")
    return [*others, own]


def _of_wrapped(tool: str, header: LoraHeader, names: LoraNames) -> tuple[ToolSupport, list[Module]] | None:
    """Return how a tool loads a file with words of wrappers in its names, none of which it knows, or with names of no
    layer: diffusers by runs of 0.42.1, the others by their sources. None: it is neither."""
    known = (adapter_words("default"),) if tool == COMFYUI else ()
    if header.layout is not None and not any(module.layers for module in header.modules.values()):
        return ToolSupport(tool, "silently nothing", ["knows none of its names"]), []
    words = [word for word in not_read(header) if word not in known]
    if not words:
        return None
    merged = any(kind in (DOKR, DOHA) for kind in header.kinds) or any(map(header.is_by_input, header.all_modules))
    note = f"does not know names with {join_names(words, 3)}: {MERGE if merged else 'export it'}"
    inside = rf"{names.denoiser}\.(module|base_model)\."
    refuses = tool == DIFFUSERS and any(re.match(inside, name) for name in header.names)
    return ToolSupport(tool, "refuses" if refuses else "silently nothing", [note]), []


def _count_unknown(verdict: ToolSupport, header: LoraHeader, dropped: Sequence[Module]) -> None:
    """Add that Forge loads nothing of a file with too many keys that it does not know."""
    strange = [key for module in header.all_modules for role, key in module.keys.items() if role in NOT_IN_FORGE]
    lost = [key for module in dropped for key in module.keys.values()]
    unknown = list(dict.fromkeys([*strange, *lost, *header.unmatched, *header.bundled]))
    if len(unknown) <= UNKNOWN_TO_FORGE:
        return
    remedy = MERGE if strange or header.bundled else "export to kohya"
    note = f"it does not know {len(unknown)} keys, such as {unknown[0]}, and above {UNKNOWN_TO_FORGE} it loads nothing"
    verdict.loads, verdict.notes = "silently nothing", [UNTESTED_NOTE.text, f"{note}: {remedy}"]


def _of_denoiser(tool: str, header: LoraHeader, names: LoraNames) -> tuple[ToolSupport, list[Module]]:
    """Return how a tool loads the denoiser's updates, by the first row of the family that fits, and which it drops."""
    if not names.verdicts:
        return ToolSupport(tool, "untested", [f"how it reads LoRAs for {names.title} is not known"]), []
    said = {fact: words for fact, say in FACTS.items() if (words := say(header)) is not None}
    fitting = (
        row
        for row in names.verdicts
        if tool in row.tools
        and (not row.layouts or header.layout_name in row.layouts)
        and said.keys() >= set(row.facts)
    )
    row = next(fitting)
    dropped = [each for each in header.modules.values() if row.drops is not None and re.search(row.drops, each.name)]
    if dropped:
        said[Fact.DROPPED] = f"{len(dropped)} of {len(header.modules)} modules, such as {dropped[0].name}"
    notes = [note for note in row.notes if note.fact is None or note.fact in said]
    loads = "partly" if any(note.partly for note in notes) else row.loads
    loads = "silently nothing" if len(dropped) == len(header.modules) else loads
    texts = [note.text.format(said[note.fact] if note.fact else "") for note in notes]
    return ToolSupport(tool, loads, texts), dropped


def _scales(header: LoraHeader) -> str | None:
    scales = sorted({header.header_scale(module) for module in header.modules.values()}) if header.settings else []
    return ", ".join(f"{scale:g}" for scale in scales) or None


def _ignored_scales(header: LoraHeader) -> str | None:
    """Format the scales that a tool applies as 1 if it does not read the header's settings."""
    if header.settings is None:
        return None
    alone = (module for module in header.modules.values() if module.alpha is None and module.layers)
    scales = sorted({header.header_scale(module) for module in alone})
    return ", ".join(f"{scale:g}" for scale in scales if abs(scale - 1) > CLOSE) or None


def _ranks(header: LoraHeader) -> str | None:
    ranks = {header.rank(module) or 0 for module in header.modules.values() if DOWN in module.keys}
    return "" if not header.settings and len(ranks) > 1 else None


def _unmatched(header: LoraHeader) -> str | None:
    listed = ", ".join(header.unmatched[:3])
    return f"{len(header.unmatched)} keys match no layer of the transformer: {listed}" if header.unmatched else None


def _with(role: str) -> Callable[[LoraHeader], str | None]:
    return lambda header: "" if any(role in module.keys for module in header.modules.values()) else None


def _all_with(role: str, yes: bool = True) -> Callable[[LoraHeader], str | None]:
    return lambda header: "" if all(role in module.keys for module in header.modules.values()) is yes else None


def _of_kinds(*kinds: str) -> Callable[[LoraHeader], str | None]:
    return lambda header: "" if not set(kinds).isdisjoint(header.kinds) else None


def _by_input(header: LoraHeader) -> str | None:
    decomposed = [module for module in header.modules.values() if module.kind in DECOMPOSED.values()]
    return "" if decomposed and all(map(header.is_by_input, decomposed)) else None


def _constrained(header: LoraHeader) -> str | None:
    oft = (module for module in header.modules.values() if module.kind == OFT)
    return "" if any(header.oft_limit(module) not in (None, module.alpha) for module in oft) else None


FACTS: Mapping[Fact, Callable[[LoraHeader], str | None]] = {
    Fact.DORA: _of_kinds(*DECOMPOSED.values()),
    Fact.DECOMPOSED: lambda header: " and ".join(kind for kind in header.kinds if kind in (DOKR, DOHA)) or None,
    Fact.BY_INPUT: _by_input,
    Fact.OFT: _of_kinds(OFT),
    Fact.CONSTRAINED: _constrained,
    Fact.OF_WEIGHT: _of_kinds(*DECOMPOSED.values(), OFT),
    Fact.ALL_MAGNITUDES: _all_with(MAGNITUDE),
    Fact.NOT_ALL_SCALES: _all_with(DORA_SCALE, yes=False),
    Fact.MADE_FOR_COMFYUI: lambda header: "" if DORA_MARK.items() <= header.metadata.items() else None,
    Fact.OTHER_KINDS: lambda header: " and ".join(kind for kind in header.kinds if kind != LORA) or None,
    Fact.KEY_WITHOUT_LORA: lambda header: next(
        (name for name in header.names if "lora" not in name and name not in header.bundled), None
    ),
    Fact.LOKR: lambda header: "" if header.kinds and set(header.kinds) <= {LOKR, DOKR} else None,
    Fact.OUTSIDE: lambda header: next(
        (name for name, module in header.modules.items() if any("block" not in layer for layer in module.layers)), None
    ),
    Fact.TUCKER: _with(MID),
    Fact.ALPHA: _with(ALPHA),
    Fact.NO_ALPHA: lambda header: "" if any(module.alpha is None for module in header.modules.values()) else None,
    Fact.ALPHAS: lambda header: "" if len({module.alpha for module in header.modules.values()}) > 1 else None,
    Fact.RANKS: _ranks,
    Fact.SETTINGS: _scales,
    Fact.IGNORED: _ignored_scales,
    Fact.UNMATCHED: _unmatched,
}
"""What a file has: words for a note, or None if it has it not."""


def _add_text(verdict: ToolSupport, header: LoraHeader, names: LoraNames | None) -> list[Module]:
    """Add which updates of text encoders a tool drops, and return them."""
    own = names.encoders if names else ENCODERS
    modules = header.text_modules.values()
    lost = [] if own else list(modules)  # a family of which no LoRA updates the text encoders
    for module in modules if own else ():
        encoder = encoder_with(module.layers[0], own) if module.layers else own[0]
        reads = style_of(module.name) in encoder.read_by[verdict.tool]
        if not reads or verdict.tool == DIFFUSERS and module.kind not in (LORA, DORA):
            lost.append(module)
    if verdict.tool == DIFFUSERS and not any(".out_proj" in layer for m in modules for layer in m.layers):
        # diffusers 0.42.1 recognises these names by out_proj's, and otherwise silently drops the attention's
        lost += [m for m in modules if m not in lost and style_of(m.name) == "kohya" and "_self_attn_" in m.name]
    if lost:
        whole = len(lost) == len(modules) and not header.modules
        verdict.loads = "silently nothing" if whole else "partly"
        remedy = f"such as {lost[0].name}" + (f": export to {own[0].read_by[verdict.tool][0]}" if own else "")
        verdict.notes.append(f"drops {len(lost)} of {len(modules)} layers of text encoders, {remedy}")
    return lost


def embedding_verdicts(keys: Keys, file: str, family: str = "") -> list[ToolSupport]:
    """Return how each tool reads a token's vectors in a file of this name, by their keys; ``family``: of the model,
    such as ``sd3``; empty if unknown."""
    own = ToolSupport(SIMPLETUNE, "yes", [f"write {keys.token} into the prompt"])
    if keys.place == "output":
        note = "knows no outputs of text encoders"
        return [*(ToolSupport(tool, "silently nothing", [note]) for tool in (DIFFUSERS, COMFYUI, A1111)), own]
    if keys.bundled:
        inside = ["reads embeddings inside a LoRA file; write their name into the prompt"]
        return [
            ToolSupport(DIFFUSERS, "silently nothing", ["reads no embeddings inside a LoRA file"]),
            ToolSupport(COMFYUI, "yes", ["only from a copy of the file in models/embeddings"]),
            ToolSupport(A1111, "yes", [UNTESTED, *inside]),
            own,
        ]
    name = file.removesuffix(".safetensors")
    if SINGLE in keys.keys:
        loads = [f"write {keys.token} into the prompt"]
        if keys.keys[SINGLE] != keys.token:
            loads = ["give load_textual_inversion a token="]
        return [
            ToolSupport(DIFFUSERS, "yes", loads),
            ToolSupport(COMFYUI, "yes", [f"write embedding:{name} into the prompt"]),
            ToolSupport(A1111, "yes", [UNTESTED, f"write {name} into the prompt"]),
            own,
        ]
    readers = [each for each in FAMILIES if each.words.pipeline.reads_embeddings and family in ("", each.family)]
    reader = next((each for each in readers if set(each.text.trainable) == keys.keys.keys()), None)
    note = "loads files with one tensor; SD3's pipeline loads none"
    if len(keys.keys) == 1:
        note = f"a pipeline needs vectors for each of its encoders, and the file has only {', '.join(keys.keys)}"
    diffusers = ToolSupport(DIFFUSERS, "refuses", [note])
    if reader is not None:
        ways = [
            f"load_textual_inversion(tensors[{encoder.name!r}], token, text_encoder=pipeline.{encoder.model}, "
            f"tokenizer=pipeline.{encoder.tokenizer})"
            for encoder in reader.text.encoders
        ]
        only = "" if family else f" of {reader.words.title}"
        note = f"its pipeline{only}, a tensor for each encoder: {', '.join(ways)}"
        diffusers = ToolSupport(DIFFUSERS, "yes", [note])
    comfyui = ToolSupport(COMFYUI, "yes", [f"write embedding:{name} into the prompt"])
    if keys.keys.get("t5") == "t5":
        comfyui = ToolSupport(COMFYUI, "partly", ["ignores t5: it looks for t5xxl, else takes the file's first tensor"])
    a1111 = ToolSupport(A1111, "yes", [UNTESTED, f"write {name} into the prompt"])
    if "t5" in keys.keys:
        a1111 = ToolSupport(A1111, "partly", [UNTESTED, "reads CLIP's vectors, not T5's"])
    return [diffusers, comfyui, a1111, own]
