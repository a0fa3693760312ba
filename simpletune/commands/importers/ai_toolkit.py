"""Translate ai-toolkit's job: the first process of its YAML or JSON, whose sections become keys such as
``network.linear``."""

from __future__ import annotations

import re
from pathlib import Path

from simpletune.commands.importers.command_lines import listed
from simpletune.commands.importers.common_options import (
    VARIANTS,
    leave_refiners_out,
    take_alpha,
    take_arguments,
    take_assistant,
    take_convolutions,
    take_embedding,
    take_optimizer,
    take_samples,
    take_schedule,
    take_start,
    take_text_lora,
)
from simpletune.commands.importers.translation import (
    KeyRule,
    Translation,
    as_text,
    boolean,
    number,
    refuse,
    refuse_references,
    take_family_of_base,
    trainer_tables,
    whole_number,
)
from simpletune.system.options import Json, UserError

TITLE, NAME = "ai-toolkit", "ai_toolkit"
RANKS, ALPHAS = ("network.linear", "network.rank"), ("network.linear_alpha", "network.alpha")
WHOLE = ("train.optimizer_params", "train.lr_scheduler_params", "network.network_kwargs", "model.model_kwargs")
"""Sections that stay objects."""
ONE_SIDE = "no prompt on this side: strength 1 alone is trained, not -1, too"


def flatten(settings: Json) -> Json:
    """Return the options of the job and of its first process, with their sections in the keys."""
    config = settings.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("process"), list):
        return {}
    first = config["process"][0] if config["process"] else {}
    top = {key: value for key, value in config.items() if key != "process"}
    job = {key: value for key, value in settings.items() if key != "config"}
    return _dotted(job) | _dotted(top) | (_dotted(first) if isinstance(first, dict) else {})


def _dotted(section: Json, before: str = "") -> Json:
    found: Json = {}
    for key, value in section.items():
        name = f"{before}{key}"
        whole = not isinstance(value, dict) or not value or name in WHOLE
        found |= {name: value} if whole else _dotted(value, f"{name}.")
    return found


def translate(settings: Json, folder: Path, data: Path | None) -> tuple[Translation, list[Translation]]:
    """Translate the first process and its data sets."""
    tables = trainer_tables(NAME)
    if data is not None:
        raise UserError("--data: ai-toolkit's data sets are in the same file (datasets). Leave --data out")
    found = Translation(flatten(settings), tables["defaults"])
    if len(settings["config"]["process"]) > 1:
        for index, other in enumerate(settings["config"]["process"][1:], 1):
            key = f"process[{index}]"
            found.settings[key] = other
            found.leave(key, "only the first process is translated")
    _family(found, folder)
    if found.settings.get("type") == "slider":
        _slider(found)
    elif found.settings.get("type") == "concept_slider":
        _concept_slider(found)
    is_flow = found.objective == "flow"
    method = _adapter(found)
    take_start(found, "network.pretrained_lora_path")
    found.by_table(tables["options"])
    _precision(found, method)
    _optimizer(found, method)
    _objective(found, is_flow)
    _samples(found)
    if boolean(found.read("train.ema_config.use_ema", as_text) or "false"):
        decay = found.read("train.ema_config.ema_decay", number)
        found.take("train.ema_config.use_ema", "ema.decay", decay or 0.999)
        if decay:
            found.keep("train.ema_config.ema_decay", "see train.ema_config.use_ema")
    sources = _data_sets(found) if found.get("concept") is None else []
    found.leave_others(tables)
    return found, sources


def _family(found: Translation, folder: Path) -> None:
    """Recognise the family by ``arch``, the flags, or the base."""
    families = trainer_tables(NAME)["families"]
    flags = [key for key in families["of_flags"] if found.read(key, boolean)]
    chosen = "model.arch" if found.has("model.arch") else next(iter(flags), "")
    if (arch := found.read("model.arch", as_text)) is not None:
        found.take("model.arch", "model.family", families[arch])
    elif flags:
        found.take(flags[0], "model.family", families["of_flags"][flags[0]])
    else:
        take_family_of_base(found, "model.name_or_path", folder, "sd15")
    found.unused(f"{chosen} decides", *flags[0 if chosen == "model.arch" else 1 :])
    if str(found.settings.get("model.name_or_path")).startswith(("http:", "https:")):
        found.leave("model.name_or_path", "an address. Download the file and set model.pretrained")
    if found.get("model.family") == "zimage":
        rest = found.read("model.extras_name_or_path", as_text)
        assistant = found.read("model.assistant_lora_path", as_text)
        if rest is not None and found.has("model.name_or_path"):
            found.take("model.name_or_path", "model.transformer", found.read("model.name_or_path", as_text))
            found.take("model.extras_name_or_path", "model.pretrained", rest)
        if assistant is not None:
            take_assistant(found, "model.assistant_lora_path", assistant)


def _slider(found: Translation) -> None:
    """Translate a slider from prompts alone: targets to directions, anchors to preserved prompts."""
    anchors = [_object(row) for row in found.read("slider.anchors", listed) or []]
    preserved = list(dict.fromkeys(str(row["prompt"]) for row in anchors if row.get("prompt")))
    if anchors:
        why = "of each direction; for neg_prompt and multiplier there is preserved_weight"
        found.take("slider.anchors", "concept.directions.0.preserved", preserved, why)
    directions: list[Json] = []
    for index, row in enumerate(map(_object, found.read("slider.targets", listed) or [])):
        place = f"concept.directions.{index}"
        ours: Json = {"target": "", **({"preserved": preserved} if preserved else {})}
        for key, value in row.items():
            part = found.part("slider.targets", f"{index}.{key}", value)
            if key in ("positive", "negative") and not as_text(value).strip():
                found.note(part, ONE_SIDE)
            elif key in ("target_class", "positive", "negative"):
                name = "target" if key == "target_class" else key
                ours[name] = as_text(value)
                found.take(part, f"{place}.{name}", ours[name])
            elif key == "weight":
                ours[key] = number(value)
                found.take(part, f"{place}.weight", ours[key])
            elif key == "multiplier" and number(value) == 1:
                found.leave(part, "strengths 1 and -1 are trained", same=True)
            else:
                found.leave(part, "set guidance" if key == "multiplier" else "not supported")
        directions.append(ours)
    found.set("concept.directions", directions)
    step, sizes = found.family.architecture.multiple, found.read("slider.resolutions", listed)
    if sizes is not None:
        sides = dict.fromkeys(max(step, round(max(map(number, listed(size))) / step) * step) for size in sizes)
        found.take("slider.resolutions", "concept.resolutions", list(sides), "squares of the longer side")
    most = found.read("train.max_denoising_steps", whole_number)
    if most is not None:
        found.take("train.max_denoising_steps", "concept.drawing_steps", most)
    found.unused("every step trains both strengths", "slider.batch_full_slide")


def _concept_slider(found: Translation) -> None:
    """Translate a slider that learns on noised pictures, between the same prompts and at both strengths."""
    ours: Json = {"target": ""}
    found.defaults |= {"slider.guidance_strength": 3.0, "slider.anchor_strength": 1.0}
    for key, name in (("target_class", "target"), ("positive_prompt", "positive"), ("negative_prompt", "negative")):
        text = found.read(f"slider.{key}", as_text) or ""
        if text.strip() or name == "target":
            ours[name] = text
            found.take(f"slider.{key}", f"concept.directions.0.{name}", text)
        else:
            found.note(f"slider.{key}", ONE_SIDE)
    ours["guidance"] = found.read("slider.guidance_strength", number)
    found.take("slider.guidance_strength", "concept.directions.0.guidance", ours["guidance"])
    anchor, weight = found.read("slider.anchor_class", as_text), found.read("slider.anchor_strength", number)
    if anchor:
        ours |= {"preserved": [anchor], "preserved_weight": weight}
        found.take("slider.anchor_class", "concept.directions.0.preserved", [anchor])
        found.take("slider.anchor_strength", "concept.directions.0.preserved_weight", weight)
    else:
        found.unused("there is no anchor", "slider.anchor_class", "slider.anchor_strength")
    found.set("concept.directions", [ours])
    rows = [row for row in found.read("datasets", listed) or [] if isinstance(row, dict)]
    sizes = [number(size) for row in rows for size in listed(row.get("resolution", [512]))]
    step = found.family.architecture.multiple
    found.set(
        "concept.resolutions", list(dict.fromkeys(max(step, round(size / step) * step) for size in sizes or [512]))
    )
    if found.has("datasets"):
        found.note("datasets", "not read: the model draws what it learns on (concept), squares of these resolutions")


def _adapter(found: Translation) -> str:
    of_network = [key for key in found.settings if key.startswith("network.")]
    if of_network:
        found.defaults["network.type"] = "lora"
    kind = found.read("network.type", as_text)
    linear, linear_alpha = (  # network.rank and network.alpha are other names
        next((key for key in keys if found.has(key)), keys[0]) for keys in (RANKS, ALPHAS)
    )
    if any(key.startswith("embedding.") for key in found.settings):
        keys = {"token": "embedding.trigger", "initial": "embedding.init_words", "vectors": "embedding.tokens"}
        take_embedding(found, keys, found.read("train.embedding_lr", number))
        found.set("text.embeddings.keep_norm", False)
        found.unused("the embedding trains alone", *of_network)
        return "none"
    if kind is None and not found.sets_empty("network"):
        raise UserError(
            "network names no network, and nothing says that the whole model trains. Add network: {type: lora} for a "
            "LoRA, or network: null for fine-tuning the whole model"
        )
    if kind is None:
        found.take("network", "adapter.method", "full", "without a network, everything trains")
        return "full"
    rank = found.read(linear, whole_number) or 4
    alpha = found.read(linear_alpha, number)
    lokr = kind.lower() == "lokr"
    found.take("network.type", "adapter.method", "lokr" if lokr else "lora")
    found.take("network.type", "adapter.targets", "all_linear", "the layers that ai-toolkit's networks update")
    if found.get("model.family") == "zimage":
        leave_refiners_out(found, "network.type", TITLE)
    if lokr:
        found.by_table([KeyRule("network.lokr_factor", "adapter.factor", whole_number)])
        full = found.read("network.lokr_full_rank", boolean)
        found.take("network.lokr_full_rank", "adapter.rank", None if full is not False else rank)
        if full is not False:
            found.unused("the matrices are whole", *RANKS, *ALPHAS)
        elif found.has(linear_alpha) and alpha != rank:
            found.leave(linear_alpha, "it equals the rank here; scale optimizer.lr instead")
        found.unused("see network.lokr_full_rank", linear)
        found.unused("it equals the rank here, too", linear_alpha)
    else:
        found.take(linear, "adapter.rank", rank)
        take_alpha(found, linear_alpha, alpha, rank)
        found.unused("LoKr alone reads it", "network.lokr_factor", "network.lokr_full_rank", "network.old_lokr_format")
    found.unused(f"{linear} decides", *RANKS)
    found.unused(f"{linear_alpha} decides", *ALPHAS)
    found.by_table([KeyRule("network.dropout", "adapter.dropout", number)])
    if found.family.lora[0].names.convolutions is not None:
        conv_rank, conv_alpha = found.read("network.conv", whole_number), found.read("network.conv_alpha", number)
        key = "network.conv"
        if lokr and found.get("adapter.rank") is None:
            key, conv_rank = "network.lokr_full_rank", 1024  # all matrices are whole there, without network.conv
            found.unused("the matrices are whole", "network.conv", "network.conv_alpha")
        if key == "network.conv" and conv_rank is None:
            found.unused("no convolution trains", "network.conv_alpha")
        take_convolutions(found, key, conv_rank, conv_alpha, found.family, "network.conv_alpha")
    return str(found.get("adapter.method"))


def _precision(found: Translation, method: str) -> None:
    tables = trainer_tables(NAME)
    compute = tables["types"].get(str(found.read("train.dtype", as_text)).lower(), "auto")
    if found.read("model.quantize", boolean) and method != "full":
        kind = found.read("model.qtype", as_text) or "qfloat8"
        weights, why = tables["quantised"].get(kind, ("int8", "int8 instead of it"))
        found.take("model.quantize", "precision.weights", weights, why)
        found.unused("see model.quantize", "model.qtype")
    else:
        if found.read("model.quantize", boolean):
            found.leave("model.quantize", "weights that train are not quantised")
        found.take("train.dtype", "precision.weights", "fp32" if compute == "fp32" else "bf16", "weights have its type")
    found.take("train.dtype", "precision.compute", compute)


def _optimizer(found: Translation, method: str) -> None:
    take_optimizer(found, "train.optimizer", found.read("train.optimizer", as_text) or "adamw")
    take_arguments(found, "train.optimizer_params", found.read("train.optimizer_params", _object) or {})
    own, rate = found.read("train.unet_lr", number), found.read("train.lr", number)
    found.take("train.unet_lr" if own else "train.lr", "optimizer.lr", own or rate)
    found.unused("train.unet_lr decides" if own else "train.lr decides", "train.unet_lr", "train.lr")
    take_schedule(found, "train.lr_scheduler", found.read("train.lr_scheduler", as_text) or "constant")
    if found.read("train.train_text_encoder", boolean) and method != "none":
        rate = found.read("train.text_encoder_lr", number)
        take_text_lora(found, "train.train_text_encoder", rate)
        if found.has("train.text_encoder_lr") and found.get("text.lora") is not None:
            found.take("train.text_encoder_lr", "text.lora.learning_rate", found.get("text.lora.learning_rate"))
    found.unused("the text encoders do not train", "train.text_encoder_lr")
    if found.read("train.train_unet", boolean) is False and method != "none":
        refuse("train.train_unet", False, "the text encoders alone")
    found.unused("the denoiser trains" if method != "none" else "the embedding trains alone", "train.train_unet")
    norm = found.read("train.max_grad_norm", number)
    found.take("train.max_grad_norm", "train.clip_norm", norm or None, "0 means no clipping" if norm == 0 else "")


def _object(value: object) -> Json:
    if not isinstance(value, dict):
        raise ValueError
    return value


def _objective(found: Translation, is_flow: bool) -> None:
    least, most = found.read("train.min_denoising_steps", whole_number), found.read("train.max_denoising_steps", number)
    for key, value, flow, ddpm in (
        ("train.min_denoising_steps", least, "min_sigma", "min_timestep"),
        ("train.max_denoising_steps", most, "max_sigma", "max_timestep"),
    ):
        if key == "train.max_denoising_steps" and found.get("concept") is not None:
            continue
        if value is not None and is_flow:
            found.take(key, f"objective.{flow}", value / 1000, "a noise level from 0 to 1 here")
        elif value is not None:
            found.take(key, f"objective.{ddpm}", min(999, int(value)))
    if is_flow:
        kind, densities = found.read("train.timestep_type", as_text) or "sigmoid", trainer_tables(NAME)["densities"]
        if kind in densities:
            found.take("train.timestep_type", "objective.sigma", *densities[kind])
            found.take("train.timestep_type", "objective.shift", 1.0, "noise levels are not shifted there")
        else:
            found.leave("train.timestep_type", f"simpletune has {', '.join(densities)} of them")
    elif found.read("model.is_v_pred", boolean):
        found.take("model.is_v_pred", "objective.prediction", "v")


def _samples(found: Translation) -> None:
    rows = found.read("sample.samples", lambda value: value) or found.read("sample.prompts", lambda value: value) or []
    if not isinstance(rows, list):
        raise ValueError("sample.prompts is no list")
    key = "sample.samples" if found.has("sample.samples") else "sample.prompts"
    found.unused("sample.samples decides", *(["sample.prompts"] if key == "sample.samples" else []))
    prompts = [str(row.get("prompt", "") if isinstance(row, dict) else row) for row in rows]
    trigger = str(found.settings.get("trigger_word") or found.get("text.embeddings.token") or "")
    prompts = [prompt.replace("[trigger]", trigger).strip() if trigger else prompt for prompt in prompts]
    of_slider = found.get("concept") is not None
    if of_slider:  # "a cat --m -3"
        prompts = list(dict.fromkeys(re.sub(r",?\s--[a-z]\s.*", "", prompt) for prompt in prompts))
    prompts = [prompt for prompt in prompts if prompt]
    if prompts and not isinstance(rows[0], dict):
        found.take(key, "validation.prompts", prompts, "at the strengths -2 to 2" if of_slider else "")
    elif prompts:
        take_samples(found, key, [row for row in rows if isinstance(row, dict)], prompts)
    for name in ("width", "height"):
        side = found.read(f"sample.{name}", whole_number)
        if side is not None:
            step = found.family.architecture.multiple
            found.take(f"sample.{name}", f"validation.{name}", max(step, side // step * step))


def _data_sets(general: Translation) -> list[Translation]:
    tables = trainer_tables(NAME)
    rows = general.read("datasets", lambda value: value) or [{}]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("datasets is no list of objects")
    general.told("datasets")
    trigger = general.read("trigger_word", as_text)
    found: list[Translation] = []
    for index, row in enumerate(rows):
        for key in row:
            if key.startswith("control_path"):
                refuse_references(general, f"datasets[{index}].{key}", row[key])
        source = Translation(row, tables["defaults_data"], f"datasets[{index}].", f"data.sources.{index}.")
        source.set("path", "")
        source.by_table(tables["options_data"])
        caption = source.read("default_caption", as_text)
        if caption is not None and source.has("caption_ext"):
            source.leave("default_caption", "used for pictures without a caption. Caption them, or set prompt")
        elif caption is not None:
            token = trigger or str(general.get("text.embeddings.token") or "")
            words = caption.replace("[trigger]", token) if token else caption
            source.take("default_caption", "prompt", words, "for all pictures; remove it if they have captions")
            source.config.pop("captions", None)
        own_word = source.read("trigger_word", as_text)
        word = own_word or trigger
        if word is not None:
            source.settings["trigger_word"] = word
            if not own_word:
                source.outer["trigger_word"] = "trigger_word"
            source.take("trigger_word", "caption_prefix", word, "before every caption; there, where it is missing")
        masks = source.read("mask_path", as_text)
        if masks is not None:
            source.take("mask_path", "mask", "files")
            source.take("mask_path", "mask_path", masks)
            source.by_table([KeyRule("mask_min_value", "unmasked_weight", number)])
        _size(source, general.family.architecture.multiple)
        varied = next((key for key in ("flip_x", "random_crop", "shuffle_tokens") if source.settings.get(key)), None)
        if varied is not None:
            source.take(varied, "variants", VARIANTS, "drawn once for each variant, and cached")
        source.leave_others(tables, "_data")
        found.append(source)
    if any(line.key == "trigger_word" for source in found for line in source.lines):
        general.told("trigger_word")
    general.unused("every data set has its own", "trigger_word")
    return found


def _size(source: Translation, step: int) -> None:
    sizes = listed(source.read("resolution", lambda value: value))
    first = number(max(sizes, key=number))
    side = max(step, round(first / step) * step)
    why = "the largest of several" if len(sizes) > 1 else "" if side == first else f"in steps of {step}"
    source.take("resolution", "resolution", side, why)
    buckets = source.read("buckets", boolean)
    source.take("buckets", "aspect", "buckets" if buckets else "square")
