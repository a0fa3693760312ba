"""PEFT's settings of an adapter, from a file's header or from adapter_config.json beside it. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from simpletune.models.families import DENOISERS
from simpletune.system.options import Json, UserError

LONGEST_PATTERN = 200  # characters
DAMAGED = "The file is damaged: download or export it again"


def validate_settings(found: object, where: str) -> Json:
    """Validate the values of PEFT's settings.

    Raises:
        UserError: a value is invalid.
    """
    denoisers = "|".join(DENOISERS)
    given = found if isinstance(found, dict) else {}
    settings = {re.sub(rf"^({denoisers})\.", "", str(k)): v for k, v in given.items()}
    numbers = [settings.get(name) for name in ("r", "lora_alpha", "alpha")]
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(name) or {}
        numbers += patterns.values() if isinstance(patterns, dict) else [patterns]
    odd = [n for n in numbers if n is not None and (type(n) not in (int, float) or not 0 <= n < 2**31)]
    if not isinstance(found, dict) or odd:
        raise UserError(f"{where} contains the invalid value {str(odd[0] if odd else found)[:40]!r}. {DAMAGED}")
    return settings


def scale_for(layer: str, settings: Json) -> float:
    """Return the scale that PEFT derives for a layer; alpha has different names for LoRA and for LoKr and LoHa."""
    alpha = by_pattern(settings.get("alpha_pattern"), layer, settings.get("lora_alpha", settings.get("alpha")))
    rank = by_pattern(settings.get("rank_pattern"), layer, settings.get("r"))
    if alpha is None or not rank:
        return 1.0
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def by_pattern(patterns: Mapping[str, float] | None, layer: str, default: float | None) -> float | None:
    """Apply PEFT's rule: use the first pattern that matches the end of a layer's name."""
    for pattern, value in (patterns or {}).items():
        if len(pattern) > LONGEST_PATTERN or len(re.findall(r"[*+?{]", pattern)) > 4 or re.search(r"\)[*+?{]", pattern):
            raise UserError(
                f"the pattern {pattern[:40]!r} in a LoRA's settings could take forever to match: patterns may have at "
                f"most {LONGEST_PATTERN} characters and 4 repetitions, none of a group. Use the layers' names"
            )
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", layer)
        except re.error:
            raise UserError(f"the pattern {pattern!r} in a LoRA's settings is invalid. {DAMAGED}") from None
        if fits:
            return value
    return default
