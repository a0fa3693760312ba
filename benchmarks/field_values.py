"""For every field of the configuration a value that is not its default, what it needs beside it, what it changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args, get_origin

from benchmarks import compare_rows
from benchmarks.compare_rows import CLASS, FULL, INPUTS, INT8, PROMPT, SLOW, Json
from simpletune.config.schema import TrainConfig
from simpletune.system.options import Option

OWN = "OWN"  # stands for a folder of the run's own
START = "START"  # stands for the result of the row's baseline

KINDS = ("plan", "loss", "file", "said", "estimate")

SD3: Json = compare_rows.SD3 | {
    "data": {"path": f"{INPUTS}/flat", "resolution": 32}, "train": {"steps": 2}, "checkpoint": {"every": None},
    "output": {"report": False},
}  # fmt: skip
SD15: Json = SD3 | {
    "model": {"family": "sd15", "pretrained": f"{INPUTS}/sd15"},
    "data": {"path": f"{INPUTS}/flat", "resolution": 64},
}
SLIDER: Json = {"target": "a picture", "positive": "a red picture", "negative": "a striped picture"}
CONCEPT: Json = SD3 | {"data": None, "concept": {"directions": [SLIDER], "resolutions": [32], "drawing_steps": 4}}
SDXL: Json = SD15 | {"model": {"family": "sdxl", "pretrained": f"{INPUTS}/sdxl"}}
KLEIN: Json = SD15 | {"model": {"family": "klein", "pretrained": f"{INPUTS}/klein", "text_length": 64}}
ZIMAGE: Json = SD15 | {"model": {"family": "zimage", "pretrained": f"{INPUTS}/zimage", "text_length": 64}}
QWEN: Json = SD15 | {"model": {"family": "qwen_image", "pretrained": f"{INPUTS}/qwen_image", "text_length": 64}}


@dataclass(frozen=True)
class Row:
    """One field at a value that is not its default.

    Args:
        value: the value.
        differs: what differs from the same run without it: ``plan`` (pictures, prompts, steps), ``loss`` (losses,
            norms, learning rates), ``file`` (names, tensors, pixels, traces), ``said`` (the console) or ``estimate``
            (the memory that is predicted for a card); or, in a sentence, why nothing of these can differ here.
        beside: other fields by their paths, which both runs have.
    """

    value: object
    differs: str
    beside: Mapping[str, object] = field(default_factory=dict)

    @property
    def compared(self) -> bool:
        return self.differs in KINDS


@dataclass(frozen=True)
class Group:
    """The fields that one class of options defines: where they are, and the run that shows them."""

    owner: str
    path: str
    base: Json
    rows: Mapping[str, Row]
    beside: Mapping[str, object] = field(default_factory=dict)


def schema_fields(option: type[Option]) -> Iterator[tuple[str, str]]:
    """Every field of an option and of every member of its unions, with the class that defines it."""
    for name, info in option.model_fields.items():
        owner = next(each for each in option.__mro__ if name in vars(each).get("__annotations__", {}))
        yield owner.__name__, name
        for member in options_in(info.annotation):
            yield from schema_fields(member)


def options_in(annotation: object) -> list[type[Option]]:
    """The options that a field may hold, itself or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Option):
        return [annotation]
    return [found for part in get_args(annotation) for found in options_in(part)]


def sections(option: type[Option] = TrainConfig) -> Iterator[tuple[str, str]]:
    """The fields among them that always hold a section, whose own fields have rows."""
    for name, info in option.model_fields.items():
        inside = options_in(info.annotation)
        if inside and get_origin(info.annotation) is not list and type(None) not in get_args(info.annotation):
            yield option.__name__, name
        for member in inside:
            yield from sections(member)


def tags() -> Iterator[Group]:
    """Every member of a union but the default one, beside the default one."""
    flat = {"path": f"{INPUTS}/flat", "resolution": 32}
    table = {"source": "table", "path": f"{INPUTS}/table", "resolution": 32}
    stream = {"source": "stream", "path": f"{INPUTS}/shards", "resolution": 32}
    several = {"source": "several", "sources": [flat, table]}
    for owner, name, default in (("Folder", "source", "folder"), ("SD3", "family", "sd3"), ("Lora", "method", "lora"),
                                 ("AdamW", "name", "adamw"), ("BF16", "weights", "bf16"), ("Flow", "name", "flow"),
                                 ("Constant", "name", "constant"), ("NoPrior", "method", "none")):  # fmt: skip
        yield Group(owner, "", SD3, {name: Row(default, "The default, beside which the others are compared.")})
    for owner, data in (("Table", table), ("Stream", stream), ("MultiSource", several)):
        yield Group(owner, "data", SD3, {"source": Row(data, "plan")})
    for owner, base in (("SD15", SD15), ("SDXL", SDXL), ("Klein", KLEIN), ("ZImage", ZIMAGE), ("QwenImage", QWEN)):
        yield Group(owner, "model", SD3 | {"data": base["data"]}, {"family": Row(base["model"], "loss")})
    for owner in ("Dora", "Full", "Partial", "Lokr", "Loha", "Oft"):
        yield Group(owner, "adapter", SD3, {"method": Row({"method": owner.lower()}, "file")})
    yield Group("Hypernetwork", "adapter", SD15, {"method": Row({"method": "hypernetwork"}, "file")})
    text = {"text.embeddings": TOKEN}
    yield Group("NoAdapter", "adapter", SD3, {"method": Row({"method": "none"}, "file", text)})
    for owner, name in (("AdamW8bit", "adamw8bit"), ("PagedAdamW8bit", "paged_adamw8bit"), ("Lion8bit", "lion8bit"),
                        ("Adafactor", "adafactor"), ("AdamWBF16", "adamw_bf16"), ("Prodigy", "prodigy"),
                        ("ScheduleFreeAdamW", "adamw_schedule_free")):  # fmt: skip
        section = {"name": name, "lr": 1.0 if name == "prodigy" else 0.01}
        yield Group(owner, "optimizer", SD3, {"name": Row(section, "file", WIDE)})
    for owner, name in (("FP32", "fp32"), ("Int8", "int8"), ("Int8Quanto", "int8-quanto"), ("Nf4", "nf4")):
        group = {"precision": {"weights": "bf16"}}
        yield Group(owner, "precision", SD3 | group, {"weights": Row({"weights": name}, "loss")})
    for name in ("linear", "cosine", "polynomial", "cosine_with_restarts", "rex"):
        owner = "".join(word.capitalize() for word in name.split("_"))
        yield Group(owner, "schedule", SD3, {"name": Row({"name": name}, "loss")})
    yield Group("Ddpm", "objective", SD15, {"name": Row(None, "Belongs to the family: U-Nets have no other.")})
    drawn = {"method": "class_pictures", "prompt": CLASS, "count": 2, "steps": 2}
    yield Group("ClassImages", "prior", SD3, {"method": Row(drawn, "plan")})
    predicted = {"method": "base_prediction", "prompt": CLASS}
    yield Group("BasePrediction", "prior", SD3, {"method": Row(predicted, "loss")})


WIDE = {"adapter.rank": 64, "train.steps": 4}  # states of 8 bits begin at 4096 numbers
ADAM = {"betas": Row((0.5, 0.6), "file"), "eps": Row(1e-2, "loss")}
TOKEN: Json = {"token": "flat", "initial": "striped"}
MASKED = {"data.path": f"{INPUTS}/masked", "data.mask": "alpha"}
TAGS = {"data.path": f"{INPUTS}/tags"}
NINE = {"adapter": FULL, "model.inpainting": True, "optimizer": SLOW}
FOLDER = {
    "path": Row(f"{INPUTS}/striped", "plan"),
    "prompt": Row("a cat", "plan"),
    "resolution": Row(48, "plan"),
    "aspect": Row("square", "plan", {"data.path": f"{INPUTS}/masked"}),
    "background": Row("#ff0000", "loss", {"data.path": f"{INPUTS}/masked"}),
    "max_aspect": Row(1.5, "plan", {"data.path": f"{INPUTS}/masked"}),
    "max_upscale": Row(1.0, "plan", {"data.on_error": "skip", "data.resolution": 96, "data.path": f"{INPUTS}/sizes"}),
    "crop": Row("random", "loss", {"data.path": f"{INPUTS}/masked", "data.aspect": "square"}),
    "flip": Row(True, "loss"),
    "variants": Row(2, "file", {"data.crop": "random", "data.flip": True, "output.cache": OWN}),
    "brightness": Row(0.5, "loss", {"data.variants": 3, "train.steps": 12}),
    "contrast": Row(0.5, "loss", {"data.variants": 3, "train.steps": 12}),
    "saturation": Row(0.5, "loss", {"data.variants": 3, "train.steps": 12}),
    "hue": Row(90.0, "loss", {"data.variants": 3, "train.steps": 12}),
    "rotation": Row(20.0, "loss", {"data.variants": 3, "train.steps": 12}),
    "repeats": Row(2, "plan", {"train.steps": None, "train.epochs": 1}),
    "weight": Row(0.5, "loss"),
    "caption_lines": Row("several", "plan", {"data.path": f"{INPUTS}/lines"}),
    "caption_prefix": Row("sks", "plan"),
    "caption_suffix": Row("in oil", "plan"),
    "shuffle_tags": Row(True, "plan", TAGS),
    "tag_dropout": Row(0.5, "plan", TAGS),
    "keep_tags": Row(3, "plan", TAGS | {"data.tag_dropout": 0.7}),
    "tag_separator": Row(";", "plan", TAGS | {"data.tag_dropout": 0.5}),
    "unmasked_weight": Row(0.5, "loss", MASKED),
    "caption_dropout": Row(0.9, "loss"),
    "on_error": Row("skip", "A picture that cannot be used ends the run without it: tests/data/sources/test_data.py."),
}

GROUPS: list[Group] = [
    Group("TrainConfig", "", SD3, {
        "schema_": Row("./schema.json", "Names the JSON schema, for editors."),
        "version": Row(1, "Has one value."),
        "about": Row("words", "Words for people, which check prints."),
        "name": Row("other", "file"),
        "device": Row("auto", "Needs a GPU: on a machine without one, cpu is left."),
        "data": Row({"path": f"{INPUTS}/striped", "resolution": 32}, "plan"),
        "concept": Row(None, "A run has it in place of data, so no other run lacks it alone."),
        "ema": Row({"decay": 0.01}, "file"),
    }),
    Group("SD3", "model", SD3, {
        "pretrained": Row(f"{INPUTS}/sd3_other", "loss"),
        "revision": Row("main", "Names what is downloaded from the Hub; a folder has one version."),
        "init": Row("random", "loss", {"adapter": FULL, "optimizer": SLOW}),
        "loras": Row([START], "loss"),
        "transformer": Row(f"{INPUTS}/sd3_other", "loss"),
        "vae": Row(f"{INPUTS}/sd3_other", "loss"),
        "text_encoders": Row(f"{INPUTS}/sd3_other", "loss"),
        "t5": Row(False, "loss"),
        "t5_length": Row(12, "loss"),
        "t5_cached": Row("int8", "loss"),
    }),
    Group("SD15", "model", SD15, {
        "pretrained": Row(f"{INPUTS}/sd15_other", "loss"),
        "text_encoders": Row(f"{INPUTS}/sd15_other", "loss"),
    }),
    Group("UNetFamily", "model", SD15, {
        "revision": Row("main", "Names what is downloaded from the Hub; a folder has one version."),
        "init": Row("random", "loss", {"adapter": FULL, "optimizer": SLOW}),
        "loras": Row([START], "loss"),
        "unet": Row(f"{INPUTS}/sd15_other", "loss"),
        "vae": Row(f"{INPUTS}/sd15_other", "loss"),
        "inpainting": Row(True, "loss", {"adapter": FULL, "optimizer": SLOW}),
        "vae_scale": Row(0.5, "loss"),
        "vae_shift": Row(0.5, "loss"),
        "vae_padding": Row("reflect", "loss"),
    }),
    Group("SDXL", "model", SDXL, {
        "pretrained": Row(f"{INPUTS}/sdxl_other", "loss"),
        "text_encoders": Row(f"{INPUTS}/sdxl_other", "loss"),
    }),
    Group("Klein", "model", KLEIN, {
        "pretrained": Row(f"{INPUTS}/klein_other", "loss"),
        "revision": Row("main", "Names what is downloaded from the Hub; a folder has one version."),
        "init": Row("random", "loss", {"adapter": FULL, "optimizer": SLOW}),
        "loras": Row([START], "loss"),
        "transformer": Row(f"{INPUTS}/klein_other", "loss"),
        "vae": Row(f"{INPUTS}/klein_other", "loss"),
        "text_encoders": Row(f"{INPUTS}/klein_other", "loss"),
        "text_length": Row(80, "loss"),
        "distilled": Row(True, "Allows a model that is refused otherwise: tests/models/flux2/test_klein_files.py."),
    }),
    Group("ZImage", "model", ZIMAGE, {
        "pretrained": Row(f"{INPUTS}/zimage_other", "loss"),
        "revision": Row("main", "Names what is downloaded from the Hub; a folder has one version."),
        "init": Row("random", "loss", {"adapter": FULL, "optimizer": SLOW}),
        "loras": Row([START], "loss"),
        "transformer": Row(f"{INPUTS}/zimage_other", "loss"),
        "vae": Row(f"{INPUTS}/zimage_other", "loss"),
        "text_encoders": Row(f"{INPUTS}/zimage_other", "loss"),
        "text_length": Row(32, "loss"),
        "turbo": Row(True, "Decides how pictures are drawn by default: tests/models/zimage/test_zimage_files.py."),
    }),
    Group("QwenImage", "model", QWEN, {
        "pretrained": Row(f"{INPUTS}/qwen_image_other", "loss"),
        "revision": Row("main", "Names what is downloaded from the Hub; a folder has one version."),
        "init": Row("random", "loss", {"adapter": FULL, "optimizer": SLOW}),
        "loras": Row([START], "loss"),
        "transformer": Row(f"{INPUTS}/qwen_image_other", "loss"),
        "vae": Row(f"{INPUTS}/qwen_image_other", "loss"),
        "text_encoders": Row(f"{INPUTS}/qwen_image_other", "loss"),
        "text_length": Row(16, "loss"),
    }),
    Group("Source", "data", SD3, FOLDER),
    Group("Source", "data", SD15, {
        "inpainting_mask": Row("own", "loss", MASKED | NINE),
        "inpainting_loss": Row("inside", "loss", NINE),
    }),
    Group("Folder", "data", SD3, {
        "captions": Row("filename", "plan", {"data.path": f"{INPUTS}/named"}),
        "reading": Row("any", "plan", {"data.path": f"{INPUTS}/any_form", "data.on_error": "skip"}),
        "missing_prompt": Row("a cat", "plan", {"data.path": f"{INPUTS}/uncaptioned", "data.on_error": "skip"}),
        "split": Row("train", "plan", {"data.path": f"{INPUTS}/split"}),
        "folder_names": Row("kohya", "plan", {"data.path": f"{INPUTS}/kohya"}),
        "mask": Row("alpha", "loss", {"data.path": f"{INPUTS}/masked"}),
        "mask_path": Row(f"{INPUTS}/masks", "loss", {"data.path": f"{INPUTS}/beside", "data.mask": "files"}),
        "links": Row("anywhere", "plan", {"data.path": f"{INPUTS}/linked", "data.on_error": "skip"}),
    }),
    Group("Table", "data", SD3, {
        "image_column": Row("other_image", "plan"),
        "caption_column": Row("other_text", "plan"),
        "split": Row("test", "plan"),
        "mask": Row("alpha", "loss"),
        "limit": Row(3, "plan"),
    }, {"data": {"source": "table", "path": f"{INPUTS}/columns", "resolution": 32}}),
    Group("Stream", "data", SD3, {
        "split": Row("test", "plan"),
        "image_column": Row("other_image", "plan"),
        "caption_column": Row("other_text", "plan"),
        "width_column": Row("other_width", "plan", {"data.on_error": "skip"}),
        "height_column": Row("other_height", "plan", {"data.on_error": "skip"}),
        "shuffle_window": Row(1, "loss"),
        "local_gib": Row(0.1, "Bounds what is kept of a store's shards: tests/data/storage/test_stream_remote.py."),
        "mask": Row("alpha", "loss"),
    }, {"data": {"source": "stream", "path": f"{INPUTS}/columns", "resolution": 32, "format": "parquet"}}),
    Group("Stream", "data", SD3, {"format": Row("parquet", "plan")}, {
        "data": {"source": "stream", "path": f"{INPUTS}/columns", "resolution": 32, "aspect": "square"}}),
    Group("MultiSource", "data", SD3, {
        "sources": Row([{"path": f"{INPUTS}/flat", "resolution": 32, "repeats": 2}], "plan"),
    }, {"data": {"source": "several", "sources": [{"path": f"{INPUTS}/flat", "resolution": 32}]}}),
    Group("Concept", "concept", CONCEPT, {
        "directions": Row([SLIDER, {"target": "red", "negative": "red", "neutral": ""}], "plan"),
        "resolutions": Row([64], "plan"),
        "drawing_steps": Row(9, "plan"),
        "drawing_guidance": Row(1.0, "loss", {"train.steps": 4}),
    }),
    Group("Direction", "concept.directions.0", CONCEPT, {
        "target": Row("flat", "plan"),
        "positive": Row("blue", "loss"),
        "negative": Row(None, "loss"),
        "unconditional": Row("blue", "loss", {"concept.directions.0.negative": None}),
        "neutral": Row("", "loss"),
        "preserved": Row(["blue"], "loss"),
        "preserved_weight": Row(3.0, "loss", {"concept.directions.0.preserved": ["blue"]}),
        "weight": Row(3.0, "loss"),
        "guidance": Row(3.0, "loss"),
    }),
    Group("Lora", "adapter", SD3, {
        "rank": Row(4, "file"),
        "alpha": Row(8.0, "loss"),
        "rank_stabilized": Row(True, "loss"),
        "targets": Row("attention_mlp", "file"),
        "layers": Row([{"pattern": "blocks.0", "rank": 4}], "file"),
        "dropout": Row(0.5, "loss"),
        "rank_dropout": Row(0.5, "loss"),
        "module_dropout": Row(0.5, "loss"),
        "max_norm": Row(1e-4, "file"),
        "b_lr_ratio": Row(16.0, "loss"),
        "dtype": Row("bf16", "file"),
        "start": Row(START, "loss"),
    }),
    Group("Partial", "adapter", SD3, {"layers": Row(["*.ff.*"], "file")}, {"adapter": {"method": "partial"}}),
    Group("Lokr", "adapter", SD3, {
        "factor": Row(4, "file"),
        "rank": Row(1, "file", {"adapter.factor": 2}),
        "decompose_both": Row(True, "file", {"adapter.rank": 1}),
        "targets": Row("attention_mlp", "file"),
        "layers": Row([{"pattern": "blocks.0", "lr_ratio": 0.5}], "file"),
        "dtype": Row("bf16", "file"),
        "start": Row(START, "loss"),
    }, {"adapter": {"method": "lokr"}}),
    Group("Loha", "adapter", SD3, {
        "rank": Row(2, "file"),
        "targets": Row("attention_mlp", "file"),
        "layers": Row([{"pattern": "blocks.0", "rank": 2}], "file"),
        "dtype": Row("bf16", "file"),
        "start": Row(START, "loss"),
    }, {"adapter": {"method": "loha"}}),
    Group("Oft", "adapter", SD3, {
        "block_size": Row(8, "file"),
        "targets": Row("attention_mlp", "file"),
        "layers": Row([{"pattern": "blocks.0", "lr_ratio": 0.5}], "file"),
        "dtype": Row("bf16", "file"),
        "start": Row(START, "loss"),
    }, {"adapter": {"method": "oft"}}),
    Group("Hypernetwork", "adapter", SD15, {
        "widths": Row("all", "file"),
        "layer_structure": Row([1.0, 1.5, 1.0], "file"),
        "activation": Row("tanh", "loss"),
        "layer_norm": Row(True, "file"),
        "dropout": Row(0.5, "loss"),
        "dtype": Row("bf16", "file"),
    }, {"adapter": {"method": "hypernetwork"}}),
    Group("LayerSettings", "adapter.layers.0", SD3, {
        "pattern": Row("blocks.1", "file"),
        "lr_ratio": Row(0.5, "file"),
    }, {"adapter.layers": [{"pattern": "blocks.0", "lr_ratio": 0.1}]}),
    Group("RankedLayers", "adapter.layers.0", SD3, {
        "rank": Row(4, "file"),
    }, {"adapter.layers": [{"pattern": "blocks.0"}], "adapter.method": "loha"}),
    Group("LohaLayers", "adapter.layers.0", SD3, {
        "rank": Row(4, "file"),
    }, {"adapter.layers": [{"pattern": "blocks.0", "lr_ratio": 0.5}], "adapter.method": "loha"}),
    Group("LoraLayers", "adapter.layers.0", SD3, {
        "alpha": Row(8.0, "file"),
    }, {"adapter.layers": [{"pattern": "blocks.0", "rank": 2}]}),
    Group("Text", "text", SD3, {"embeddings": Row(TOKEN, "file"), "lora": Row({}, "file")}),
    Group("Embeddings", "text.embeddings", SD3, {
        "token": Row("picture", "loss"),
        "initial": Row("red", "loss"),
        "vectors": Row(2, "file"),
        "place": Row("input", "file"),
        "learning_rate": Row(0.05, "loss"),
        "keep_norm": Row(False, "file", {"text.embeddings.place": "input", "text.embeddings.learning_rate": 0.1}),
        "stop_at": Row(0.5, "file"),
    }, {"text.embeddings": TOKEN}),
    Group("TextLora", "text.lora", SD3, {
        "rank": Row(4, "file"),
        "alpha": Row(16.0, "loss"),
        "targets": Row("attention_and_mlp", "file"),
        "encoders": Row(["clip_g"], "file"),
        "learning_rate": Row(0.01, "loss"),
    }, {"text.lora": {}}),
    Group("BF16", "precision", SD3, {"compute": Row("fp16", "loss")}, {"precision": {"weights": "bf16"}}),
    Group("FP32", "precision", SD3, {"compute": Row("bf16", "loss")}, {"precision": {"weights": "fp32"}}),
    Group("QuantisedPrecision", "precision", SD3, {"compute": Row("fp16", "loss")}, {"precision": {"weights": "int8"}}),
    Group("Int8", "precision", SD3, {
        "products": Row("int8", "loss"),
        "input_gradient": Row("int8", "loss", {"precision.products": "int8"}),
        "rotation": Row("hadamard", "loss"),
    }, {"precision": INT8, "data.resolution": 64}),
    Group("Nf4", "precision", SD3, {
        "double_quantisation": Row(False, "loss"),
        "modulation": Row("nf4", "loss"),
        "rotation": Row("hadamard", "loss"),
    }, {"precision": {"weights": "nf4"}}),
    Group("OptimizerOption", "optimizer", SD3, {
        "lr": Row(0.001, "loss"),
        "weight_decay": Row(0.5, "loss"),
        "rounding": Row("nearest", "file", {"adapter.dtype": "bf16"}),
    }),
    *(Group(owner, "optimizer", SD3, rows, {"optimizer": {"name": name, "lr": 0.01}, **WIDE})
      for owner, name, rows in (
        ("AdamW", "adamw", ADAM), ("AdamW8bit", "adamw8bit", ADAM), ("PagedAdamW8bit", "paged_adamw8bit", ADAM),
        ("AdamWBF16", "adamw_bf16", ADAM | {"rounding": Row("compensated", "Has one value.")}),
        ("Lion8bit", "lion8bit", {"lr": Row(1e-3, "loss"), "betas": Row((0.1, 0.5), "file")}),
        ("Adafactor", "adafactor", {"clip_threshold": Row(0.1, "loss"), "decay_rate": Row(-0.1, "file")}),
        ("ScheduleFreeAdamW", "adamw_schedule_free", ADAM | {
            "r": Row(3.0, "file"),
            "weight_lr_power": Row(0.0, "file", {"schedule.warmup_steps": 3}),
        }))),
    Group("Prodigy", "optimizer", SD3, ADAM | {
        "lr": Row(0.5, "loss"),
        "eps": Row(1e-2, "loss"),
        "beta3": Row(0.1, "loss"),
        "d0": Row(1e-4, "loss"),
        "d_coef": Row(2.0, "loss"),
        "use_bias_correction": Row(True, "loss"),
        "safeguard_warmup": Row(True, "file", {"schedule.warmup_steps": 3}),
    }, {"optimizer": {"name": "prodigy", "d0": 1e-3}, "train.steps": 4}),
    Group("_Schedule", "schedule", SD3, {"warmup_steps": Row(1, "loss")}),
    Group("Polynomial", "schedule", SD3, {
        "power": Row(3.0, "loss"),
        "end": Row(0.5, "loss"),
    }, {"schedule": {"name": "polynomial"}}),
    Group("CosineWithRestarts", "schedule", SD3, {
        "cycles": Row(1, "loss"),
    }, {"schedule": {"name": "cosine_with_restarts"}, "train.steps": 4}),
    Group("Flow", "objective", SD3, {
        "sigma": Row("uniform", "loss"),
        "logit_mean": Row(1.0, "loss"),
        "logit_std": Row(0.5, "loss"),
        "mode_scale": Row(0.5, "loss", {"objective.sigma": "mode"}),
        "beta_alpha": Row(4.0, "loss", {"objective.sigma": "beta"}),
        "beta_beta": Row(4.0, "loss", {"objective.sigma": "beta"}),
        "min_sigma": Row(0.5, "loss"),
        "max_sigma": Row(0.5, "loss"),
        "shift": Row(3.0, "loss"),
        "levels": Row(2, "loss"),
        "huber": Row({}, "loss"),
    }, {"objective": {"name": "flow"}}),
    Group("Flow", "objective", SD15, {
        "round_time": Row(True, "loss"),
    }, {"objective": {"name": "flow"}}),
    Group("Huber", "objective.huber", SD3, {
        "c": Row(0.5, "loss"),
        "schedule": Row("constant", "loss"),
    }, {"objective": {"name": "flow", "huber": {}}}),
    Group("Ddpm", "objective", SD15, {
        "prediction": Row("v", "loss"),
        "min_snr_gamma": Row(1.0, "loss"),
        "offset_noise": Row(0.1, "loss"),
        "zero_terminal_snr": Row(True, "loss", {"objective.prediction": "v"}),
        "min_timestep": Row(500, "loss"),
        "max_timestep": Row(500, "loss"),
        "huber": Row({}, "loss"),
    }, {"objective": {"name": "ddpm"}}),
    Group("Train", "train", SD3, {
        "steps": Row(3, "plan"),
        "epochs": Row(1, "plan", {"train.steps": None}),
        "batch_size": Row(2, "loss"),
        "gradient_accumulation": Row(2, "loss"),
        "global_batch": Row(2, "loss"),
        "reduce": Row("exact", "estimate", {"train.gradient_accumulation": 4}),
        "fsdp": Row("full", "One process alone holds all weights: tests/engine/fsdp/test_sharding.py has several."),
        "seed": Row(1, "loss"),
        "clip_norm": Row(1e-3, "file"),
        "clip": Row("per_parameter", "file", {"train.clip_norm": 1e-3}),
        "on_nonfinite": Row("skip", "Decides what a loss of NaN does: tests/stages/step/test_speed.py."),
    }),
    Group("BasePrediction", "prior", SD3, {
        "prompt": Row("a cat", "loss"),
        "trigger": Row("flat", "loss"),
        "weight": Row(3.0, "loss"),
        "outside_mask": Row(1.0, "loss", MASKED),
    }, {"prior": {"method": "base_prediction", "prompt": CLASS}}),
    Group("ClassImages", "prior", SD3, {
        "prompt": Row("a cat", "plan"),
        "trigger": Row("flat", "plan"),
        "count": Row(3, "plan"),
        "weight": Row(3.0, "loss"),
        "steps": Row(3, "plan"),
        "guidance": Row(2.0, "plan"),
        "seed": Row(1, "plan"),
    }, {"prior": {"method": "class_pictures", "prompt": CLASS, "count": 2, "steps": 2}, "train.steps": 8}),
    Group("Ema", "ema", SD3, {"decay": Row(0.01, "file")}, {"ema": {}}),
    Group("Memory", "memory", SD3, {
        "profile": Row("8gb", "said"),
        "checkpointing": Row("all", "estimate"),
        "keep_attention": Row("all", "estimate", {"memory.checkpointing": "all"}),
        "feed_forward": Row("alone", "estimate", {"memory.checkpointing": "all", "memory.keep_attention": "all"}),
        "budget_gib": Row(4.0, "Bounds the search of checkpointing auto: tests/engine/memory/test_checkpointing.py."),
        "offload_checkpoint_inputs": Row(True, "estimate", {"memory.checkpointing": "all"}),
        "resident_blocks": Row(0, "estimate", {"memory.checkpointing": "all"}),
        "crop_positions": Row(False, "estimate"),
        "modulation": Row("plan", "estimate"),
        "modulation_window": Row(3, "estimate", {"memory.modulation": "plan"}),
        "host_weights": Row("mapped", "Moves the same numbers: tests/models/qwen_image/test_qwen_image_training.py.",
                            {"memory.modulation": "plan", "precision": INT8}),
        "cache_quantised": Row(False, "file", {"precision": INT8, "output.cache": OWN}),
        "optimizer_in_backward": Row(True, "estimate",
                                     {"adapter": FULL, "optimizer": SLOW, "train.clip": "per_parameter"}),
        "vae_tile": Row(128, "loss", {"data.resolution": 192, "data.max_upscale": None, "output.cache": OWN}),
    }),
    Group("Speed", "speed", SD3, {
        "attention": Row("math", "said"),
        "compile": Row(True, "said"),
        "deterministic": Row(True, "estimate"),
        "graphs": Row(True, "estimate"),
        "prefetch": Row(False, "Changes no result, and the CPU ignores it: tests/stages/step/test_speed.py."),
        "threads": Row(2, "said"),
    }),
    Group("Checkpoint", "checkpoint", SD3, {
        "every": Row(1, "file"),
        "keep_last": Row(1, "file", {"checkpoint.every": 1}),
        "keep_every": Row(2, "file", {"checkpoint.every": 1, "checkpoint.keep_last": 1, "train.steps": 3}),
    }),
    Group("Validation", "validation", SD3, {
        "prompts": Row([CLASS], "file"),
        "negative_prompt": Row("blurred", "file"),
        "every": Row(1, "file"),
        "seed": Row(1, "file"),
        "steps": Row(3, "file"),
        "guidance": Row(2.0, "file"),
        "width": Row(48, "file"),
        "height": Row(48, "file"),
        "loss_samples": Row(2, "loss"),
        "class_prompt": Row(CLASS, "loss", {"validation.loss_samples": 2}),
        "unrelated_prompts": Row(["a cat"], "file", {"validation.loss_samples": 2}),
        "split": Row(0.34, "plan", {"validation.loss_samples": 2}),
        "early_stop": Row({"patience": 1}, "plan", {
            "validation.loss_samples": 2, "validation.split": 2, "validation.every": 1, "train.steps": 6,
            "optimizer.lr": 1.0}),
    }, {"validation.prompts": [PROMPT], "validation.steps": 2}),
    Group("Validation", "validation", SD15, {
        "images": Row([f"{INPUTS}/striped/001.png"], "file"),
        "masks": Row([f"{INPUTS}/masks/000.png"], "file"),
    }, NINE | {"validation.prompts": [PROMPT], "validation.steps": 2,
               "validation.images": [f"{INPUTS}/striped/000.png"], "validation.masks": [f"{INPUTS}/hole.png"]}),
    Group("EarlyStop", "validation.early_stop", SD3, {
        "patience": Row(1, "plan"),
        "min_steps": Row(5, "plan", {"validation.early_stop.patience": 1}),
    }, {"validation.early_stop": {}, "validation.loss_samples": 2, "validation.split": 2, "validation.every": 1,
        "train.steps": 6, "optimizer.lr": 1.0}),
    Group("Profile", "profile", SD3, {
        "max_traces": Row(0, "file"),
        "wait": Row(0, "file"),
        "warmup": Row(0, "file"),
        "active": Row(1, "file"),
        "with_stack": Row(True, "file"),
        "record_shapes": Row(True, "file"),
        "memory": Row(True, "file"),
        "blocks": Row(True, "file"),
        "snapshot": Row(True, "Concerns a GPU, whose allocator has a history: tests/gpu/real/test_gpu.py."),
        "max_mb": Row(0.001, "file"),
    }, {"profile.max_traces": 1, "train.steps": 5}),
    Group("Tracking", "tracking", SD3, {
        "tensorboard": Row(True, "file"),
        "wandb": Row("offline", "Needs wandb: tests/training/trackers/test_tracking.py stands in for it."),
        "wandb_project": Row("other", "Needs wandb: tests/training/trackers/test_tracking.py stands in for it."),
        "trackio": Row("mine", "Needs trackio: tests/training/trackers/test_tracking.py stands in for it."),
        "notify": Row("pictures", "Posts to a URL: tests/training/trackers/test_notifications.py reads what arrives."),
    }),
    Group("Output", "output", SD3, {
        "runs": Row(f"{OWN}/elsewhere", "file"),
        "profiles": Row(f"{OWN}/elsewhere", "file", {"tracking.tensorboard": True}),
        "cache": Row(f"{OWN}/elsewhere", "file"),
        "cache_form": Row("shards", "file"),
        "cache_local_gib": Row(1.0, "Bounds what is kept of an object store: tests/data/storage/test_remote_cache.py."),
        "prices": Row("prices.json", "Prices of cards, for what is predicted: tests/estimate/test_predicted_time.py."),
        "report": Row(True, "file"),
    }, {"output.cache": OWN}),
    Group("Lora", "adapter", SD15, {
        "conv_rank": Row(2, "file"),
        "conv_alpha": Row(8.0, "loss", {"adapter.conv_rank": 2}),
    }),
    Group("Lokr", "adapter", SD15, {"conv_rank": Row(2, "file")}, {"adapter": {"method": "lokr", "factor": 4}}),
    Group("Loha", "adapter", SD15, {"conv_rank": Row(2, "file")}, {"adapter": {"method": "loha"}}),
    Group("Source", "data.sources.1", SD3, {"regularization": Row(True, "plan")}, {
        "data": {
            "source": "several",
            "sources": [{"path": f"{INPUTS}/{name}", "resolution": 32} for name in ("flat", "striped")],
        },
        "validation.split": 4,
        "validation.loss_samples": 2,
    }),
    *tags(),
]  # fmt: skip
