"""Translate the configuration of kohya's scripts (sd-scripts).

Options are a TOML file, with or without sections. Data sets are subsets of a TOML file, or train_data_dir and
reg_data_dir. sample_prompts has one prompt per line, with ``--w``, ``--h``, ``--d``, ``--l``, ``--s`` and ``--n``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from simpletune.commands.importers.command_lines import listed
from simpletune.commands.importers.common_options import (
    VARIANTS,
    take_alpha,
    take_arguments,
    take_convolutions,
    take_embedding,
    take_huber,
    take_lycoris,
    take_network_arguments,
    take_optimizer,
    take_samples,
    take_schedule,
    take_start,
    take_swapped_blocks,
    take_text_lora,
    take_warmup,
)
from simpletune.commands.importers.config_files import MOST, find_beside, read_any, read_named
from simpletune.commands.importers.translation import (
    UNKNOWN,
    Became,
    KeyOutcome,
    KeyRule,
    Translation,
    as_text,
    blocks_of,
    boolean,
    is_off,
    known_config,
    leaves,
    number,
    pairs,
    refuse,
    round_digits,
    side_of_area,
    take_family_of_base,
    trainer_tables,
    whole_number,
)
from simpletune.config.schema import run_name
from simpletune.models.lora_registry import NUMBERS
from simpletune.models.shared.family_files import ONLY_TRAINING
from simpletune.system.options import Json, UserError
from simpletune.system.regular_files import read_regular

TITLE, NAME = "kohya's scripts", "kohya"
RATES = ("down_lr_weight", "mid_lr_weight", "up_lr_weight")
BLOCKS = (*RATES, "block_lr_zero_threshold", "block_dims", "block_alphas")  # of networks.lora
SD3_DIMS = {
    "context_attn_dim": "attn.*add*",
    "context_mlp_dim": "ff_context",
    "context_mod_dim": "norm1_context",
    "x_attn_dim": "attn*.to_[qkvo]*",
    "x_mlp_dim": "ff",
    "x_mod_dim": "norm1",
}
INHERITED = (
    "flip_aug",
    "random_crop",
    "shuffle_caption",
    "keep_tokens",
    "caption_separator",
    "caption_prefix",
    "caption_suffix",
    "caption_dropout_rate",
    "caption_tag_dropout_rate",
    "caption_extension",
    "color_aug",
    "num_repeats",
    "class_tokens",
    "alpha_mask",
    "face_crop_aug_range",
    "cache_info",
    "enable_wildcard",
    "keep_tokens_separator",
    "secondary_separator",
    "caption_dropout_every_n_epochs",
    "token_warmup_min",
    "token_warmup_step",
    "custom_attributes",
    "resize_interpolation",
)
SIZES = (
    "resolution",
    "enable_bucket",
    "bucket_no_upscale",
    "min_bucket_reso",
    "max_bucket_reso",
    "bucket_reso_steps",
    "batch_size",
    "skip_image_resolution",
    "network_multiplier",
    "validation_split",
    "validation_seed",
)
ROWS = (
    KeyRule("num_repeats", "repeats", whole_number),
    KeyRule("flip_aug", "flip", boolean),
    KeyRule("random_crop", "crop", boolean, {"true": "random", "false": "center"}),
    KeyRule("shuffle_caption", "shuffle_tags", boolean),
    KeyRule("keep_tokens", "keep_tags", whole_number),
    KeyRule("caption_separator", "tag_separator", as_text),
    KeyRule("caption_prefix", "caption_prefix", as_text),
    KeyRule("caption_suffix", "caption_suffix", as_text),
    KeyRule("caption_dropout_rate", "caption_dropout", number),
    KeyRule("caption_tag_dropout_rate", "tag_dropout", number),
    KeyRule("alpha_mask", "mask", boolean, {"true": "alpha", "false": None}),
    KeyRule(
        "caption_extension", "captions", as_text, {".txt": "txt", "txt": "txt", ".caption": "txt", "caption": "txt"}
    ),
)
SHIFTS = ("flow_uniform_static_ratio", "flow_uniform_shift", "flow_uniform_base_pixels")  # of forks
FLOW = (
    "flow_timestep_distribution",
    "flow_logit_mean",
    "flow_logit_std",
    "flow_use_ot",
    *SHIFTS,
)
LECO = {
    "action": "erase", "guidance_scale": 1.0, "resolution": 512, "batch_size": 1, "multiplier": 1.0, "weight": 1.0,
}  # fmt: skip
"""Keys of LECO's prompts and what they are where the file has none."""
LECO_KEYS = (
    "target", "target_class", "positive", "negative", "unconditional", "neutral", "neutrals", "neutral_prompt_file",
    "prompt_file", "resolutions", "dynamic_resolution", "dynamic_crops",
)  # fmt: skip
FREEZING = ("network_train_unet_only", "cache_text_encoder_outputs")
FALLBACKS = {"dataset_repeats": "num_repeats", "train_batch_size": "batch_size"}  # options by other names
DEFAULT_SIZE = {"resolution": [512, 512], "enable_bucket": False}
FLAGS = {"w": "width", "h": "height", "d": "seed", "l": "scale", "s": "sample_steps", "n": "negative_prompt"}


class Variant(NamedTuple):
    """What another trainer whose options are mostly those of kohya's scripts has of its own."""

    model: Callable[[Translation], str]
    """Translates model, network, precision and noise levels; returns the method."""
    data_sets: Callable[[Json, Translation], Json]
    """Returns its data sets as kohya's."""


def flatten(settings: Json) -> Json:
    """Return the options without their sections, which have no meaning."""
    flat: Json = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= flatten(value)
        else:
            flat[key] = value
    return flat


def translate(
    settings: Json,
    folder: Path,
    data: Path | None,
    content: Json | None = None,
    defaults: Mapping[str, object] | None = None,
    variant: Variant | None = None,
) -> tuple[Translation, list[Translation]]:
    """Translate options and data, whose file ``data`` or the options name, or whose ``content`` is here; a file of data
    sets may stand alone. ``defaults``: where a program that starts the scripts has others; ``variant``: what another
    trainer with these options has of its own."""
    alone = "datasets" in settings
    options = {} if alone else flatten(settings)
    script = str(options.pop("script", ""))  # of a command line
    named_file = options.get("config_file")
    more = read_named(folder, _with_suffix(named_file)) if script else None
    others = flatten(more) if isinstance(more, dict) else {}
    options = others | options
    if "network" in script and "network_module" not in options:
        raise UserError(f"{script} has no network_module here. Give the file with its options (--config_file)")
    usual = {**trainer_tables(NAME)["defaults"], **(defaults or {})}
    if "prompts_file" in options:
        usual |= trainer_tables(NAME)["defaults_leco"]
    general = Translation({}, usual) if alone else _options(options, folder, script, usual, variant)
    if "config_file" in options and others:
        general.note("config_file", "its options are listed here; those of the command line come first")
        for key in others.keys() & settings.keys():
            why = f"{key} of the command line counts"
            general.lines.append(KeyOutcome("left out", f"config_file.{key}", others[key], why=why, same=True))
    elif "config_file" in options:
        general.leave("config_file", "the file is not here, and its options are missing")
    named = options.get("dataset_config")
    found = settings if alone else read_named(folder, named) if data is None else read_any(data)
    if data is not None:
        general.unused("--data names another file", "dataset_config")
    elif found is not None and general.has("dataset_config"):
        general.note("dataset_config", "its data sets are listed here")
    elif general.has("dataset_config"):
        general.leave("dataset_config", "the file is not here. Give it with --data")
    found = content if found is None else found
    if general.get("concept") is not None:
        sources = []
    elif found is None:
        sources = _data_folders(general)
    elif not isinstance(found, dict) or not isinstance(found.get("datasets"), list):
        raise UserError("--data: kohya's data sets are a TOML file with [[datasets]] (dataset_config)")
    else:
        sources = _data_sets(found if variant is None else variant.data_sets(found, general), general)
    general.leave_others(trainer_tables(NAME))
    return general, sources


def _with_suffix(name: object) -> object:
    """Return the name of a file of options, whose ending kohya's scripts add."""
    return name if not isinstance(name, str) or name.endswith(".toml") else f"{name}.toml"


def _options(
    settings: Json, folder: Path, script: str, defaults: Mapping[str, object], variant: Variant | None
) -> Translation:
    tables = trainer_tables(NAME)
    found = Translation(settings, defaults)
    if variant is None:
        _family(found, folder, tables["families"].get(script.partition("_")[0]))
    retrained = variant is None and _flow_of_unets(found)
    method = _adapter(found, script) if variant is None else variant.model(found)
    take_start(found, "network_weights")
    _stack(found)
    if variant is None:
        _precision(found, method)
    found.by_table(tables["options"])
    _optimizer(found)
    if found.has("prompts_file"):
        _leco(found, folder)
    elif variant is None:
        _text_encoders(found)
    _length(found)
    _memory(found, method)
    if variant is None and not retrained:
        _objective(found, found.objective == "flow")
    take_huber(found)
    _prompts(found, folder)
    if (name := found.read("output_name", as_text)) is not None:
        found.take("output_name", "name", run_name(name))
    tracker = found.read("log_with", as_text)
    if tracker is not None:
        found.take("log_with", "tracking.tensorboard", tracker in ("tensorboard", "all"))
        if tracker in ("wandb", "all"):
            found.take("log_with", "tracking.wandb", "online")
    return found


def _leco(found: Translation, folder: Path) -> None:
    """Translate the prompts of train_leco.py (LECO): erasures, enhancements and sliders.

    At the strength of its multiplier an item learns neutral -+ guidance_scale (positive - unconditional), to erase or
    to enhance; a slider's target learns both strengths, from neutral along positive - negative
    (sd-scripts, library/leco_train_util.py).
    """
    name = found.read("prompts_file", as_text)
    content = read_named(folder, name)
    if not isinstance(content, dict):
        raise UserError(f"prompts_file: {name} is not here. Put it beside the options: it names what to train")
    found.keep("prompts_file", "its prompts are listed here")
    slider = content.get("slider", content)
    rows = content.get("prompts") or (slider.get("targets") if isinstance(slider, dict) else None) or [slider]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"prompts_file: {name} has no [[prompts]] and no [[targets]], as train_leco.py reads them")
    shared = content if "prompts" in content else slider
    common = {key: value for key, value in shared.items() if key not in ("prompts", "targets", "slider")}
    directions: list[Json] = []
    sides: dict[int, None] = {}
    batches: dict[int, None] = {}
    step = found.family.architecture.multiple
    for index, row in enumerate(rows):
        values = LECO | common | row
        try:
            directions += [_direction(values | {"neutral": each}) for each in _neutrals(row, common, folder)]
            for each in _sizes_of(values):
                width, height = map(number, each if isinstance(each, list) else [each, each])
                sides[side_of_area(width, height, step)] = None
            batches[whole_number(values["batch_size"])] = None
            for key, value in row.items():
                _note_leco(found, found.part("prompts_file", f"{index}.{key}", value), key, values)
        except (ValueError, TypeError) as error:
            raise UserError(f"prompts_file: {name}: item {index + 1} cannot be read ({error}). Correct it") from None
    for key, value in common.items() if rows != [shared] else ():
        _note_leco(found, found.part("prompts_file", key, value), key, common)
    found.set("concept.directions", directions)
    found.set("concept.resolutions", list(sides))
    found.set("train.batch_size", next(iter(batches)))
    if len(batches) > 1:
        found.note("prompts_file", f"all directions have batches of {next(iter(batches))}")
    found.by_table(
        [
            KeyRule("max_denoising_steps", "concept.drawing_steps", whole_number),
            KeyRule("leco_denoise_guidance_scale", "concept.drawing_guidance", number),
        ]
    )
    found.unused("LECO trains the denoiser alone", "network_train_unet_only")
    found.unused("prompts_file has the batch", "train_batch_size")


def _direction(values: Json) -> Json:
    """Return our direction of an item of LECO's prompts."""
    found: Json = {"target": str(values.get("target_class", values.get("target", "")))}
    positive, negative = (str(values.get(name) or "").strip() for name in ("positive", "negative"))
    neutral = values["neutral"]
    if "target_class" in values:
        found |= {"positive": positive} if positive else {}
        found |= {"negative": negative} if negative else {}
    else:
        erases = str(values["action"]) == "erase"
        found["negative" if erases else "positive"] = positive or found["target"]
        if unconditional := str(values.get("unconditional", "")):
            found["unconditional"] = unconditional
    if neutral != found["target"]:
        found["neutral"] = neutral
    factors = {"guidance": number(values["guidance_scale"]), "weight": number(values["weight"])}
    return found | {name: value for name, value in factors.items() if value != 1}


def _neutrals(row: Json, common: Json, folder: Path) -> list[str]:
    """Return the prompts that an item's prediction starts from, its own or those of all; each makes a direction."""
    if "target_class" not in row | common:
        values = common | row
        return [str(values.get("neutral", values.get("unconditional", "")))]
    for given in (row, common):
        found = [str(each) for each in listed(given.get("neutrals", []))]
        for key in ("neutral_prompt_file", "prompt_file"):
            if (name := given.get(key)) and (file := find_beside(folder, str(name))) is not None:
                lines = read_regular(file, MOST).decode("utf-8", "replace").splitlines()
                found += [line.strip() for line in lines if line.strip()]
        if found or "neutral" in given:
            return found or [str(given["neutral"] or "")]
    return [""]


def _sizes_of(values: Json) -> list[object]:
    """Return an item's sizes: sides, or pairs of them."""
    sizes = values.get("resolutions", values["resolution"])
    return sizes if isinstance(sizes, list) and sizes and isinstance(sizes[0], list) else [sizes]


def _note_leco(found: Translation, part: str, key: str, values: Json) -> None:
    """Say what became of a key of LECO's prompts."""
    if key == "multiplier" and abs(number(values[key])) != 1:
        found.note(part, "the strength that it trains is 1 here")
    elif key == "multiplier" and number(values[key]) < 0:
        found.note(part, "strength 1 is trained, not -1")
    elif key in ("dynamic_resolution", "dynamic_crops") and not is_off(values[key]):
        found.leave(part, "drawings have the sides of concept.resolutions")
    elif key in LECO_KEYS or key in LECO:
        one_sided = key in ("positive", "negative") and "target_class" in values
        one_sided = one_sided and not (values.get("positive") and values.get("negative"))
        if one_sided and values[key]:
            found.note(part, "strength 1 is trained, and -1 is not")
        else:
            found.keep(part, "see concept")
    else:
        found.leave(part, "", same=False)


def _prompts(found: Translation, folder: Path) -> None:
    name = found.read("sample_prompts", as_text)
    file = None if name is None else find_beside(folder, name)
    if name is not None and file is None:
        found.leave("sample_prompts", "the file is not here. Set validation.prompts")
    elif file is not None:
        try:
            take_prompts(found, [row for row in _rows(file) if row.get("prompt")])
        except (UserError, OSError, ValueError, TypeError, AttributeError):
            found.leave("sample_prompts", "the file cannot be read. Set validation.prompts")


def _stack(found: Translation) -> None:
    """Translate LoRAs that are merged into the base before training; those without a multiplier have 1."""

    def texts(value: object) -> list[str]:
        return [as_text(each) for each in listed(value)]

    files, scales = found.read("base_weights", texts) or [], found.read("base_weights_multiplier", numbers) or []
    if not files:
        found.unused("there are no base_weights", "base_weights_multiplier")
    else:
        each = zip_longest(files, scales[: len(files)], fillvalue=1)
        named = [str(file) if scale == 1 else f"{file}:{scale:g}" for file, scale in each]
        loras = [f"{ONLY_TRAINING}{name}" if "training_adapter" in name else name for name in named]
        why = "an assistant is used only while training" if loras != named else ""
        found.take("base_weights", "model.loras", loras, why)
        if scales:
            found.keep("base_weights_multiplier", "see base_weights")


def _family(found: Translation, folder: Path, of_script: str | None) -> None:
    """Recognise the family: by the script, the GUI's switch, options that one family's scripts alone have, or the
    base."""
    base = "pretrained_model_name_or_path"
    module = found.settings.get("network_module")
    tables = trainer_tables(NAME)
    own = [key for key in tables["only_sd3"] if found.has(key)]
    if of_script is not None:
        found.set("model.family", of_script)
    elif found.read("sdxl", boolean):
        found.take("sdxl", "model.family", "sdxl")
    elif own or module == "networks.lora_sd3":
        found.set("model.family", "sd3")
    else:
        told = [key for key in tables["not_sd15"] if not is_off(found.settings.get(key))]
        otherwise = ("sdxl", f"SD 1.5's scripts have no {told[0]}") if told else ("sd15", UNKNOWN)
        known = take_family_of_base(found, base, folder, *otherwise)
        if not known and re.search(tables["other_bases"], name := str(found.settings.get(base))):
            refuse(base, name, "another model")
    if found.objective != "flow":
        for key in ("weighting_scheme", "training_shift"):
            found.defaults.pop(key)


def _adapter(found: Translation, script: str) -> str:
    """Translate the network, or the embedding, or the whole denoiser, where the file or its script says so."""
    module, arguments = found.read("network_module", as_text), found.read("network_args", pairs) or {}
    tables = trainer_tables(NAME)
    if found.has("token_string") or "textual_inversion" in script:
        keys = {"token": "token_string", "initial": "init_word", "vectors": "num_vectors_per_token"}
        take_embedding(found, keys, None)
        found.set("text.embeddings.keep_norm", False)
        found.unused("the embedding trains alone", *tables["of_networks"])
        return "none"
    if module is None:
        whole = next((key for key in tables["of_full"] if found.has(key)), None)
        if script not in tables["full"] and (whole is None or found.has("network_dim")):
            raise UserError(
                "network_module names no network, and nothing says that the whole model trains. "
                'Add network_module = "networks.lora" for a LoRA, or script = "train_db.py" (sdxl_train.py, '
                "sd3_train.py) for fine-tuning"
            )
        key = "script" if script in tables["full"] else str(whole)
        found.settings.setdefault(key, script)
        found.take(key, "adapter.method", "full", "without a network, everything trains")
        found.unused("without network_module it does nothing", *tables["of_networks"])
        return "full"
    found.take("network_module", "adapter.targets", "all_linear", "what kohya's networks update")
    args = Translation(arguments, section="network_args.")
    args.config = found.config
    rank, alpha = found.read("network_dim", whole_number), found.read("network_alpha", number)
    named = {"networks.loha": "loha", "networks.lokr": "lokr"}
    if module.startswith("lycoris") or module in named:
        args.defaults["algo"] = named.get(module, "lora")
        take_lycoris(
            found, "network_module", args, found, {"rank": "network_dim", "alpha": "network_alpha"}, module in named
        )
        if found.get("adapter.method") in ("full", "partial"):  # which have no targets
            adapter = {name: found.get(f"adapter.{name}") for name in ("method", "layers")}
            found.set("adapter", {name: value for name, value in adapter.items() if value is not None})
            found.lines = [line for line in found.lines if line.path != "adapter.targets"]
            found.keep("network_module", "its algorithm trains the weights themselves")
    elif module.startswith("networks.oft"):
        found.take("network_module", "adapter.method", "oft")
        found.leave("network_dim", "it is the number of blocks; adapter.block_size is their size")
        found.unused("networks.oft reads it as the constraint, which is not translated", "network_alpha")
    else:
        found.take("network_module", "adapter.method", "lora")
        found.take("network_dim", "adapter.rank", rank)
        take_alpha(found, "network_alpha", alpha, rank)
        if module == "networks.lora_sd3":
            _layers_of_sd3(args)
        else:
            args.defaults["conv_alpha"] = 1
            conv_rank, conv_alpha = args.read("conv_dim", whole_number), args.read("conv_alpha", number)
            take_convolutions(args, "conv_dim", conv_rank, conv_alpha, found.family)
            _layers_of_unet(found, args, rank, alpha)
    if not module.startswith("lycoris") and module not in named:
        take_network_arguments(args)
        args.leave_others(tables, "_network")
        found.lines += args.lines
    if arguments:
        found.told("network_args")
    found.by_table([KeyRule("network_dropout", "adapter.dropout", number)])
    return str(found.get("adapter.method"))


def _layers_of_unet(found: Translation, args: Translation, rank: int | None, alpha: float | None) -> None:
    """Translate ranks, alphas and learning rates of a U-Net's blocks, as networks.lora counts them."""
    given = {name: str(args.settings[name]) for name in BLOCKS if args.has(name)}
    names = found.family.lora[0].names
    if names.kohya_blocks is None or found.get("adapter.conv_rank"):
        why = (
            "blocks are translated without their convolutions only"
            if names.kohya_blocks
            else f"networks.lora counts no blocks of {found.family.words.title}"
        )
        for name in given:
            args.leave(name, why)
        return
    before, *sides, after = names.kohya_blocks
    total = before + sum(sides) + after
    read: dict[str, list[float]] = {}
    for name, value in given.items():
        try:
            kind = whole_number if name == "block_dims" else number
            read[name] = _rates(value, sides[0]) if name in RATES else [kind(part) for part in value.split(",")]
        except ValueError:
            args.leave(name, "expected: numbers")
        else:
            if name.endswith("s") and len(read[name]) != total:
                args.leave(name, f"expected: {total} numbers")
                del read[name]
    if "block_alphas" in read and not {"block_dims", *RATES} & read.keys():
        why = "networks.lora ignores it without block_dims or learning rates of blocks"
        args.leave("block_alphas", why, same=True)
        del read["block_alphas"]
    least = read.get("block_lr_zero_threshold", [0.0])[0]
    rates = [1.0] * before
    for name, count in zip(RATES, sides, strict=True):
        own = [*read.get(name, ()), *[1.0] * count][:count]  # those that are lacking are 1
        rates += [rate if rate > least or name not in read else 0 for rate in own]
    columns = {"lr_ratio": rates + [1.0] * after}
    columns |= {ours: read[name] for ours, name in (("rank", "block_dims"), ("alpha", "block_alphas")) if name in read}
    if "alpha" in columns:  # 0 means the rank
        dims = columns.get("rank", [rank or 1] * len(rates))
        columns["alpha"] = [own or dim or 1 for own, dim in zip(columns["alpha"], dims, strict=True)]
    usual = {"lr_ratio": 1, "rank": rank, "alpha": alpha}
    rows = zip(*([(name, value) for value in values] for name, values in columns.items()), strict=True)
    settings = [{name: value for name, value in row if value != usual[name]} for row in rows]
    numbers = names.block_numbers(known_config(found)) if read else {}
    entries = _of_blocks({name: settings[index] for name, index in numbers.items()})
    for name in read:
        args.take(name, "adapter.layers", entries)


def _rates(text: str, blocks: int) -> list[float]:
    """Return the learning rates of a side's blocks: numbers, or the name of a curve, to which a number may be added."""
    name, _, base = text.partition("+")
    if not name[:1].isalpha():
        return [number(part) if part.strip() else 0.0 for part in text.split(",")]
    rise = [index / (blocks - 1) for index in range(blocks)]
    arc = [math.sin(math.pi * each / 2) for each in rise]
    curves = {"sine": arc, "cosine": arc[::-1], "linear": rise, "reverse_linear": rise[::-1], "zeros": [0.0] * blocks}
    if name not in curves:
        raise ValueError
    return [round_digits(each + number(base or 0)) for each in curves[name]]


def _of_blocks(settings: Mapping[str, Json]) -> list[Json]:
    """Return ``adapter.layers`` from what differs in each attention, by diffusers' name: by levels where they do not
    differ within."""
    sides: dict[str, dict[str, list[Json]]] = {"mid": {}, "down": {}, "up": {}}
    for name, own in settings.items():
        side, level = name.partition("_")[0], name.split(".")[1]
        sides[side].setdefault("" if side == "mid" else level, []).append(own)
    rows: list[tuple[str, Json]] = []
    for side, levels in sides.items():
        alike: dict[str, list[str]] = {}
        for level, of_level in levels.items():
            if all(each == of_level[0] for each in of_level):
                alike.setdefault(json.dumps(of_level[0]), []).append(level)
            else:
                rows += [(f"{side}.{level}.attentions.{index}", each) for index, each in enumerate(of_level)]
        rows += [(f"{side}.{','.join(same)}".rstrip("."), json.loads(each)) for each, same in alike.items()]
    return [{"pattern": pattern, **each} for pattern, each in rows if each]


def _layers_of_sd3(args: Translation) -> None:
    """Translate ranks by kind of layer, and the blocks that train."""
    entries: list[Json] = []
    keys: list[str] = []
    for name in [name for name in (*SD3_DIMS, "train_block_indices") if args.has(name)]:
        chosen = str(args.settings[name]).replace(" ", "")
        if name in SD3_DIMS and chosen.isdecimal():
            entries.append({"pattern": SD3_DIMS[name], "rank": int(chosen)})
        elif name not in SD3_DIMS and NUMBERS.fullmatch(chosen):
            entries += [{"pattern": "blocks", "lr_ratio": 0}, {"pattern": f"blocks.{chosen}", "lr_ratio": 1}]
        elif chosen != "all":
            args.leave(name, "expected: a whole number" if name in SD3_DIMS else "expected: numbers of blocks, or all")
            continue
        keys.append(name)
    for name in keys:
        args.take(name, "adapter.layers", entries)
    args.unused("networks.lora_sd3 ignores it", *BLOCKS, "conv_dim", "conv_alpha")


def _precision(found: Translation, method: str) -> None:
    compute = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}.get(found.read("mixed_precision", as_text) or "no", "auto")
    full = found.read("full_bf16", boolean)
    eight = [key for key in ("fp8_base", "fp8_base_unet") if found.read(key, boolean)]
    if eight:
        found.take(eight[0], "precision.weights", "int8", "int8 weights take as many bytes, with a smaller error")
        found.unused(f"{eight[0]} decides", *eight, "full_bf16")
    elif full:
        found.take("full_bf16", "precision.weights", "bf16")
    elif method == "full" or compute == "fp32":
        found.take("mixed_precision", "precision.weights", "fp32", "kohya's scripts then keep full weights")
    else:
        found.take("mixed_precision", "precision.weights", "bf16", "a frozen base, in the compute type")
    found.take("mixed_precision", "precision.compute", compute)


def _optimizer(found: Translation) -> None:
    given = {"use_8bit_adam": "AdamW8bit", "use_lion_optimizer": "Lion"}  # of older versions
    old = next((key for key in given if found.read(key, boolean)), None)
    if old is None or found.has("optimizer_type"):
        take_optimizer(found, "optimizer_type", found.read("optimizer_type", as_text) or "AdamW")
        found.unused("optimizer_type decides", *given)
    else:
        take_optimizer(found, old, given[old])
    take_arguments(found, "optimizer_args", found.read("optimizer_args", pairs) or {})
    rate, own = found.read("learning_rate", number), found.read("unet_lr", number)
    if own is not None:
        found.take("unet_lr", "optimizer.lr", own, "the learning rate of the part that trains here")
        if found.has("learning_rate"):
            found.leave("learning_rate", "unet_lr decides", same=True)
    elif rate is not None:
        found.take("learning_rate", "optimizer.lr", rate)
    schedule = take_schedule(found, "lr_scheduler", found.read("lr_scheduler", as_text) or "constant")
    for key, path, of, needed in (
        ("lr_scheduler_power", "schedule.power", number, "polynomial"),
        ("lr_scheduler_num_cycles", "schedule.cycles", whole_number, "cosine_with_restarts"),
        ("lr_scheduler_min_lr_ratio", "schedule.end", number, "polynomial"),
    ):
        if schedule == needed:
            found.by_table([KeyRule(key, path, of)])
        elif found.has(key):
            found.leave(key, f"schedule {schedule} has no such option", same=True)


def numbers(value: object) -> list[float]:
    return [number(each) for each in listed(value)]


def _text_encoders(found: Translation) -> None:
    """Translate text encoders that train beside a network, as they do unless an option prevents it."""
    rates = found.read("text_encoder_lr", numbers) or []
    clip, differ = found.family.text.trainable, len(set(rates)) > 1
    if found.settings.get("network_module") not in trainer_tables(NAME)["own_rates"]:
        rates = rates[:1]
    of_clip = (rates * len(clip) if len(rates) == 1 else rates)[: len(clip)]
    trained = [name for name, rate in zip(clip, of_clip, strict=False) if rate]
    frozen = [found.read(key, boolean) for key in FREEZING]
    if any(frozen) or (of_clip and not trained) or found.get("adapter.method") in ("full", "none"):
        found.unused("the text encoders do not train", "text_encoder_lr")
        for key in FREEZING:
            if boolean(found.settings.get(key, False)):
                found.keep(key, "the text encoders stay frozen; prompts are always cached")
    else:
        rate = next((rate for rate in of_clip if rate), None)
        encoders = trained if rate and len(trained) < len(of_clip) else None
        key = "text_encoder_lr" if rate else "network_module"
        take_text_lora(found, key, rate or found.read("learning_rate", number), "attention_and_mlp", encoders)
        if differ and (len(rates) == 1 or len({each for each in of_clip if each}) > 1):
            found.note("text_encoder_lr", "one learning rate for all text encoders: the first")


def _length(found: Translation) -> None:
    epochs, steps = found.read("max_train_epochs", whole_number), found.read("max_train_steps", whole_number)
    if epochs:
        found.take("max_train_epochs", "train.epochs", epochs)
        if found.has("max_train_steps"):
            found.leave("max_train_steps", "max_train_epochs decides", same=True)
    else:
        found.take("max_train_steps", "train.steps", steps)
    take_warmup(found, "lr_warmup_steps")
    norm = found.read("max_grad_norm", number)
    found.take("max_grad_norm", "train.clip_norm", norm or None, "0 means no clipping" if norm == 0 else "")
    last, every = found.read("save_last_n_steps", whole_number), found.settings.get("save_every_n_steps")
    if last and every:
        found.take(
            "save_last_n_steps", "checkpoint.keep_last", max(1, last // int(every)), "counted in checkpoints here"
        )
    elif last:
        found.leave("save_last_n_steps", "set checkpoint.keep_last")


def _memory(found: Translation, method: str) -> None:
    found.by_table(
        [KeyRule("gradient_checkpointing", "memory.checkpointing", boolean, {"true": "all", "false": "none"})]
    )
    fused = found.read("fused_backward_pass", boolean)
    if method == "full" and found.has("blocks_to_swap") and not fused:
        found.leave("blocks_to_swap", "blocks that train are offloaded only with memory.optimizer_in_backward")
    else:
        take_swapped_blocks(found, "blocks_to_swap", blocks_of(found))
    if fused:
        if method == "full":
            found.take("fused_backward_pass", "memory.optimizer_in_backward", True)
            found.take("fused_backward_pass", "train.clip", "per_parameter", "gradients never exist all at once")
        else:
            found.leave("fused_backward_pass", "an adapter's gradients are small")


def _objective(found: Translation, is_flow: bool) -> None:
    if is_flow:
        scheme, densities = found.read("weighting_scheme", as_text) or "uniform", trainer_tables(NAME)["densities"]
        if scheme in ("none", "sigma_sqrt"):
            why = (
                "it weights the loss by 1 / sigma^2, which simpletune does not do"
                if scheme == "sigma_sqrt"
                else "uniform"
            )
            found.take("weighting_scheme", "objective.sigma", densities[scheme], why)
        elif scheme in densities:
            found.take("weighting_scheme", "objective.sigma", densities[scheme])
        else:
            found.leave("weighting_scheme", f"simpletune has {', '.join(dict.fromkeys(densities.values()))}")
        found.by_table(
            [
                KeyRule("logit_mean", "objective.logit_mean", number),
                KeyRule("logit_std", "objective.logit_std", number),
                KeyRule("mode_scale", "objective.mode_scale", number),
                KeyRule("training_shift", "objective.shift", number),
            ]
        )
        found.unused(f"{found.family.words.title} predicts velocities", "v_parameterization")
    elif found.read("v_parameterization", boolean):
        found.take("v_parameterization", "objective.prediction", "v")
    for key, flow, ddpm in (
        ("min_timestep", "min_sigma", "min_timestep"),
        ("max_timestep", "max_sigma", "max_timestep"),
    ):
        step = found.read(key, whole_number)
        if step is not None and is_flow:
            found.take(key, f"objective.{flow}", step / 1000, "a noise level from 0 to 1 here")
        elif step is not None:
            found.take(key, f"objective.{ddpm}", min(step, 999))


def _flow_of_unets(found: Translation) -> bool:
    """Translate the options of forks for rectified flow with a UNet, and for autoencoders like EQ-VAE's
    (bluvoll/sd-scripts, train_network.py); return whether the former are in use."""
    own = {"vae_custom_scale": "vae_scale", "vae_custom_shift": "vae_shift"}
    of_unets = "vae_scale" in type(found.family).model_fields
    if of_unets:
        found.by_table([KeyRule(key, f"model.{path}", number) for key, path in own.items()])
        if found.read("vae_reflection_padding", boolean):
            found.take("vae_reflection_padding", "model.vae_padding", "reflect")
    if not (of_unets and found.read("flow_model", boolean)):
        found.unused("without flow_model it does nothing", *FLOW)
        return False
    found.take("flow_model", "objective.name", "flow")
    found.take("flow_model", "objective.round_time", True, "the scripts round the timestep down")
    found.defaults["flow_timestep_distribution"] = "logit_normal"
    density = found.read("flow_timestep_distribution", as_text)
    found.take("flow_timestep_distribution", "objective.sigma", density)
    ratio, by_size = found.read("flow_uniform_static_ratio", number), found.read("flow_uniform_shift", boolean)
    pixels = found.read("flow_uniform_base_pixels", number) or 1024**2
    if density != "uniform":
        found.set("objective.shift", 1.0)
        found.unused("uniform levels alone are shifted", *SHIFTS)
    elif ratio:
        found.take("flow_uniform_static_ratio", "objective.shift", ratio)
        found.unused("flow_uniform_static_ratio decides", *SHIFTS)
    elif by_size and pixels == 1024**2:
        found.take("flow_uniform_shift", "objective.shift", "resolution")
        found.unused("1024 x 1024 is objective.shift's, too", "flow_uniform_base_pixels")
    elif by_size:
        found.set("objective.shift", 1.0)
        why = f"set objective.shift to the resolution / {math.sqrt(pixels):g}"
        found.leave("flow_uniform_shift", f"objective.shift resolution counts from 1024 x 1024: {why}")
        found.note("flow_uniform_base_pixels", "see flow_uniform_shift")
    else:
        found.set("objective.shift", 1.0)
        found.unused("without flow_uniform_shift it does nothing", *SHIFTS)
    if density == "logit_normal":
        rules = {"flow_logit_mean": "objective.logit_mean", "flow_logit_std": "objective.logit_std"}
        found.by_table([KeyRule(key, path, number) for key, path in rules.items()])
    found.unused("uniform levels have none", "flow_logit_mean", "flow_logit_std")
    found.unused("rectified flow does not read it there", "min_timestep", "max_timestep", "v_parameterization")
    return True


def _data_sets(data: Json, general: Translation) -> list[Translation]:
    """Translate every subset of a data set's TOML file. A value comes from the subset, its data set, ``general`` or the
    options, whichever is the nearest."""
    options, names = _given(general)
    shared = [(options, names), _level(data.get("general") or {}, "general.")]
    levels = list(shared)
    found: list[Translation] = []
    for number_of, dataset in enumerate(data["datasets"]):
        section = f"datasets[{number_of}]."
        levels.append(_level({key: value for key, value in dataset.items() if key != "subsets"}, section))
        settings: Json = {}
        outer: dict[str, str] = {}
        for values, own_names in (*shared, levels[-1]):
            settings |= values
            outer |= own_names
        for index, subset in enumerate(dataset.get("subsets") or []):
            source = Translation(
                settings | subset,
                {"resolution": 512, "num_repeats": 1, "enable_bucket": False},
                f"{section}subsets[{index}].",
                f"data.sources.{len(found)}.",
                {key: name for key, name in outer.items() if key not in subset},
            )
            _subset(source, general)
            found.append(source)
    _batch_size(found, general)
    told = {line.key for source in found for line in source.lines}
    why = "every subset sets its own" if found else "there are no subsets"
    for values, own_names in levels:
        for key in [key for key, name in own_names.items() if name not in told]:
            general.lines.append(KeyOutcome("left out", own_names[key], values[key], why=why, same=True))
    for key in data.keys() - {"general", "datasets"}:
        general.lines += [KeyOutcome("unknown", name, value) for name, value in leaves(data[key], key)]
    return found


def _level(settings: Json, section: str) -> tuple[Json, dict[str, str]]:
    """Return settings of one level of a data set's file, and their whole names."""
    return settings, {key: f"{section}{key}" for key in settings}


def _batch_size(sources: list[Translation], general: Translation) -> None:
    """Translate the batch sizes of the data sets to one."""
    sizes = {source.read("batch_size", whole_number) or 1 for source in sources}
    largest = max(sizes, default=1)
    why = "one value for all data sets: the largest" if len(sizes) > 1 else ""
    general.set("train.batch_size", largest)
    for source in sources:
        if source.has("batch_size"):
            name, given = source.name("batch_size"), source.settings["batch_size"]
            became: Became = "changed" if why else "taken"
            source.lines.append(KeyOutcome(became, name, given, "train.batch_size", largest, why))


def _given(general: Translation) -> tuple[Json, dict[str, str]]:
    """Return data options given among the other options, which count where the data set's file sets no value, and what
    they are called there."""
    names = {ours: theirs for theirs, ours in FALLBACKS.items() if general.has(theirs)}
    names |= {key: key for key in (*INHERITED, *SIZES) if general.has(key)}
    given = {key: general.settings[name] for key, name in names.items()}
    if isinstance(size := given.get("resolution"), str):
        given["resolution"] = [part.strip() for part in size.split(",")]
    general.told(*names.values())
    return given, names


def _data_folders(general: Translation) -> list[Translation]:
    """Translate train_data_dir and reg_data_dir, whose folders are named ``10_sks dog``."""
    given, names = _given(general)
    found: list[Translation] = []
    folders = [key for key in ("train_data_dir", "reg_data_dir") if general.has(key)]
    if "train_data_dir" not in folders:
        source = Translation(given, DEFAULT_SIZE, "", "data.sources.0.", names)
        _subset(source, general)
        found.append(source)
    for key in folders:
        path = general.read(key, as_text)
        place = f"data.sources.{len(found)}."
        source = Translation({"image_dir": path, **given}, DEFAULT_SIZE, "", place, names | {"image_dir": key})
        if key == "reg_data_dir":
            source.settings["is_reg"] = True
            source.outer["is_reg"] = key
        source.take(
            "image_dir", "folder_names", "kohya", "10_sks dog: 10 repeats, and a caption for pictures without one"
        )
        source.unused("the folders' names have the number", "num_repeats")
        _subset(source, general)
        found.append(source)
        general.told(key)
    _batch_size(found, general)
    return found


def _subset(source: Translation, general: Translation) -> None:
    source.set("path", "")
    source.told("batch_size")
    source.by_table([KeyRule("image_dir", "path", as_text)])
    words = source.read("class_tokens", as_text)
    if words is not None and (source.has("caption_extension") or source.get("folder_names") == "kohya"):
        source.leave("class_tokens", "used for pictures without a caption. Caption them, or set prompt")
    elif words is not None:  # a source here has either captions or one prompt
        source.take("class_tokens", "prompt", words, "for all pictures; remove it if they have captions")
    source.by_table(ROWS)
    if source.read("is_reg", boolean):
        source.take("is_reg", "regularization", True)
        weight = general.read("prior_loss_weight", number)
        if weight is not None:
            source.settings["prior_loss_weight"] = weight
            source.outer["prior_loss_weight"] = "prior_loss_weight"
            source.take("prior_loss_weight", "weight", weight)
            general.told("prior_loss_weight")
    masks = source.read("conditioning_data_dir", as_text)
    if masks is not None:
        source.take("conditioning_data_dir", "mask", "files")
        source.take("conditioning_data_dir", "mask_path", masks)
        general.unused("masks count where they are", "masked_loss")
    _size(source, general.family.architecture.multiple)
    varied = [key for key in ("flip_aug", "random_crop", "shuffle_caption") if boolean(source.settings.get(key, False))]
    varied += ["train_inpainting"] if general.get("model.inpainting") else []  # a new hole in every step
    if varied or source.get("tag_dropout"):
        key = (varied or ["caption_tag_dropout_rate"])[0]
        source.take(key, "variants", VARIANTS, "drawn once for each variant, and cached")
    source.leave_others(trainer_tables(NAME), "_data")


def _size(source: Translation, step: int) -> None:
    size = source.read("resolution", lambda value: value)
    sides = [number(side) for side in listed(size)]
    width, height = sides[0], sides[-1]
    side = side_of_area(width, height, step)
    same = math.isclose(side * side, width * height)
    why = "" if same else f"the side of a square of that area, in steps of {step}"
    source.take("resolution", "resolution", side, why)
    bucket = source.read("enable_bucket", boolean)
    source.take("enable_bucket", "aspect", "buckets" if bucket else "square")
    if source.read("bucket_no_upscale", boolean):
        source.take(
            "bucket_no_upscale",
            "max_upscale",
            1.0,
            "pictures that would be scaled up are refused; kohya's scripts give them smaller buckets",
        )


def take_prompts(found: Translation, rows: list[Json]) -> None:
    """Take the prompts of sample_prompts, and size, seed, steps and guidance of the first."""
    if not rows:
        return found.leave("sample_prompts", "the file has no prompts")
    take_samples(found, "sample_prompts", rows, [str(row["prompt"]) for row in rows])
    found.keep("sample_prompts", "its prompts are listed here")


def _rows(file: Path) -> list[Json]:
    rows: object
    if file.suffix == ".json":
        rows = read_any(file)
    elif file.suffix == ".toml":
        whole = read_any(file)
        assert isinstance(whole, dict), "TOML is a table"
        own = whole.get("prompt", {})
        general = {key: value for key, value in own.items() if key != "subset"}
        rows = [{**general, **each} for each in own.get("subset", [])]
    else:
        content = read_regular(file, MOST).decode("utf-8-sig")
        rows = [line.strip() for line in content.splitlines() if line.strip() and not line.startswith("#")]
    if not isinstance(rows, list):
        raise ValueError("no list of prompts")
    return [prompt_row(row) if isinstance(row, str) else dict(row) for row in rows]


def prompt_row(line: str) -> Json:
    """Split a line such as ``a dog --w 1024 --n blurred`` into its parts."""
    first, *flags = re.split(r"\s--(?=[a-z]+\s)", f" {line}")
    row: Json = {"prompt": first.strip()}
    for flag in flags:
        letter, _, value = flag.partition(" ")
        row[FLAGS.get(letter, f"--{letter}")] = value.strip()
    return row
