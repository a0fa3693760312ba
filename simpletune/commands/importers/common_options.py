"""Options that several trainers name alike: adapters, optimizers and their arguments, schedules, offload, losses."""

from __future__ import annotations

import re
from collections.abc import Mapping

from simpletune.commands.importers.translation import (
    KeyRule,
    Translation,
    as_text,
    boolean,
    number,
    refuse,
    round_digits,
    trainer_tables,
    whole_number,
)
from simpletune.config.schema import TrainConfig
from simpletune.models.shared.family import Family
from simpletune.models.shared.family_files import ONLY_TRAINING
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
LYCORIS_METHODS = {
    "lora": "lora", "locon": "lora", "loha": "loha", "lokr": "lokr", "full": "full", "diag-oft": "oft",
}  # fmt: skip
LYCORIS_PARTS = {  # parameters that its algorithm full trains with these presets
    "attn-mlp": ["*.attentions.*.to_*", "*.attentions.*.ff.*", "*.attentions.*.proj_*"],
    "attn-only": ["*.attentions.*.to_*"],
}
LYCORIS_ROWS = (
    KeyRule("factor", "adapter.factor", whole_number),
    KeyRule("decompose_both", "adapter.decompose_both", boolean),
    KeyRule("rs_lora", "adapter.rank_stabilized", boolean),
    KeyRule("dropout", "adapter.dropout", number),
    KeyRule("rank_dropout", "adapter.rank_dropout", number),
    KeyRule("module_dropout", "adapter.module_dropout", number),
    KeyRule("loraplus_unet_lr_ratio", "adapter.b_lr_ratio", number),
    KeyRule("loraplus_lr_ratio", "adapter.b_lr_ratio", number),
)
"""Arguments of LyCORIS, and of kohya's networks where they have them."""
LARGEST_RANK = 1024
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


def take_lycoris(
    found: Translation, key: str, args: Translation, ranks: Translation, named: Mapping[str, str], asked: bool = False
) -> None:
    """Translate LyCORIS's arguments. ``key`` chose LyCORIS; ``named``: the keys of ``ranks`` with the rank and alpha;
    ``asked``: whether convolutions train only with conv_dim. LyCORIS itself gives them the rank and alpha of the
    others by default, unless a preset names other layers."""
    args.config = ranks.config = found.config
    rank_key, alpha_key = named["rank"], named["alpha"]
    algo = (args.read("algo", as_text) or "lora").lower()
    if algo not in LYCORIS_METHODS:
        refuse(key, f"algo={algo}")
    method, dora = LYCORIS_METHODS[algo], args.read("dora_wd", boolean)
    if dora and method == "lora":
        method = "dora"
        args.take("dora_wd", "adapter.method", method)
    elif dora:
        args.leave("dora_wd", f"adapter.method {method} trains no magnitudes")
    chosen = (args, "algo") if args.has("algo") else (found, key)
    chosen[0].take(chosen[1], "adapter.method", method)
    rank, alpha = ranks.read(rank_key, whole_number), ranks.read(alpha_key, number)
    full_matrix = args.read("full_matrix", boolean)
    whole = method == "lokr" and (full_matrix or (rank or 0) > LARGEST_RANK)
    if whole:
        why = "a rank above the matrix's dimensions trains it whole"
        place = (args, "full_matrix", "") if full_matrix else (ranks, rank_key, why)
        place[0].take(place[1], "adapter.rank", None, place[2])
    elif rank is not None and method == "oft":
        ranks.take(rank_key, "adapter.block_size", min(max(rank, 2), 256), "the largest size of a block")
    elif rank is not None and method != "full":
        ranks.take(rank_key, "adapter.rank", rank)
    if alpha is not None and method in ("lora", "dora"):
        ranks.take(alpha_key, "adapter.alpha", alpha)
    elif ranks.has(alpha_key) and (whole or alpha == rank or method in ("full", "oft")):
        alike = f"adapter.method {method} has no alpha" if method in ("full", "oft") else "it equals the rank here, too"
        ranks.leave(alpha_key, "LyCORIS ignores it where both matrices are whole" if whole else alike, same=True)
    elif ranks.has(alpha_key):
        ranks.leave(alpha_key, "it equals the rank here; scale optimizer.lr instead")
    ranks.unused(f"adapter.method {method} has no rank" if method == "full" else "the matrices are whole", rank_key)
    if method == "lokr":
        args.defaults["factor"] = -1
    args.unused("LoKr alone reads it", *(("factor", "decompose_both", "full_matrix") if method != "lokr" else ()))
    take_network_arguments(args)
    _lycoris_layers(found, args, method, LARGEST_RANK if whole and full_matrix else rank, alpha, asked)
    args.leave_others(trainer_tables("kohya"), "_lycoris")
    found.lines += args.lines


def take_network_arguments(args: Translation) -> None:
    """Translate arguments of a network that LyCORIS and kohya's own have in common."""
    if args.has("loraplus_unet_lr_ratio"):
        args.unused("loraplus_unet_lr_ratio decides", "loraplus_lr_ratio")
    args.by_table(LYCORIS_ROWS)


def _lycoris_layers(
    found: Translation, args: Translation, method: str, rank: int | None, alpha: float | None, asked: bool
) -> None:
    """Translate what a preset chooses, and the rank and alpha of convolutions."""
    names, preset = found.family.lora[0].names, args.read("preset", as_text) or "full"
    if preset == "attn-only" and method != "full":
        args.take("preset", "adapter.targets", "attention")
    elif preset in LYCORIS_PARTS and method == "full" and names.convolutions is not None:
        args.take("preset", "adapter.method", "partial", "the layers of a preset alone")
        found.set("adapter.layers", LYCORIS_PARTS[preset])
    elif preset in ("full", "attn-mlp"):
        args.unused(f"adapter.method {method} trains these layers", "preset")
    else:
        args.leave("preset", "adapter.targets chooses the layers")
    conv_rank = args.read("conv_dim", whole_number)
    conv_alpha = args.read("conv_alpha", number) or alpha
    if not asked:
        conv_rank = conv_rank or rank  # as LyCORIS: JSON's 0 is that of the linear layers
        if args.settings.get("conv_dim") == "0":  # kohya's text is none
            conv_rank = None
    if conv_rank is None or args.has("apply_preset") or preset != "full" or method == "full":
        return args.unused("no convolution trains", "conv_dim", "conv_alpha")
    if names.convolutions is None:
        return args.unused("this model has no convolutions that train", "conv_dim", "conv_alpha")
    take_convolutions(args, "conv_dim", conv_rank, conv_alpha, found.family)


def take_convolutions(
    found: Translation, key: str, rank: int | None, alpha: float | None, family: Family, alpha_key: str = "conv_alpha"
) -> None:
    """Translate the rank and alpha of a U-Net's convolutions larger than 1x1, by the adapter's method, which is set
    already."""
    method = found.get("adapter.method", "lora")
    if not rank or family.lora[0].names.convolutions is None or method == "full":
        return found.unused("no convolution trains", key, alpha_key)
    if method == "oft":
        found.leave(key, f"a rank of {rank} for convolutions: adapter.method oft updates none above 1x1")
        return found.unused("no convolution trains", alpha_key)
    most = 32 if method == "loha" else LARGEST_RANK  # of LoKr, which trains a matrix whole above its sides
    found.take(key, "adapter.conv_rank", min(rank, most), "convolutions larger than 1x1" if rank <= most else
               f"convolutions larger than 1x1; {rank} is above the largest rank")  # fmt: skip
    if method in ("lora", "dora"):
        if found.has(alpha_key):
            found.read(alpha_key, number)
            found.take(alpha_key, "adapter.conv_alpha", alpha or rank)
        else:
            found.set("adapter.conv_alpha", alpha or rank)
    elif found.has(alpha_key) and (alpha == rank or method == "lokr" and rank >= LARGEST_RANK):
        found.leave(alpha_key, "it equals the rank here, too" if alpha == rank else "the matrices are whole", same=True)
    elif found.has(alpha_key):
        found.leave(alpha_key, "it equals the rank here; scale optimizer.lr instead")


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
    if not token or not initial:
        lacking = [] if token else [f"{keys['token']} names no token"]
        lacking += [] if initial else [f"{keys['initial']} names no words that {token or 'it'} starts from"]
        raise UserError(f"{' and '.join(lacking)}. Set {'both' if len(lacking) > 1 else 'it'}")
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


def take_arguments(found: Translation, key: str, arguments: Mapping[str, object], alone: bool = False) -> None:
    """Translate an optimizer's arguments, after its name: those that the chosen optimizer has. ``alone``: whether the
    key stands for the one argument, instead of holding them all."""
    union = union_of(TrainConfig.model_fields["optimizer"])
    assert union is not None
    fields = union.members[str(found.get("optimizer.name", "adamw"))].model_fields
    keys = {name: key if alone else found.part(key, name, raw) for name, raw in arguments.items() if name}
    words: list[object] = re.findall(r"[\d.eE+-]+", str(arguments.get("betas", "")))[:2]
    words = words or [arguments.get("beta1"), arguments.get("beta2")]
    if any(word is not None for word in words) and "betas" in fields:
        usual = found.get("optimizer.betas")
        usual = usual if isinstance(usual, list) else [0.9, 0.999]
        betas = [default if word is None else number(word) for word, default in zip(words, usual, strict=False)]
        for name in ("betas", "beta1", "beta2"):
            if arguments.get(name) is not None:
                found.take(keys[name], "optimizer.betas", betas, "both in one field")
                del keys[name]
    for name, own in keys.items():
        raw = arguments[name]
        if name in ALWAYS:
            found.leave(own, ALWAYS[name], same=name == "decouple" and boolean(raw))
        elif name not in ARGUMENTS or name not in fields:
            found.leave(own, f"{found.get('optimizer.name', 'adamw')} has no such argument")
        else:
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
    if steps >= 1 and isinstance(total, int) and steps >= total:
        found.take(key, "schedule.warmup_steps", total - 1, f"the run has {total} steps")
    elif steps >= 1:
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


def take_huber(found: Translation) -> None:
    """Translate ``loss_type`` huber or smooth_l1, and what belongs to it."""
    c, schedule = found.read("huber_c", number), found.read("huber_schedule", as_text)
    if found.read("loss_type", as_text) not in ("huber", "smooth_l1"):
        return
    huber = {"c": c or 0.1, "schedule": schedule or "snr"}
    found.take("loss_type", "objective.huber", huber, "the pseudo-Huber loss of simpletune")
    for key, name in (("huber_c", "c"), ("huber_schedule", "schedule")):
        if found.has(key):
            found.take(key, f"objective.huber.{name}", huber[name])


SAMPLE_FIELDS = {
    "width": "width", "height": "height", "seed": "seed", "scale": "guidance", "cfg_scale": "guidance",
    "guidance_scale": "guidance", "sample_steps": "steps", "diffusion_steps": "steps",
    "negative_prompt": "negative_prompt", "neg": "negative_prompt",
}  # fmt: skip


def take_samples(found: Translation, key: str, rows: list[Json], prompts: list[str]) -> None:
    """Translate rows with the prompts and settings of validation pictures, which are those of the first row here."""
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) not in (None, "")]
        own, field = found.part(key, name, values[0] if values else None), SAMPLE_FIELDS.get(name, "")
        differ = any(other != values[0] for other in values) and field != "seed"
        why = "that of the first prompt, for all" if differ else ""
        if name == "prompt":
            found.take(own, "validation.prompts", prompts)
        elif not field or not values:
            found.leave(own, "no such setting of validation pictures", same=name in ("enabled", "ctrl_idx"))
        elif field == "negative_prompt":
            found.take(own, f"validation.{field}", str(values[0]), why)
        elif field in ("width", "height"):
            step = found.family.architecture.multiple
            found.take(own, f"validation.{field}", max(step, whole_number(values[0]) // step * step), why)
        else:
            value = number(values[0]) if field == "guidance" else whole_number(values[0])
            found.take(own, f"validation.{field}", value, why)


def leave_refiners_out(found: Translation, key: str, title: str) -> None:
    """Give Z-Image's refiners, whose blocks ``adapter.targets`` counts among the others, no update."""
    found.take(key, "adapter.layers", [{"pattern": "*_refiner", "rank": 0}], f"{title} does not update the refiners")


def take_pipeline_guidance(found: Translation, key: str) -> None:
    """Take the scale of guidance of a family's pipeline, which is off up to 1."""
    offset, scale = found.family.words.pipeline.guidance_offset, found.read(key, number)
    if offset and scale is not None:
        why = f"the pipeline's scale is {-offset:g} less than that of ordinary guidance"
        found.take(key, "validation.guidance", scale - offset if scale > 1 else 1.0, why)


def take_assistant(found: Translation, key: str, name: str) -> None:
    """Take a LoRA that is used only while training."""
    found.take(key, "model.loras", [f"{ONLY_TRAINING}{name}"], "used only while training")
