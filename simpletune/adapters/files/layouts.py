"""Layouts of LoRA files of every family, and the meaning of their keys. Imports no torch."""

from __future__ import annotations

from simpletune.adapters.files.module_kind import LOHA_ROLES, LOKR_ROLES
from simpletune.models.lora_names import LAYOUTS
from simpletune.models.shared.lora_names import ALPHA, DORA_SCALE, DOWN, MAGNITUDE, OFT_BLOCKS, UP, Layout

ROLES = {
    "lora_A.weight": DOWN,
    "lora_B.weight": UP,
    "lora_A.default.weight": DOWN,
    "lora_B.default.weight": UP,
    "lora_down.weight": DOWN,
    "lora_up.weight": UP,
    "lora.down.weight": DOWN,
    "lora.up.weight": UP,
    "lora_linear_layer.down.weight": DOWN,
    "lora_linear_layer.up.weight": UP,
    "alpha": ALPHA,
    "lora_magnitude_vector": MAGNITUDE,
    "lora_magnitude_vector.weight": MAGNITUDE,
    "lora_magnitude_vector.default.weight": MAGNITUDE,
    "dora_scale": DORA_SCALE,
    OFT_BLOCKS: OFT_BLOCKS,
    **{role: role for role in (*LOKR_ROLES, *LOHA_ROLES)},
}
OLD_ROLES = {"_lora.down.weight": DOWN, "_lora.up.weight": UP}  # as in attention processors of old diffusers versions
# Keys of other methods, which are refused by name because plain LoRA arithmetic would be wrong for them.
OTHER_METHODS = (
    (r"\.(hada_t[12]|lokr_t[12])$", "LoHa or LoKr of convolutions (Tucker form)"),
    (r"\.oft_diag$|\.oft_R\.|\.rescale$", "OFT on the inputs, diagonal or rescaled"),
    (r"\.lora_mid\.weight$", "LoCon with a middle convolution (lora_mid)"),
    (r"\.(diff|diff_b|w_norm|b_norm|set_weight)$", "full weight differences (.diff)"),
    (r"\.(a1|a2|b1|b2)\.weight$", "GLoRA"),
    (r"\.lora_B(\.default)?\.bias$", "LoRA with biases"),
    (r"\.lora_embedding_[AB]", "LoRA of embeddings"),
)
TITLES = {
    "kohya": "kohya",
    "comfy": "ComfyUI native",
    "peft": "PEFT",
    "onetrainer": "OneTrainer",
    "original": "original names",
    "lycoris": "LyCORIS",
}


def title(layout: Layout) -> str:
    """A layout's name and the start of its keys."""
    if not layout.prefix:
        return "diffusers' names without a prefix"
    return f"{TITLES.get(layout.name, layout.name)} ({layout.prefix}*)"


def split_key(key: str) -> tuple[str, str] | None:
    """Split a key into its module (with prefix) and role; None if it is not a LoRA key."""
    for ending, role in ROLES.items():
        if key.endswith("." + ending):
            return key.removesuffix("." + ending), role
    for ending, role in OLD_ROLES.items():
        if key.endswith(ending):
            return key.removesuffix(ending), role
    return None


def layout_of(modules: list[str]) -> Layout | None:
    """The layout of modules (with prefixes); None if they have no common layout.

    Families share prefixes, so this is the layout with the prefix that knows most of the modules.
    """
    known = [layout for layouts in LAYOUTS.values() for layout in layouts]
    prefixes = {layout.prefix for layout in known if layout.prefix}
    common = {prefix for prefix in prefixes if all(module.startswith(prefix) for module in modules)}
    if not common and not any(module.startswith(tuple(prefixes)) for module in modules):
        common = {""}
    fitting = [layout for layout in known if layout.prefix in common] if modules else []
    return max(fitting, key=lambda layout: sum(bool(layout.layers(m)) for m in modules), default=None)
