"""Report how other tools load a LoRA file: which ones, at what scale, and what they silently drop.

Determined from runs of diffusers 0.42.1 and, for SD3, ComfyUI v0.3.64 (on the CPU), otherwise from their sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from simpletune.adapters.files.detect_model import TEXT_ALONE
from simpletune.adapters.files.header import LoraHeader
from simpletune.adapters.files.keys import DORA, LORA, OFT
from simpletune.adapters.text.files import SINGLE, Keys
from simpletune.models.families import FAMILIES
from simpletune.models.shared.lora_names import ALPHA, DORA_MARK, DORA_SCALE, DOWN, MAGNITUDE, MID
from simpletune.models.shared.text_layers import T5, style_of

DIFFUSERS_TOOL, COMFYUI, FORGE, SIMPLETUNE = "diffusers", "ComfyUI", "Forge", "simpletune"
A1111 = "A1111"  # tools for embeddings; Forge reads them the same way
UNTESTED = "like Forge, according to its source, untested"
CLOSE = 1e-6


@dataclass
class ToolSupport:
    """How a tool loads a file."""

    tool: str
    loads: str
    """``yes``, ``partly``, ``silently nothing`` (at most logged) or ``refuses``."""
    notes: list[str] = field(default_factory=list)
    """Caveats: scales that the tool reads differently, keys that it drops."""


def verdicts(header: LoraHeader, refusal: str | None, damaged: bool = False) -> list[ToolSupport]:
    """How each tool loads a LoRA for SD3 or a U-Net; for other models, only why simpletune refuses it (``refusal``)."""
    own = ToolSupport(SIMPLETUNE, "refuses", [refusal]) if refusal else ToolSupport(SIMPLETUNE, "yes")
    if header.family.is_known and {DORA, OFT} & set(header.kinds):
        others = _depends_on_the_weight(header)
    elif header.family.of_unet:
        others = [_diffusers_unet(header), *_others_unet(header)]
    elif header.family.names:
        others = [_diffusers(header), _comfyui(header), _forge(header)]
    elif header.family.model == TEXT_ALONE:
        others = [ToolSupport(tool, "yes") for tool in (DIFFUSERS_TOOL, COMFYUI, FORGE)]
    else:
        return [own]
    for verdict in others:
        _add_text(verdict, header)
    for verdict in others if damaged else ():
        verdict.notes.append("NaN spreads through the model: pictures are black or noise")
    return [*others, own]


def _add_text(verdict: ToolSupport, header: LoraHeader) -> None:
    """Add which updates of text encoders a tool drops."""
    modules, unet = header.text_modules.values(), header.family.of_unet
    lost = []
    for module in modules:
        style, is_t5 = style_of(module.name), module.layers[:1] and module.layers[0].startswith(f"{T5}.")
        deaf = {DIFFUSERS_TOOL} if is_t5 or style == "comfy" or style == "kohya" and not unet else set()
        deaf |= {DIFFUSERS_TOOL} if module.kind not in (LORA, DORA) else set()
        deaf |= {FORGE} if style == "comfy" else set()
        deaf |= {COMFYUI, FORGE} if is_t5 and style == "diffusers" else set()
        lost += [module] if verdict.tool in deaf else []
    if verdict.tool == DIFFUSERS_TOOL and not any(".out_proj" in layer for m in modules for layer in m.layers):
        # diffusers 0.42.1 recognises these names by out_proj's, and otherwise silently drops the attention's
        lost += [m for m in modules if m not in lost and style_of(m.name) == "kohya" and "_self_attn_" in m.name]
    if lost and verdict.loads in ("yes", "partly"):
        whole = len(lost) == len(modules) and not header.modules
        layout = "diffusers" if verdict.tool == DIFFUSERS_TOOL and not unet else "kohya"
        remedy = f"such as {lost[0].name}: export to {layout}"
        verdict.loads = "silently nothing" if whole else "partly"
        verdict.notes.append(f"drops {len(lost)} of {len(modules)} layers of text encoders, {remedy}")


def _depends_on_the_weight(header: LoraHeader) -> list[ToolSupport]:
    """How tools load DoRA and OFT. Forge supports neither scales per row nor rotations."""
    sd3, layout, modules = not header.family.of_unet, header.layout_name, header.modules.values()
    merged = "merge it into its base instead"
    diffusers = ToolSupport(DIFFUSERS_TOOL, "refuses", [f"reads no OFT: {merged}"])
    forge = ToolSupport(FORGE, "silently nothing", [f"reads no OFT for SD3: {merged}"])
    comfyui = ToolSupport(COMFYUI, "yes", ["exactly at strength 1; strength k changes the weights by k squared"])
    if DORA in header.kinds:
        forge = ToolSupport(FORGE, "yes", [f"wrongly: divides dora_scale by the norms of columns: {merged}"])
        diffusers = ToolSupport(
            DIFFUSERS_TOOL, "refuses", ["its DoRA needs lora_magnitude_vector: export to diffusers"]
        )
        if layout == "diffusers" and all(MAGNITUDE in module.keys for module in modules):
            diffusers = ToolSupport(DIFFUSERS_TOOL, "yes")
        elif layout == "diffusers" and sd3:
            diffusers = ToolSupport(DIFFUSERS_TOOL, "yes", ["as plain LoRA, which is wrong: it drops dora_scale"])
        note = "divides by the norms of the base's rows instead of the sum's: wrong"
        if not all(DORA_SCALE in module.keys for module in modules):
            note = "as plain LoRA, which is wrong: it does not know lora_magnitude_vector"
        elif DORA_MARK.items() <= header.metadata.items():
            note = "exactly; a version that divides by the norm of the sum would be wrong"
        comfyui = ToolSupport(COMFYUI, "yes", [note])
    if layout in ("diffusers", "peft", "lycoris", "onetrainer") and sd3:
        forge = ToolSupport(FORGE, "silently nothing", [f"knows only the original names for SD3: {merged}"])
    if layout in ("diffusers", "peft") and not sd3:
        names = ["drops the projections under these names: export to kohya"]
        comfyui, forge = ToolSupport(COMFYUI, "partly", names), ToolSupport(FORGE, "partly", names)
    return [diffusers, comfyui, forge]


def _diffusers(header: LoraHeader) -> ToolSupport:
    if refused := _only_by_rank(header):
        return refused
    without_lora = [name for name in header.names if "lora" not in name and name not in header.bundled]
    if without_lora:
        note = f"rejects keys without 'lora' in their name, such as {without_lora[0]}"
        return ToolSupport(DIFFUSERS_TOOL, "refuses", [note])
    if header.layout_name != "diffusers":
        return ToolSupport(DIFFUSERS_TOOL, "silently nothing", ["no key starts with transformer.: convert it first"])
    notes = []
    if header.settings:
        scales = sorted({header.header_scale(module) for module in header.modules.values()})
        listed = ", ".join(f"{scale:g}" for scale in scales)
        notes.append(f"scales by alpha / rank from the header's settings: {listed}")
    elif len({header.rank(module) or 0 for module in header.modules.values() if DOWN in module.keys}) > 1:
        notes.append("ranks differ: versions that use the first layer's rank as every alpha scale the others wrongly")
    return ToolSupport(DIFFUSERS_TOOL, "partly" if header.unmatched else "yes", [*notes, *_dropped(header)])


def _comfyui(header: LoraHeader) -> ToolSupport:
    if header.layout is None:
        return ToolSupport(COMFYUI, "partly", ["mixes layouts"])
    if header.layout_name == "bare":
        return ToolSupport(COMFYUI, "silently nothing", ["names without a prefix match no layer in ComfyUI"])
    notes = []
    without_alpha = [module for module in header.modules.values() if module.alpha is None]
    if header.layout_name in ("diffusers", "peft", "onetrainer") and header.settings is not None:
        scales = {header.header_scale(module) for module in without_alpha if module.layers}
        if ignored := ", ".join(f"{scale:g}" for scale in sorted(scales) if abs(scale - 1) > CLOSE):
            notes.append(f"applies it at scale 1 instead of {ignored}, because it ignores alpha in the header")
    if header.layout_name in ("kohya", "comfy") and without_alpha:
        notes.append("modules without .alpha are applied at scale 1")
    return ToolSupport(COMFYUI, "partly" if header.unmatched else "yes", [*notes, *_dropped(header)])


def _forge(header: LoraHeader) -> ToolSupport:
    with_rank = " with --rank" if _only_by_rank(header) else ""
    if header.layout_name == "kohya":
        return ToolSupport(FORGE, "partly" if header.unmatched else "yes", _dropped(header))
    if header.layout_name == "comfy":
        return ToolSupport(FORGE, "yes", ["according to its source, untested; kohya's layout is safer"])
    return ToolSupport(
        FORGE, "silently nothing", [f"knows only the original names for SD3: export to kohya{with_rank}"]
    )


def _diffusers_unet(header: LoraHeader) -> ToolSupport:
    if refused := _only_by_rank(header):
        return refused
    if any(MID in module.keys for module in header.modules.values()):
        return ToolSupport(DIFFUSERS_TOOL, "refuses", ["reads no lora_mid (Tucker form): export to kohya, without it"])
    layout = header.layout_name
    loads = "partly" if header.unmatched else "yes"
    if layout == "original":
        return ToolSupport(
            DIFFUSERS_TOOL, "refuses", ["original names with lora_unet_ name no module: export to kohya"]
        )
    if layout in ("kohya", "onetrainer"):
        notes = []
        if len({module.alpha for module in header.modules.values()}) > 1:
            notes.append("modules have different alphas: the most common one is applied to all attention layers")
        return ToolSupport(DIFFUSERS_TOOL, loads, [*notes, *_dropped(header)])
    if any(ALPHA in module.keys for module in header.modules.values()):
        return ToolSupport(DIFFUSERS_TOOL, "refuses", ["rejects alpha tensors outside kohya's layout: export to kohya"])
    if layout == "diffusers":
        return ToolSupport(DIFFUSERS_TOOL, loads, _dropped(header))
    return ToolSupport(DIFFUSERS_TOOL, "silently nothing", ["no key starts with unet. or lora_unet_: export to kohya"])


def _others_unet(header: LoraHeader) -> Iterator[ToolSupport]:
    """The verdicts for ComfyUI, and for Forge, which uses ComfyUI's names for a U-Net's layers."""
    layout = header.layout_name
    modules = [module.name for module in header.modules.values()]
    lost = []
    if layout == "peft":
        lost = modules
    elif layout in ("diffusers", "bare"):  # knows diffusers' names, but projections only as to_q of a processor
        lost = [name for name in modules if ".to_" in name and ".processor." not in name]
    loads = "partly" if header.unmatched or lost or layout is None else "yes"
    notes = [f"drops {len(lost)} of {len(modules)} modules, such as {lost[0]}: export to kohya"] if lost else []
    if len(lost) == len(modules):
        loads = "silently nothing"
    yield ToolSupport(COMFYUI, loads, [*notes, *_dropped(header)])
    yield ToolSupport(FORGE, loads, ["according to its source, untested", *notes, *_dropped(header)])


def _only_by_rank(header: LoraHeader) -> ToolSupport | None:
    """That diffusers refuses a file with modules other than LoRA; None if it has none."""
    if not (kinds := " and ".join(kind for kind in header.kinds if kind != LORA)):
        return None
    note = f"reads no {kinds}: export to diffusers with --rank, which approximates it by a LoRA"
    return ToolSupport(DIFFUSERS_TOOL, "refuses", [note])


def _dropped(header: LoraHeader) -> list[str]:
    listed = ", ".join(header.unmatched[:3])
    count = len(header.unmatched)
    return [f"{count} keys match no layer of the transformer: {listed}"] if header.unmatched else []


def embedding_verdicts(keys: Keys, file: str, family: str = "") -> list[ToolSupport]:
    """How each tool reads a token's vectors in a file of this name, by their keys; ``family``: of the model, such as
    ``sd3``; empty if unknown."""
    own = ToolSupport(SIMPLETUNE, "yes", [f"write {keys.token} into the prompt"])
    if keys.place == "output":
        note = "knows no outputs of text encoders"
        return [*(ToolSupport(tool, "silently nothing", [note]) for tool in (DIFFUSERS_TOOL, COMFYUI, A1111)), own]
    if keys.bundled:
        inside = ["reads embeddings inside a LoRA file; write their name into the prompt"]
        return [
            ToolSupport(DIFFUSERS_TOOL, "silently nothing", ["reads no embeddings inside a LoRA file"]),
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
            ToolSupport(DIFFUSERS_TOOL, "yes", loads),
            ToolSupport(COMFYUI, "yes", [f"write embedding:{name} into the prompt"]),
            ToolSupport(A1111, "yes", [UNTESTED, f"write {name} into the prompt"]),
            own,
        ]
    readers = [each for each in FAMILIES if each.pipeline_reads_embeddings and family in ("", each.family)]
    reader = next((each for each in readers if set(each.clip_encoders) == keys.keys.keys()), None)
    note = "loads files with one tensor; SD3's pipeline loads none"
    if len(keys.keys) == 1:
        note = f"a pipeline needs vectors for each of its encoders, and the file has only {', '.join(keys.keys)}"
    diffusers = ToolSupport(DIFFUSERS_TOOL, "refuses", [note])
    if reader is not None:
        ways = [
            f"load_textual_inversion(tensors[{encoder.name!r}], token, text_encoder=pipeline.{encoder.model}, "
            f"tokenizer=pipeline.{encoder.tokenizer})"
            for encoder in reader.clip
        ]
        only = "" if family else f" of {reader.title}"
        note = f"its pipeline{only}, a tensor for each encoder: {', '.join(ways)}"
        diffusers = ToolSupport(DIFFUSERS_TOOL, "yes", [note])
    comfyui = ToolSupport(COMFYUI, "yes", [f"write embedding:{name} into the prompt"])
    if keys.keys.get("t5") == "t5":
        comfyui = ToolSupport(COMFYUI, "partly", ["ignores t5: it looks for t5xxl, else takes the file's first tensor"])
    a1111 = ToolSupport(A1111, "yes", [UNTESTED, f"write {name} into the prompt"])
    if "t5" in keys.keys:
        a1111 = ToolSupport(A1111, "partly", [UNTESTED, "reads CLIP's vectors, not T5's"])
    return [diffusers, comfyui, a1111, own]
