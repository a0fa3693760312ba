"""The short trainings of ``make compare``, what of the schema they must cover, and names that the older tree lacks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Json = dict[str, object]

FIELDS: dict[str, str] = {"train.fsdp": "train.sharding", "validation.loss_samples": "validation.eval_samples"}
"""Renamed fields and values, newer to older: ``{"train.steps": "train.max_steps"}`` moves or renames a field, and
``{"optimizer.name=adamw_8bit": "optimizer.name=adamw8bit"}`` a value."""
WORDS: dict[str, str] = {}
"""Renamed verbs and flags of the command line, newer to older: ``{"generate": "draw", "--runs": "--folder"}``."""
FILES: dict[str, str] = {}
"""Renamed files and folders of a run, newer to older: ``{"weights.safetensors": "trainable.safetensors"}``."""

INPUTS = "INPUTS"  # stands for the folder that tests/support/compare_inputs.py has written
PROMPT = "a flat picture of a large blue heart in the middle, on a white background"
CLASS = "a striped picture of a small red circle"


@dataclass(frozen=True)
class Row:
    """A short training, which both trees run.

    Args:
        covers: what it is there for, in the table.
        config: its configuration without name and output.
        processes: how many train it together.
        resumes: stop after half the steps, then continue in a new process.
        draws: generate a picture with the result.
    """

    covers: str
    config: Json
    processes: int = 1
    resumes: bool = False
    draws: bool = False


DATA: Json = {"source": "folder", "path": f"{INPUTS}/flat", "resolution": 32, "caption_dropout": 0.2}
MASKED: Json = {"source": "folder", "path": f"{INPUTS}/masked", "resolution": 32}
TRAIN: Json = {"steps": 4, "batch_size": 2, "seed": 5}
LORA: Json = {"method": "lora", "rank": 2}
FULL: Json = {"method": "full"}
FP32: Json = {"weights": "fp32", "compute": "fp32"}
BF16: Json = {"weights": "bf16", "compute": "bf16"}
INT8: Json = {"weights": "int8", "compute": "bf16"}
SLOW: Json = {"lr": 0.001}  # for all weights
GENERATED: Json = {"prompts": [PROMPT], "steps": 2, "guidance": 2.0, "loss_samples": 2}
EMBEDDINGS: Json = {"token": "flat", "initial": "striped"}
SD3: Json = {
    "device": "cpu",
    "model": {"pretrained": f"{INPUTS}/sd3", "t5_length": 8},
    "data": DATA,
    "adapter": LORA,
    "precision": FP32,
    "optimizer": {"lr": 0.01},
    "train": TRAIN,
    "memory": {"checkpointing": "none"},
    "checkpoint": {"every": 2},
    "validation": {"prompts": [], "loss_samples": 0},
    "profile": {"max_traces": 0},
    "tracking": {"tensorboard": False},
}
SD15: Json = SD3 | {"model": {"family": "sd15", "pretrained": f"{INPUTS}/sd15"}, "data": DATA | {"resolution": 64}}
SD2: Json = SD15 | {"model": {"family": "sd15", "pretrained": f"{INPUTS}/sd2"}}
SDXL: Json = SD15 | {"model": {"family": "sdxl", "pretrained": f"{INPUTS}/sdxl"}}
KLEIN: Json = SD15 | {"model": {"family": "klein", "pretrained": f"{INPUTS}/klein", "text_length": 64}}
ZIMAGE: Json = SD15 | {"model": {"family": "zimage", "pretrained": f"{INPUTS}/zimage", "text_length": 64}}
QWEN: Json = SD15 | {
    "model": {"family": "qwen_image", "pretrained": f"{INPUTS}/qwen_image", "text_length": 64},
    "adapter": LORA | {"targets": "attention"},
}


def rows() -> dict[str, Row]:
    """Every row by its name."""
    found: dict[str, Row] = {}
    for group in (
        _adapters,
        _text,
        _precisions,
        _optimizers,
        _objectives,
        _unets,
        _klein,
        _zimage,
        _qwen_image,
        _concepts,
        _levers,
        _data,
        _runs,
    ):
        for name, row in group():
            assert name not in found, name
            found[name] = row
    return found


Named = Iterator[tuple[str, Row]]


def _adapters() -> Named:
    yield "lora", Row("LoRA", SD3, draws=True)
    options = {"alpha": 3.0, "rank_stabilized": True, "dropout": 0.2, "b_lr_ratio": 4.0, "targets": "all_linear"}
    yield "lora, options", Row("LoRA's rank, alpha, dropout, learning rates", SD3 | {"adapter": LORA | options})
    dropped = {"rank_dropout": 0.3, "module_dropout": 0.3, "max_norm": 0.01, "dtype": "bf16", "targets": "attention_qv"}
    yield "lora, bf16", Row("LoRA in bf16, dropped ranks and layers", SD3 | {"adapter": LORA | dropped})
    for targets in ("attention_image", "attention_mlp"):
        yield f"lora, {targets}", Row("LoRA's targets", SD3 | {"adapter": LORA | {"targets": targets}})
    yield "dora", Row("DoRA", SD3 | {"adapter": {"method": "dora", "rank": 2, "dropout": 0.1}})
    yield "dora, int8", Row("DoRA over int8", SD3 | {"adapter": {"method": "dora", "rank": 2}, "precision": INT8})
    yield "full", Row("full fine-tuning", SD3 | {"adapter": FULL, "optimizer": SLOW}, draws=True)
    partial = {"method": "partial", "layers": ["*.attn*", "*norm1*"]}
    yield "partial", Row("part of the weights", SD3 | {"adapter": partial, "optimizer": SLOW})
    yield "lokr", Row("LoKr", SD3 | {"adapter": {"method": "lokr", "factor": 4, "rank": 2, "decompose_both": True}})
    yield "lokr, int8", Row("LoKr over int8", SD3 | {"adapter": {"method": "lokr", "factor": -1}, "precision": INT8})
    yield "loha", Row("LoHa", SD3 | {"adapter": {"method": "loha", "rank": 2}})
    yield "oft", Row("OFT", SD3 | {"adapter": {"method": "oft", "block_size": 16}})
    yield "oft, int8", Row("OFT over int8", SD3 | {"adapter": {"method": "oft", "dtype": "bf16"}, "precision": INT8})
    for activation in ("linear", "relu", "leakyrelu", "elu", "swish", "tanh", "sigmoid"):
        network: Json = {"method": "hypernetwork", "activation": activation}
        if activation == "swish":
            network |= {"widths": "all", "layer_norm": True, "dropout": 0.1, "layer_structure": [1.0, 1.5, 1.0]}
        yield f"hypernetwork, {activation}", Row("hypernetworks", SD15 | {"adapter": network})


def _text() -> Named:
    none: Json = SD3 | {"adapter": {"method": "none"}}
    output = EMBEDDINGS | {"vectors": 2}
    yield "embeddings", Row("a token's embeddings alone", none | {"text": {"embeddings": output}})
    taken_in = EMBEDDINGS | {"place": "input", "keep_norm": False, "stop_at": 0.5}
    both: Json = {"embeddings": taken_in, "lora": {"rank": 2, "learning_rate": 0.01}}
    yield "embeddings, LoRA and CLIP", Row("inputs of CLIP, CLIP's LoRA and a LoRA", SD3 | {"text": both})
    alone: Json = {"lora": {"rank": 2, "targets": "attention_and_mlp", "learning_rate": 0.01}}
    yield "LoRA of CLIP, UNet", Row("CLIP's LoRA beside a UNet's", SD15 | {"text": alone})
    yield "no T5", Row("SD3 without T5", SD3 | {"model": {"pretrained": f"{INPUTS}/sd3", "t5": False}})
    cached = {"pretrained": f"{INPUTS}/sd3", "t5_length": 8, "t5_cached": "int8"}
    yield "T5 cached in int8", Row("the cache of T5's embeddings", SD3 | {"model": cached})


def _precisions() -> Named:
    for weights in ("bf16", "fp32", "int8", "int8-quanto", "nf4"):
        for compute in ("bf16", "fp16", "fp32"):
            if (weights, compute) != ("bf16", "fp32"):
                precision = {"weights": weights, "compute": compute}
                yield f"{weights}, products in {compute}", Row("precisions", SD3 | {"precision": precision})
    larger: Json = SD3 | {"data": DATA | {"resolution": 64}}  # more rows than are dequantised
    products = INT8 | {"products": "int8"}
    yield "int8 products", Row("products in int8", larger | {"precision": products})
    both = products | {"input_gradient": "int8"}
    yield "int8 products and gradients", Row("gradients in int8", larger | {"precision": both})
    rotated = products | {"rotation": "hadamard"}
    yield "int8 products, rotated", Row("rotated int8, products in int8", larger | {"precision": rotated})
    for weights in ("int8", "nf4"):
        precision = {"weights": weights, "compute": "fp32", "rotation": "hadamard"}
        yield f"{weights}, rotated", Row("rotated weights", SD3 | {"precision": precision})
    plain = {"weights": "nf4", "compute": "bf16", "double_quantisation": False, "modulation": "nf4"}
    yield "nf4, options", Row("nf4's scales and modulation", SD3 | {"precision": plain})
    full: Json = SD3 | {"adapter": FULL, "optimizer": SLOW}
    yield "full, bf16", Row("all weights in bf16", full | {"precision": BF16})
    yield "full, products in fp16", Row("all weights, fp16", full | {"precision": FP32 | {"compute": "fp16"}})


def _optimizers() -> Named:
    schedules = ("linear", "cosine", "polynomial", "cosine_with_restarts", "rex", "constant", "constant", "constant")
    settings: dict[str, Json] = {
        "adamw": {"weight_decay": 0.01, "betas": [0.8, 0.95]},
        "adamw8bit": {"weight_decay": 0.01},
        "paged_adamw8bit": {},
        "lion8bit": {"lr": 1e-4},
        "adafactor": {},
        "adamw_bf16": {"weight_decay": 0.01},
        "prodigy": {"lr": 1.0, "d0": 1e-4, "use_bias_correction": True, "safeguard_warmup": True},
        "adamw_schedule_free": {"weight_decay": 0.01},
    }
    for (name, options), schedule in zip(settings.items(), schedules, strict=True):
        optimizer = SLOW | {"name": name} | options
        config = SD3 | {"optimizer": optimizer, "schedule": {"name": schedule, "warmup_steps": 1}}
        yield f"{name}, LoRA", Row(f"optimizers; schedule {schedule}", config | {"adapter": LORA | {"rank": 64}})
        full: Json = SD3 | {"adapter": FULL, "precision": BF16, "optimizer": optimizer}
        yield f"{name}, full in bf16", Row("optimizers, rounding of bf16 weights", full)
    nearest = SLOW | {"name": "adamw", "rounding": "nearest"}
    config = SD3 | {"adapter": FULL, "precision": BF16, "optimizer": nearest}
    yield "adamw, rounding to nearest", Row("rounding of bf16 weights", config)


def _objectives() -> Named:
    hubers = ({"schedule": "constant"}, {"schedule": "exponential"}, {"schedule": "snr", "c": 0.3}, None)
    for density, huber in zip(("uniform", "mode", "cosmap", "beta"), hubers, strict=True):
        flow: Json = {"name": "flow", "sigma": density, "huber": huber}
        words = f", Huber loss {huber['schedule']}" if huber else ""
        yield f"flow, {density}", Row(f"noise levels{words}", SD3 | {"objective": flow})
    shifted = {"name": "flow", "logit_mean": 0.5, "logit_std": 0.8, "min_sigma": 0.1, "max_sigma": 0.9, "shift": 3.0}
    yield "flow, shifted", Row("noise levels, shift and limits", SD3 | {"objective": shifted})
    ddpm = {"name": "ddpm", "prediction": "epsilon", "offset_noise": 0.1, "min_timestep": 20, "max_timestep": 900}
    yield "ddpm, epsilon", Row("ddpm's noise", SD15 | {"objective": ddpm})
    velocity: Json = {"name": "ddpm", "prediction": "v", "min_snr_gamma": 5.0, "zero_terminal_snr": True}
    yield "ddpm, v", Row("ddpm's v, weights by signal to noise", SD2 | {"objective": velocity})
    robust: Json = {"name": "ddpm", "huber": {"schedule": "snr"}}
    yield "ddpm, Huber", Row("ddpm with a Huber loss", SD15 | {"objective": robust})


def _unets() -> Named:
    yield "sd15, LoRA", Row("SD 1.5", SD15, draws=True)
    yield "sd2, LoRA", Row("SD 2, whose target is v", SD2, draws=True)
    yield "sd15, full", Row("all of a UNet in bf16", SD15 | {"adapter": FULL, "precision": BF16, "optimizer": SLOW})
    yield "sd2, partial", Row("part of a UNet", SD2 | {"adapter": {"method": "partial"}, "optimizer": SLOW})
    for method in ("dora", "lokr", "loha", "oft"):
        yield f"sd15, {method}", Row("adapters over a UNet", SD15 | {"adapter": {"method": method}})
    for weights in ("int8", "int8-quanto", "nf4"):
        precision = {"weights": weights, "compute": "bf16"}
        yield f"sd15, {weights}", Row("a quantised UNet, convolutions too", SD15 | {"precision": precision})
    products = INT8 | {"products": "int8", "input_gradient": "int8"}
    yield "sd15, int8 products", Row("convolutions in int8", SD15 | {"precision": products})
    yield "sd15, fp16", Row("a UNet's products in fp16", SD15 | {"precision": INT8 | {"compute": "fp16"}})
    offloaded = {"checkpointing": "all", "resident_blocks": 2, "offload_checkpoint_inputs": True}
    yield "sd15, offloaded", Row("a UNet's units in host memory", SD15 | {"memory": offloaded})
    convolved = {"method": "lora", "rank": 2, "conv_rank": 2}
    yield "sd15, convolutions", Row("LoRA on convolutions", SD15 | {"adapter": convolved})
    widened: Json = {"family": "sd15", "pretrained": f"{INPUTS}/sd15", "inpainting": True}
    holes: Json = SD15 | {"model": widened, "data": DATA | {"resolution": 64, "variants": 2}}
    yield "sd15, inpainting", Row("holes, and a UNet of nine channels", holes | {"adapter": FULL, "precision": BF16})
    inside: Json = SD15 | {"adapter": FULL, "optimizer": SLOW, "train": TRAIN | {"clip": "per_parameter"}}
    yield "sd15, in backward", Row("updates in a UNet's backward", inside | {"memory": {"optimizer_in_backward": True}})
    retrained: Json = {"name": "flow", "shift": "resolution", "round_time": True}
    scaled: Json = {"family": "sdxl", "pretrained": f"{INPUTS}/sdxl", "vae_scale": 0.14, "vae_padding": "reflect"}
    yield (
        "sdxl, flow",
        Row("rectified flow, another autoencoder", SDXL | {"objective": retrained, "model": scaled}, draws=True),
    )
    padded: Json = {"family": "sd15", "pretrained": f"{INPUTS}/sd15", "vae_shift": -0.47, "vae_padding": "zeros"}
    yield "sd15, flow", Row("rectified flow", SD15 | {"objective": {"name": "flow"}, "model": padded})
    xl: Json = SDXL | {"precision": INT8, "memory": offloaded | {"feed_forward": "alone"}}
    yield "sdxl, int8, offloaded", Row("SDXL, single transformer blocks in host memory", xl, draws=True)


def _klein() -> Named:
    yield "klein, LoRA", Row("FLUX.2 klein", KLEIN, draws=True)
    distilled: Json = {"family": "klein", "pretrained": f"{INPUTS}/klein", "text_length": 64, "distilled": True}
    lean = {"modulation": "plan", "checkpointing": "all", "resident_blocks": 1}
    yield "klein, int8", Row("FLUX.2 klein", KLEIN | {"model": distilled, "precision": INT8, "memory": lean})
    started: Json = {"family": "klein", "pretrained": f"{INPUTS}/klein", "text_length": 64, "init": "random"}
    yield (
        "klein, full",
        Row("FLUX.2 klein from scratch", KLEIN | {"model": started, "adapter": FULL, "optimizer": SLOW}),
    )


def _zimage() -> Named:
    yield "zimage, LoRA", Row("Z-Image", ZIMAGE | {"train": {"steps": 2, "batch_size": 2}}, draws=True)
    turbo: Json = {"family": "zimage", "pretrained": f"{INPUTS}/zimage", "text_length": 64, "turbo": True}
    lean = {"modulation": "plan", "checkpointing": "all", "resident_blocks": 1}
    yield "zimage, int8", Row("Z-Image", ZIMAGE | {"model": turbo, "precision": INT8, "memory": lean})
    started: Json = {"family": "zimage", "pretrained": f"{INPUTS}/zimage", "text_length": 64, "init": "random"}
    started["turbo"] = False
    yield "zimage, full", Row("Z-Image from scratch", ZIMAGE | {"model": started, "adapter": FULL, "optimizer": SLOW})


def _qwen_image() -> Named:
    yield "qwen_image, LoRA", Row("Qwen-Image", QWEN | {"train": {"steps": 2, "batch_size": 2}}, draws=True)
    lean = {"modulation": "plan", "checkpointing": "all", "resident_blocks": 1, "host_weights": "mapped"}
    yield "qwen_image, int8", Row("Qwen-Image", QWEN | {"precision": INT8, "memory": lean})
    started: Json = {"family": "qwen_image", "pretrained": f"{INPUTS}/qwen_image", "text_length": 64, "init": "random"}
    yield "qwen_image, full", Row("Qwen-Image, new", QWEN | {"model": started, "adapter": FULL, "optimizer": SLOW})


def _concepts() -> Named:
    direction = {"target": "a circle", "positive": "a large circle", "negative": "a small circle"}
    concept: Json = {"directions": [direction], "resolutions": [32], "drawing_steps": 3}
    without: Json = {name: section for name, section in SD3.items() if name != "data"}
    yield "concept", Row("a slider from prompts alone", without | {"concept": concept}, draws=True)


def _levers() -> Named:
    lora: Json = SD3 | {"precision": INT8}
    settings: dict[str, Json] = {
        "checkpointing": {
            "checkpointing": "all",
            "keep_attention": "none",
            "feed_forward": "block",
            "modulation": "resident",
        },
        "one block checkpointed": {"checkpointing": 1},
        "attention kept": {"checkpointing": "all", "keep_attention": "all", "feed_forward": "alone"},
        "feed-forward only": {"checkpointing": "feed_forward"},
        "whole table, no cache": {"crop_positions": False, "cache_quantised": False},
        "inputs offloaded": {"checkpointing": "all", "offload_checkpoint_inputs": True},
        "blocks offloaded": {"checkpointing": "all", "resident_blocks": 0},
        "modulation planned": {"modulation": "plan", "modulation_window": 3},
        "planned and offloaded": {"modulation": "plan", "checkpointing": "all", "resident_blocks": 1},
    }
    for name, memory in settings.items():
        yield name, Row("memory levers", lora | {"memory": memory})
    full: Json = SD3 | {"adapter": FULL, "precision": BF16, "optimizer": SLOW | {"name": "adamw8bit"}}
    full |= {"train": TRAIN | {"clip": "per_parameter", "clip_norm": 0.5}}
    inside: Json = {"optimizer_in_backward": True}
    yield "update in backward", Row("updates in backward", full | {"memory": inside | {"checkpointing": "all"}})
    everything = inside | {"resident_blocks": 1, "offload_checkpoint_inputs": True, "keep_attention": "all"}
    yield "update in backward, offloaded", Row("full fine-tuning, everything offloaded", full | {"memory": everything})
    yield "attention by math", Row("another attention kernel", SD3 | {"speed": {"attention": "math"}})
    yield "graphs", Row("a lever that the CPU ignores", SD3 | {"speed": {"graphs": True}})


def _data() -> Named:
    yield "mask by alpha", Row("masks, buckets", SD3 | {"data": MASKED | {"mask": "alpha", "unmasked_weight": 0.1}})
    files = {"mask": "files", "mask_path": f"{INPUTS}/masks", "aspect": "square"}
    yield "mask files, square", Row("masks", SD3 | {"data": MASKED | files})
    views = {"crop": "random", "flip": True, "variants": 3, "shuffle_tags": True, "tag_dropout": 0.3, "keep_tags": 1}
    yield "variants", Row("random crops, flips and tags", SD3 | {"data": DATA | views | {"caption_prefix": "large "}})
    sources = [{"path": f"{INPUTS}/flat", "resolution": 32, "repeats": 2},
               {"source": "table", "path": f"{INPUTS}/table", "resolution": 32, "weight": 0.5}]  # fmt: skip
    yield "several sources", Row("mixed sources", SD3 | {"data": {"source": "several", "sources": sources}})
    yield "table", Row("a table", SD3 | {"data": MASKED | {"source": "table", "path": f"{INPUTS}/table"}})
    stream = {"source": "stream", "path": f"{INPUTS}/shards", "resolution": 32, "shuffle_window": 4}
    yield "stream", Row("a data set in shards", SD3 | {"data": stream})
    yield "class pictures", Row("prior preservation by drawn pictures", SD3 | {"prior": {
        "method": "class_pictures", "prompt": CLASS, "count": 2, "steps": 2, "guidance": 2.0}})  # fmt: skip
    predicted = {"method": "base_prediction", "prompt": CLASS, "weight": 0.7}
    yield "base prediction", Row("prior preservation by the base", SD3 | {"prior": predicted})
    outside: Json = {"method": "base_prediction", "outside_mask": 0.3}
    masked = SD15 | {"data": MASKED | {"resolution": 64, "mask": "alpha"}}
    yield "base prediction outside masks", Row("prior preservation, UNet", masked | {"prior": outside})


def _runs() -> Named:
    averaged: Json = {"ema": {"decay": 0.9}}
    several: Json = averaged | {"train": TRAIN | {"gradient_accumulation": 3, "clip_norm": 0.1}}
    yield "accumulation, average", Row("gradient accumulation, EMA", SD3 | several)
    yield "resumed", Row("2 + 2 steps, EMA", SD3 | several, resumes=True)
    unet: Json = SD15 | averaged | {"adapter": FULL, "optimizer": SLOW}
    yield "resumed, UNet", Row("2 + 2 steps, full, EMA", unet, resumes=True)
    exact = TRAIN | {"gradient_accumulation": 3, "reduce": "exact"}
    yield "exact reduction", Row("train.reduce", SD3 | {"train": exact})
    skipped = {"on_nonfinite": "skip", "clip_norm": None}
    yield "epochs", Row("epochs, no clipping", SD3 | {"train": {"epochs": 2, "batch_size": 4} | skipped})
    yield (
        "validated",
        Row("evaluation and pictures in training", SD3 | averaged | {"validation": GENERATED | {"every": 2}}),
    )
    patient = GENERATED | {"every": 2, "split": 0.34, "early_stop": {"patience": 3}}
    yield "validated, UNet", Row("evaluation and pictures in training", SD15 | {"validation": patient})
    two: Json = SD3 | {"train": TRAIN | {"gradient_accumulation": 4}}
    yield "two processes", Row("DDP", two, 2)
    yield "two processes, exact", Row("DDP", SD3 | {"train": TRAIN | {"global_batch": 8, "reduce": "exact"}}, 2)
    sharded = TRAIN | {"gradient_accumulation": 2, "fsdp": "full"}
    yield "two processes, sharded", Row("FSDP2", SD3 | {"adapter": FULL, "optimizer": SLOW, "train": sharded}, 2)
    random: Json = {"model": {"pretrained": f"{INPUTS}/sd3", "t5_length": 8, "init": "random"}, "adapter": FULL}
    yield "from scratch", Row("random initial weights", SD3 | random | {"optimizer": SLOW})


EXCUSED = {
    "train.batch_size=auto": "searches the memory of a card",
    "memory.checkpointing=auto": "searches the memory of a card",
    "memory.profile": "sets other fields",
    "precision.products=auto": "times products on a card",
}
"""Choices of the schema that no row makes, and why."""
DECIDING = ("model", "adapter", "text", "precision", "optimizer", "schedule", "objective", "train", "prior", "memory")
"""Sections of which every choice among named values needs a row. Of all others, members of unions do."""


def without_row(schema: Json, chosen: Iterable[Row], excused: Iterable[str] = tuple(EXCUSED)) -> list[str]:
    """Choices of a schema that no row makes: members of unions, values, switches, optional parts.

    Args:
        schema: the newer tree's JSON schema of the configuration.
        chosen: the rows.
        excused: choices that need none, or fields of which none does.
    """
    made = {choice for row in chosen for path, value in _leaves(row.config) for choice in _choices(path, value)}
    made |= set(excused)
    lacking = []
    for path, node in _fields(schema, schema, ""):
        default = {choice for leaf in _leaves(node.get("default"), path) for choice in _choices(*leaf)}
        for choice in _offered(schema, path, node):
            if choice not in made | default and path not in excused:
                lacking.append(choice)
    return list(dict.fromkeys(lacking))


def unknown_members(config: Json, schema: Json) -> list[str]:
    """Members of unions that a configuration names and an older tree's schema lacks: ``model.family=sdxl``."""
    tags: dict[str, set[str]] = {}
    for path, node in _fields(schema, schema, ""):
        for union in _discriminators(node):
            tags.setdefault(f"{path}.{union['propertyName']}", set()).update(_as_dict(union["mapping"]))
    return [f"{path}={value}" for path, value in _leaves(config) if path in tags and value not in tags[path]]


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every part of a configuration with its path; entries of a list have the list's path."""
    if path:
        yield path, value
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part, path)


def _choices(path: str, value: object) -> set[str]:
    """What a value says: that an optional part is there, or which of the named values it is."""
    if value is None or isinstance(value, list):
        return set()
    return {path} if isinstance(value, dict) else {f"{path}={json.dumps(value).strip(chr(34))}"}


def _offered(schema: Json, path: str, node: Json) -> Iterator[str]:
    """The choices that a field of the schema offers, apart from values of fields that decide no number."""
    alternatives = list(_alternatives(schema, node))
    if any("properties" in each for each in alternatives) and any(each.get("type") == "null" for each in alternatives):
        yield path
    if path.split(".")[0] in DECIDING:
        for value in (value for each in alternatives for value in _named_values(each)):
            yield f"{path}={value}"
    for union in _discriminators(node):
        yield from (f"{path}.{union['propertyName']}={tag}" for tag in _as_dict(union["mapping"]))


def _discriminators(node: Json) -> Iterator[Json]:
    """How a field's schema tells the members of its union: of an optional one, that of its alternative."""
    for each in (node, *map(_as_dict, _as_list(node.get("anyOf")))):
        if isinstance(each.get("discriminator"), dict):
            yield _as_dict(each["discriminator"])


def _named_values(node: Json) -> Iterator[str]:
    """The values that a field's schema lists, as they stand in JSON, without quotes."""
    listed = [*_as_list(node.get("enum")), *([node["const"]] if "const" in node else [])]
    listed += [True, False] if node.get("type") == "boolean" else []
    yield from (json.dumps(value).strip('"') for value in listed)


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _as_dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _alternatives(schema: Json, node: Json) -> Iterator[Json]:
    """A field's schema without references: one for each kind of value that it takes."""
    if "$ref" in node:
        yield from _alternatives(schema, _as_dict(_as_dict(schema["$defs"])[str(node["$ref"]).rpartition("/")[2]]))
    elif "anyOf" in node or "oneOf" in node:
        for each in _as_list(node.get("anyOf", node.get("oneOf"))):
            yield from _alternatives(schema, _as_dict(each))
    else:
        yield node


def _fields(schema: Json, node: Json, path: str) -> Iterator[tuple[str, Json]]:
    """Every field below a node, with its dotted path; the same path once for each member that has it."""
    for each in _alternatives(schema, node):
        for name, field in _as_dict(each.get("properties")).items():
            below = f"{path}.{name}" if path else name
            yield below, _as_dict(field)
            yield from _fields(schema, _as_dict(field), below)


def translate(config: Json, schema: Json, renamed: dict[str, str] | None = None) -> Json:
    """A configuration in the words of an older tree: what its schema does not know gets the older name.

    Args:
        config: in the newer tree's words.
        schema: the older tree's.
        renamed: as ``FIELDS``, which is the default.
    """
    known: dict[str, set[str]] = {}
    for path, node in _fields(schema, schema, ""):
        values = {value for each in _alternatives(schema, node) for value in _named_values(each)}
        known[path] = known.get(path, set()) | values
    result = copy.deepcopy(config)
    for new, old in (FIELDS if renamed is None else renamed).items():
        (path, _, value), (old_path, _, old_value) = new.partition("="), old.partition("=")
        if path in known and (not value or value in known[path]):
            continue
        found = _get(result, path)
        if found is not _NOTHING and (not value or value == str(found)):
            _remove(result, path)
            _set(result, old_path, json.loads(old_value) if _is_json(old_value) else old_value or found)
    return result


_NOTHING = object()


def _get(config: Json, path: str) -> object:
    value: object = config
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return _NOTHING
        value = value[name]
    return value


def _remove(config: Json, path: str) -> None:
    above, _, name = path.rpartition(".")
    section = _as_dict(_get(config, above)) if above else config
    section.pop(name)


def _set(config: Json, path: str, value: object) -> None:
    *above, name = path.split(".")
    for part in above:
        section = config.setdefault(part, {})
        assert isinstance(section, dict), path
        config = section
    config[name] = value


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def translate_words(
    words: list[str], knows: Callable[[str, str], bool], renamed: dict[str, str] | None = None
) -> list[str]:
    """A command line in the words of an older tree.

    Args:
        words: a verb and its arguments.
        knows: whether the older tree has a verb, or a verb has a flag: ``knows(verb, "")``, ``knows(verb, flag)``.
        renamed: as ``WORDS``, which is the default.
    """
    table = WORDS if renamed is None else renamed
    verb = words[0] if words[0] not in table or knows(words[0], "") else table[words[0]]
    flags = [table[word] if word in table and not knows(verb, word) else word for word in words[1:]]
    return [verb, *flags]


def older_path(path: Path, renamed: dict[str, str] | None = None) -> Path:
    """The path of a run's file under the names of an older tree."""
    table = FILES if renamed is None else renamed
    return Path(*(table.get(part, part) for part in path.parts))
