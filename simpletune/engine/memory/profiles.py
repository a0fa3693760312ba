"""``memory.profile``: presets of options for cards of common sizes; explicit values override them.

For SD3 Medium at 1024 px with batch size 1 they take what ``simpletune plan`` finds fastest at their precision on a
card of that size, of which a display or Windows takes a tenth (``tests/estimate/test_card_configs.py``).
"""

from __future__ import annotations

import copy
from typing import Literal

from simpletune.system.options import Json

Name = Literal["4gb", "6gb", "8gb", "12gb", "16gb", "24gb"]

_PLAN: Json = {"modulation": "plan"}
_KEEP: Json = {"keep_attention": "all", "feed_forward": "alone"}
_IN_BACKWARD: Json = {
    "precision": {"weights": "bf16"},
    "optimizer": {"name": "adamw8bit"},
    "train": {"clip": "per_parameter", "gradient_accumulation": 1},
}
_RECOMPUTE = ("checkpointing", "keep_attention", "feed_forward", "offload_checkpoint_inputs")


def _in_backward(**memory: object) -> Json:
    return {**_IN_BACKWARD, "memory": {"optimizer_in_backward": True, **memory}}


LORA: dict[str, Json] = {
    "4gb": {"precision": {"weights": "int8"}, "memory": {**_PLAN, **_KEEP, "vae_tile": 512}},
    "6gb": {"precision": {"weights": "int8"}, "memory": {**_PLAN, "checkpointing": 12, **_KEEP}},
    "8gb": {"precision": {"weights": "bf16"}, "memory": {**_PLAN, "checkpointing": "none"}},
    "12gb": {"precision": {"weights": "bf16"}, "memory": {**_PLAN, "checkpointing": "none"}},
    "16gb": {"precision": {"weights": "bf16"}, "memory": {"checkpointing": "none"}},
    "24gb": {"precision": {"weights": "bf16"}, "memory": {"checkpointing": "none"}},
}
FULL: dict[str, Json] = {
    "4gb": _in_backward(resident_blocks=0, vae_tile=512),
    "6gb": _in_backward(resident_blocks=10, vae_tile=512),
    "8gb": _in_backward(keep_attention="all", resident_blocks=14, vae_tile=512),
    "12gb": _in_backward(keep_attention="all", vae_tile=512),
    "16gb": {
        "precision": {"weights": "bf16"},
        "optimizer": {"name": "adamw8bit"},
        "memory": {"keep_attention": "all"},
    },
    "24gb": {"precision": {"weights": "bf16"}, "optimizer": {"name": "adamw8bit"}, "memory": {"checkpointing": "none"}},
}


def with_profile(data: Json, trains_base: bool) -> Json:
    """Add a profile's values to a configuration, merged with the overrides, that does not set them; ``trains_base``:
    whether the adapter trains base weights. Without a known profile, return it unchanged.

    What is recomputed is one choice: a value of one's own, or one that excludes a part of it, replaces all of it.
    """
    memory = data.get("memory")
    name = memory.get("profile") if isinstance(memory, dict) else None
    preset = (FULL if trains_base else LORA).get(name) if isinstance(name, str) else None
    if preset is None or not isinstance(memory, dict):
        return data
    speed, dropped = data.get("speed"), tuple[str, ...]()
    own = [memory.get(lever) for lever in (*_RECOMPUTE, "resident_blocks")]
    if any(value is not None and value is not False for value in own):  # 0 resident blocks are a choice
        dropped = _RECOMPUTE
    elif isinstance(speed, dict) and (speed.get("compile") is True or speed.get("attention") == "math"):
        dropped = tuple(_KEEP)
    levers = {lever: value for lever, value in preset.get("memory", {}).items() if lever not in dropped}
    preset = {**preset, "memory": levers}
    return _override(preset, data)


def _override(preset: Json, own: Json) -> Json:
    """Override a preset's values. If they select another member of a union, drop the preset's fields of that union."""
    result = copy.deepcopy(preset)
    for key, value in own.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            other = any(tag in value and value[tag] != below.get(tag) for tag in ("weights", "name"))
            result[key] = value if other else _override(below, value)
        else:
            result[key] = value
    return result
