"""How other tools load a LoRA file: which load it, at which scale, and what they drop silently.

Determined from runs of diffusers 0.42.1 and ComfyUI v0.3.64 (on the CPU), and from Forge's source.
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
    """How a tool loads a file.

    Args:
        tool: its name.
        loads: ``yes``, ``partly``, ``silently nothing`` (reported in a log at most) or ``refuses``.
        notes: caveats: scales that the tool reads differently, keys that it drops.
    """

    tool: str
    loads: str
    notes: list[str] = field(default_factory=list)


def verdicts(header: LoraHeader, refusal: str | None, damaged: bool = False) -> list[Verdict]:
    """How each tool loads an SD3 LoRA.

    Args:
        header: the file's header.
        refusal: why simpletune refuses it; None if it does not.
        damaged: whether it contains NaN or infinite values.
    """
    own = Verdict(SIMPLETUNE, "refuses", [refusal]) if refusal else Verdict(SIMPLETUNE, "yes")
    if not is_sd3(header.family[0]):
        return [own]
    others = [_diffusers(header), _comfyui(header), _forge(header)]
    for verdict in others if damaged else ():
        verdict.notes.append("NaN spreads through the model: pictures are black or noise")
    return [*others, own]


def _diffusers(header: LoraHeader) -> Verdict:
    without_lora = [name for name in header.names if "lora" not in name]
    if without_lora:
        note = f"rejects keys without 'lora' in their name, such as {without_lora[0]}"
        return Verdict(DIFFUSERS_TOOL, "refuses", [note])
    if header.layout is not DIFFUSERS:
        return Verdict(DIFFUSERS_TOOL, "silently nothing", ["no key starts with transformer.: convert it first"])
    notes = [f"scales by alpha / rank from the header's settings: {_scales(header)}"] if header.settings else []
    if not header.settings and len(_ranks(header)) > 1:
        notes.append("ranks differ: versions that use the first layer's rank as every alpha scale the others wrongly")
    return Verdict(DIFFUSERS_TOOL, "partly" if header.unmatched else "yes", [*notes, *_dropped(header)])


def _comfyui(header: LoraHeader) -> Verdict:
    if header.layout is None:
        return Verdict(COMFYUI, "partly", ["mixes layouts"])
    if header.layout is BARE:
        return Verdict(COMFYUI, "silently nothing", ["names without a prefix match no layer in ComfyUI"])
    notes = []
    if (ignored := _ignored_scale(header)) is not None:
        notes.append(f"applies it at scale 1 instead of {ignored}, because it ignores alpha in the header")
    if header.layout in (KOHYA, COMFY) and _without_alpha(header):
        notes.append("modules without .alpha are applied at scale 1")
    return Verdict(COMFYUI, "partly" if header.unmatched else "yes", [*notes, *_dropped(header)])


def _forge(header: LoraHeader) -> Verdict:
    if header.layout is KOHYA:
        return Verdict(FORGE, "partly" if header.unmatched else "yes", list(_dropped(header)))
    if header.layout is COMFY:
        return Verdict(FORGE, "yes", ["according to its source, untested; kohya's layout is safer"])
    return Verdict(FORGE, "silently nothing", ["knows only the original names for SD3: export to kohya"])


def _ignored_scale(header: LoraHeader) -> str | None:
    """The scales other than 1 that only the header specifies."""
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
