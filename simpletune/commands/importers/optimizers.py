"""Optimizers and schedules by other trainers' names, and their arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping

from simpletune.commands.importers.translation import Translation, boolean, number, round_digits
from simpletune.config.schema import TrainConfig
from simpletune.system.options import union_of

IN_FULL = "full precision there; 8-bit states here"
OPTIMIZERS: dict[str, tuple[str, str]] = {
    "adamw": ("adamw", ""), "torchadamw": ("adamw", ""), "optimiadamw": ("adamw", ""), "bnbadamw": ("adamw", ""),
    "adamwbf16": ("adamw_bf16", ""), "adamw8bit": ("adamw8bit", ""), "bnbadamw8bit": ("adamw8bit", ""),
    "aoadamw8bit": ("adamw8bit", ""), "pagedadamw8bit": ("paged_adamw8bit", ""),
    "bnbadamw8bitpaged": ("paged_adamw8bit", ""), "lion8bit": ("lion8bit", ""), "bnblion8bit": ("lion8bit", ""),
    "adafactor": ("adafactor", ""), "prodigy": ("prodigy", ""),
    "adamwschedulefree": ("adamw_schedule_free", ""), "schedulefreeadamw": ("adamw_schedule_free", ""),
    "schedulefreeadamwschedulefree": ("adamw_schedule_free", ""),
    "adam": ("adamw", "weight decay is decoupled here"), "adam8bit": ("adamw8bit", "weight decay is decoupled here"),
    "pagedadamw": ("paged_adamw8bit", IN_FULL), "pagedadamw32bit": ("paged_adamw8bit", IN_FULL),
    "bnbadamwpaged": ("paged_adamw8bit", IN_FULL), "aoadamw4bit": ("adamw8bit", "8-bit states here, not 4-bit"),
    "lion": ("lion8bit", IN_FULL), "optimilion": ("lion8bit", IN_FULL), "bnblion": ("lion8bit", IN_FULL),
    "pagedlion8bit": ("lion8bit", "its states are not paged here"),
    "bnblion8bitpaged": ("lion8bit", "its states are not paged here"),
}  # fmt: skip
"""Our name by theirs, in lower case and without punctuation, and what differs."""

SCHEDULES: dict[str, tuple[str, str]] = {
    "constant": ("constant", ""), "constantwithwarmup": ("constant", ""), "linear": ("linear", ""),
    "cosine": ("cosine", ""), "polynomial": ("polynomial", ""), "rex": ("rex", ""),
    "cosinewithrestarts": ("cosine_with_restarts", ""), "cosinewithhardrestarts": ("cosine_with_restarts", ""),
    "sine": ("cosine", "the learning rate falls once here; sine rises and falls again"),
    "adafactor": ("constant", "Adafactor uses the learning rate unchanged here"),
}  # fmt: skip

ARGUMENTS = {
    "weight_decay": number, "eps": number, "beta3": number, "d0": number, "d_coef": number, "clip_threshold": number,
    "decay_rate": number, "r": number, "weight_lr_power": number, "use_bias_correction": boolean,
    "safeguard_warmup": boolean,
}  # fmt: skip
ALWAYS = {"decouple": "weight decay is always decoupled here", "stochastic_rounding": "as optimizer.rounding says"}


def normalise_name(name: str) -> str:
    """Reduce a name to lower case without punctuation: ``bnb-adamw8bit`` becomes ``bnbadamw8bit``."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def take_optimizer(found: Translation, key: str, name: str) -> str:
    """Translate the name of an optimizer; one that simpletune lacks becomes AdamW."""
    ours, why = OPTIMIZERS.get(
        normalise_name(name), ("adamw", "simpletune has no such optimizer. AdamW's learning rate may differ")
    )
    found.take(key, "optimizer.name", ours, why)
    return ours


def take_arguments(found: Translation, key: str, arguments: Mapping[str, object]) -> None:
    """Translate an optimizer's arguments, after its name: those that the chosen optimizer has."""
    union = union_of(TrainConfig.model_fields["optimizer"])
    assert union is not None
    fields = union.members[str(found.get("optimizer.name", "adamw"))].model_fields
    words: list[object] = re.findall(r"[\d.eE+-]+", str(arguments.get("betas", "")))[:2]
    words = words or [arguments.get("beta1"), arguments.get("beta2")]
    if any(word is not None for word in words):
        betas = [default if word is None else number(word) for word, default in zip(words, (0.9, 0.999), strict=False)]
        if "betas" in fields:
            own = found.part(key, "betas", ", ".join(map(str, betas)))
            found.take(own, "optimizer.betas", betas, "both in one field")
    for name, raw in arguments.items():
        if name in ("betas", "beta1", "beta2", "") or raw is None:
            continue
        own = found.part(key, name, raw)
        if name in ALWAYS:
            found.leave(own, ALWAYS[name])
        elif name not in ARGUMENTS or name not in fields:
            found.leave(own, f"{found.get('optimizer.name', 'adamw')} has no such argument")
            continue
        try:
            found.take(own, f"optimizer.{name}", ARGUMENTS[name](raw))
        except ValueError:
            found.leave(own, f"it is no {ARGUMENTS[name].__name__}")


def take_schedule(found: Translation, key: str, name: str) -> str:
    """Translate the name of a schedule; one that simpletune lacks becomes cosine."""
    ours, why = SCHEDULES.get(normalise_name(name), ("cosine", "simpletune has no such schedule"))
    found.take(key, "schedule.name", ours, why)
    return ours


def take_warmup(found: Translation, key: str) -> None:
    """Translate warm-up steps: a number, or if below 1, a share of the steps, whose number must then be known."""
    steps = found.read(key, number)
    if not steps:
        return
    total = found.get("train.steps")
    if steps >= 1:
        found.take(key, "schedule.warmup_steps", int(steps))
    elif isinstance(total, int):
        count = int(round_digits(steps * total))
        found.take(key, "schedule.warmup_steps", count, f"the share is of {total} steps")
    else:
        found.leave(key, "a share of the steps, whose number is unknown. Set schedule.warmup_steps")
