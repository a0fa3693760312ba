"""What the tools do with a LoRA file: which load it, at which scale, and what they drop without a word.

From the sources and from runs: diffusers 0.42.1 (run), ComfyUI v0.3.64 (run, on the CPU), Forge (its source).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from simpletune.lora.families import is_sd3
from simpletune.lora.header import LoraHeader
from simpletune.lora.layouts import BARE, COMFY, DIFFUSERS, KOHYA, ONETRAINER, PEFT

DIFFUSERS_TOOL, COMFYUI, FORGE, SIMPLETUNE = "diffusers", "ComfyUI", "Forge", "simpletune"
TOOLS = (DIFFUSERS_TOOL, COMFYUI, FORGE, SIMPLETUNE)
CLOSE = 1e-6


@dataclass
class Verdict:
    """What a tool does with a file.

    Args:
        tool: its name.
        loads: ``yes``; ``partly``; ``silently nothing``: it says so at most in a log; ``refuses``.
        notes: what to know: scales that are read otherwise, keys that are dropped.
    """

    tool: str
    loads: str
    notes: list[str] = field(default_factory=list)


def verdicts(header: LoraHeader, refusal: str | None, damaged: bool = False) -> list[Verdict]:
    """What each tool does with an SD3 LoRA.

    Args:
        header: of the file.
        refusal: why simpletune refuses it; None: it does not.
        damaged: whether it holds NaN or infinite values.
    """
    own = Verdict(SIMPLETUNE, "refuses", [refusal]) if refusal else Verdict(SIMPLETUNE, "yes")
    if not is_sd3(header.family[0]):
        return [own]
    others = [_diffusers(header), _comfyui(header), _forge(header)]
    for verdict in others if damaged else ():
        verdict.notes.append("NaN reaches the model: pictures are black or noise")
    return [*others, own]


def _diffusers(header: LoraHeader) -> Verdict:
    without_lora = [name for name in header.names if "lora" not in name]
    if without_lora:
        note = f"stops at keys without 'lora' in their name, such as {without_lora[0]}"
        return Verdict(DIFFUSERS_TOOL, "refuses", [note])
    if header.layout is not DIFFUSERS:
        return Verdict(DIFFUSERS_TOOL, "silently nothing", ["no key begins with transformer.: convert it first"])
    notes = [f"scales by alpha / rank from the header's settings: {_scales(header)}"] if header.settings else []
    if not header.settings and len(_ranks(header)) > 1:
        notes.append("ranks differ: versions that take the first layer's rank as alpha of all scale the others wrongly")
    return Verdict(DIFFUSERS_TOOL, "partly" if header.unmatched else "yes", [*notes, *_dropped(header)])


def _comfyui(header: LoraHeader) -> Verdict:
    if header.layout is None:
        return Verdict(COMFYUI, "partly", ["layouts are mixed"])
    if header.layout is BARE:
        return Verdict(COMFYUI, "silently nothing", ["names without a prefix match nothing there"])
    notes = []
    if (ignored := _ignored_scale(header)) is not None:
        notes.append(f"applies it at scale 1 and not {ignored}: alpha in the header is not read")
    if header.layout in (KOHYA, COMFY) and _without_alpha(header):
        notes.append("modules without .alpha are applied at scale 1")
    return Verdict(COMFYUI, "partly" if header.unmatched else "yes", [*notes, *_dropped(header)])


def _forge(header: LoraHeader) -> Verdict:
    if header.layout is KOHYA:
        return Verdict(FORGE, "partly" if header.unmatched else "yes", list(_dropped(header)))
    if header.layout is COMFY:
        return Verdict(FORGE, "yes", ["by its source, not run; kohya's layout is the safe one there"])
    return Verdict(FORGE, "silently nothing", ["it knows only the original names for SD3: export to kohya"])


def _ignored_scale(header: LoraHeader) -> str | None:
    """The scale that stands in the header alone and is not 1."""
    if header.layout not in (DIFFUSERS, PEFT, ONETRAINER) or header.settings is None:
        return None
    scales = {header.header_scale(m) for m in header.modules.values() if m.alpha is None and m.layers}
    wrong = sorted(scale for scale in scales if abs(scale - 1) > CLOSE)
    return ", ".join(f"{scale:g}" for scale in wrong) or None


def _dropped(header: LoraHeader) -> Iterator[str]:
    if header.unmatched:
        listed = ", ".join(header.unmatched[:3])
        yield f"{len(header.unmatched)} keys match no layer of the transformer: {listed}"


def _without_alpha(header: LoraHeader) -> bool:
    return any(module.alpha is None for module in header.modules.values())


def _ranks(header: LoraHeader) -> set[int]:
    return {header.rank(module) for module in header.modules.values() if "down" in module.keys}


def _scales(header: LoraHeader) -> str:
    return ", ".join(f"{scale:g}" for scale in sorted({header.header_scale(m) for m in header.modules.values()}))
