"""Options that several trainers name alike: adapters, optimizers and their arguments, schedules, offload, losses."""

from __future__ import annotations

import re
from collections.abc import Mapping

from simpletune.commands.importers.translation import (
    Translation,
    as_text,
    boolean,
    number,
    refuse,
    round_digits,
    whole_number,
)
from simpletune.config.schema import TrainConfig
from simpletune.system.options import Json, UserError, union_of

VARIANTS = 8  # of each picture, where another trainer changes it anew in every epoch
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


def take_alpha(found: Translation, key: str, alpha: float | None, rank: int | None) -> None:
    """Translate a LoRA's alpha, if it is known."""
    if alpha is None:
        return
    if alpha == 0:
        return found.take(key, "adapter.alpha", rank, "0 means the rank")
    why = ""
    if rank and alpha != rank:
        why = f"a scale of {alpha / rank:g}: with alpha = rank, the same updates need a lower learning rate"
    found.take(key, "adapter.alpha", alpha, why)


def take_lycoris(found: Translation, key: str, own: Json, asked: bool = False) -> None:
    """Translate LyCORIS's arguments: algo, linear_dim or dim, linear_alpha or alpha, conv_dim, conv_alpha, factor, and
    others. ``asked``: whether convolutions train only with conv_dim. LyCORIS itself gives them the rank and alpha of
    the others by default, unless a preset names other layers."""
    algo = str(own.get("algo", "lora")).lower()
    methods = {"lora": "lora", "locon": "lora", "loha": "loha", "lokr": "lokr", "full": "full", "diag-oft": "oft"}
    method = methods.get(algo)
    if method is None:
        refuse(key, f"algo={algo}")
    if method == "lora" and boolean(own.get("dora_wd", False)):
        method = "dora"
    found.take(key, "adapter.method", method)
    rank = own.get("linear_dim", own.get("dim"))
    if rank is not None and method in ("lora", "dora", "loha"):
        found.take(key, "adapter.rank", whole_number(rank))
    if method == "lokr":
        whole = rank is not None and (whole_number(rank) > 1024 or boolean(own.get("full_matrix", False)))
        if whole:
            found.take(key, "adapter.rank", None, "a rank above the matrix's dimensions trains it whole")
        elif rank is not None:
            found.take(key, "adapter.rank", whole_number(rank))
        if own.get("factor") is not None:
            found.take(key, "adapter.factor", whole_number(own["factor"]))
        if boolean(own.get("decompose_both", False)):
            found.take(key, "adapter.decompose_both", True)
    alpha = own.get("linear_alpha", own.get("alpha"))
    if alpha is not None and method in ("lora", "dora"):
        found.take(key, "adapter.alpha", number(alpha))
    elif alpha is not None and method in ("lokr", "loha") and alpha != rank:
        found.leave(key, f"alpha {alpha}: it equals the rank here; scale optimizer.lr instead")
    known = {"algo", "linear_dim", "dim", "linear_alpha", "alpha", "factor", "decompose_both", "dora_wd", "full_matrix"}
    conv_rank, conv_alpha = own.get("conv_dim"), own.get("conv_alpha") or alpha
    if not asked:
        conv_rank = conv_rank or rank  # as LyCORIS: JSON's 0 is that of the linear layers, kohya's text "0" is none
    if conv_rank is not None and "apply_preset" not in own and own.get("preset", "full") == "full":
        whole = method == "lokr" and boolean(own.get("full_matrix", False))
        conv_rank = 1024 if whole else whole_number(conv_rank)
        take_convolutions(found, key, conv_rank, None if conv_alpha is None else number(conv_alpha))
        if found.family.lora[0].names.convolutions is not None:
            known |= {"conv_dim", "conv_alpha"}
            if conv_rank and method in ("lokr", "loha") and number(own.get("conv_alpha", conv_rank)) != conv_rank:
                found.leave(key, f"conv_alpha {own['conv_alpha']}: it equals the rank here; scale optimizer.lr instead")
    for name in own:
        if name == "preset" and own[name] == "full":
            continue
        if name not in known and own[name] not in (False, None, "False", 1, 1.0):
            found.leave(key, f"{name}={own[name]}: no such option here, or adapter.targets")


def take_convolutions(found: Translation, key: str, rank: int | None, alpha: float | None) -> None:
    """Translate the rank and alpha of a U-Net's convolutions larger than 1x1, by the adapter's method, which is set
    already."""
    method = found.get("adapter.method", "lora")
    if not rank or found.family.lora[0].names.convolutions is None or method == "full":
        return
    if method == "oft":
        return found.leave(key, f"a rank of {rank} for convolutions: adapter.method oft updates none above 1x1")
    most = 32 if method == "loha" else 1024  # of LoKr, which trains a matrix whole above its sides
    found.take(key, "adapter.conv_rank", min(rank, most), "convolutions larger than 1x1" if rank <= most else
               f"convolutions larger than 1x1; {rank} is above the largest rank")  # fmt: skip
    if method in ("lora", "dora"):
        found.set("adapter.conv_alpha", alpha or rank)


def take_start(found: Translation, key: str) -> None:
    """Translate the LoRA that training starts from; a LoRA or a kin of it, from its own kind."""
    file = found.read(key, as_text)
    if file and found.get("adapter.method", "lora") in ("lora", "dora", "loha", "lokr", "oft"):
        found.take(key, "adapter.start", file)
    elif file:
        found.leave(key, "only a LoRA, DoRA, LoHa, LoKr or OFT starts from another")


def take_text_lora(
    found: Translation, key: str, rate: float | None, targets: str = "attention", encoders: list[str] | None = None
) -> None:
    """Translate text encoders that train with a LoRA: an update of its rank and alpha on CLIP; others cannot be
    trained here. ``rate``: their learning rate; None: that of the rest. ``encoders``: those that train, by our names;
    None: all."""
    if found.get("adapter.method", "lora") not in ("lora", "dora"):
        method = found.get("adapter.method")
        return found.leave(key, f"adapter.method {method} trains no text encoder; text.lora needs lora or dora")
    found.take(
        key,
        "text.lora.rank",
        found.get("adapter.rank", 16),
        "a LoRA on CLIP, as on the denoiser; other encoders stay frozen",
    )
    found.set("text.lora.alpha", found.get("adapter.alpha"))
    found.set("text.lora.targets", targets)
    if encoders is not None:
        found.set("text.lora.encoders", encoders)
    found.set("text.lora.learning_rate", None if found.get("optimizer.name") == "prodigy" else rate)


def take_embedding(found: Translation, keys: Mapping[str, str], rate: float | None, alone: bool = True) -> None:
    """Translate textual inversion. ``keys``: the keys of token, initial words and number of vectors; ``alone``: whether
    nothing else trains."""
    if alone:
        found.set("adapter", {"method": "none"})
    token, initial = found.read(keys["token"], as_text), found.read(keys["initial"], as_text)
    vectors = found.read(keys["vectors"], whole_number)
    if not token:
        raise UserError(f"{keys['token']} names no token. Set it")
    if not initial:
        raise UserError(
            f"{keys['initial']} names no words that {token} starts from. Set it: here an embedding needs some"
        )
    found.take(keys["token"], "text.embeddings.token", "_".join(token.split()), "" if " " not in token else "one word")
    found.take(keys["initial"], "text.embeddings.initial", initial)
    found.take(keys["vectors"], "text.embeddings.vectors", vectors or len(initial.split()))
    found.set("text.embeddings.place", "input")
    found.set("text.embeddings.learning_rate", rate)


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
            found.leave(own, ALWAYS[name], same=name == "decouple" and boolean(raw))
            continue
        if name not in ARGUMENTS or name not in fields:
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


def take_swapped_blocks(found: Translation, key: str, blocks: int) -> None:
    """Translate the number of the model's ``blocks`` that are swapped to the host."""
    swapped = found.read(key, whole_number)
    if swapped:
        why = f"the rest of the {blocks} blocks stays on the device"
        found.take(key, "memory.resident_blocks", max(0, blocks - swapped), why)


def take_huber(found: Translation, c: float | None, schedule: str | None) -> None:
    """Translate ``loss_type`` huber or smooth_l1."""
    huber = {"c": c or 0.1, "schedule": schedule or "snr"}
    found.take("loss_type", "objective.huber", huber, "the pseudo-Huber loss of simpletune")
