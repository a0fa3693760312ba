"""Translate kohya's data sets: subsets of a TOML file, or train_data_dir and reg_data_dir, become sources."""

from __future__ import annotations

import math
from collections.abc import Mapping

from simpletune.commands.importers.translation import (
    KeyRule,
    Translation,
    as_text,
    boolean,
    multiple,
    number,
    side_of_area,
    trainer_tables,
    whole_number,
)
from simpletune.system.options import Json

VARIANTS = 8
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


def translate(data: Json, general: Translation) -> list[Translation]:
    """Translate every subset of a data set's TOML file."""
    shared = {**_given(general), **(data.get("general") or {})}
    found: list[Translation] = []
    batches: set[object] = set()
    for number_of, dataset in enumerate(data.get("datasets") or []):
        own = {key: value for key, value in dataset.items() if key != "subsets"}
        for index, subset in enumerate(dataset.get("subsets") or []):
            settings = {**{key: shared[key] for key in shared if key in INHERITED or key in SIZES}, **own, **subset}
            source = Translation(
                settings,
                {"resolution": 512, "num_repeats": 1, "enable_bucket": False},
                f"datasets[{number_of}].subsets[{index}].",
                f"data.sources.{len(found)}.",
            )
            batches.add(settings.get("batch_size", 1))
            _translate_one(source, general)
            found.append(source)
    general.seen(*INHERITED, *SIZES)
    _batch(general, batches)
    return found


def _given(general: Translation) -> Json:
    """Return data options given among the other options; those in the data set's file override them."""
    given = {key: general.settings[key] for key in (*INHERITED, *SIZES) if general.has(key)}
    size = general.settings.get("resolution")
    if isinstance(size, str):
        given["resolution"] = [part.strip() for part in size.split(",")]
    return given


def _batch(general: Translation, batches: set[object]) -> None:
    general.settings["batch_size"] = max(map(whole_number, batches), default=1)
    if len(batches) > 1:
        general.change(
            "batch_size", "train.batch_size", general.settings["batch_size"], "one value for all data sets: the largest"
        )
    elif batches:
        general.take("batch_size", "train.batch_size", general.settings["batch_size"])
    general.seen("train_batch_size")


def from_folders(general: Translation) -> list[Translation]:
    """Translate train_data_dir and reg_data_dir, whose folders are named ``10_sks dog``."""
    given = _given(general)
    found: list[Translation] = []
    for key, regularization in (("train_data_dir", False), ("reg_data_dir", True)):
        path = general.read(key, as_text)
        if path is None:
            continue
        defaults = {"resolution": [512, 512], "enable_bucket": False}
        source = Translation({"image_dir": path, **given}, defaults, f"{key}.", f"data.sources.{len(found)}.")
        source.settings["is_reg"] = regularization
        source.change(
            "image_dir", "folder_names", "kohya", "10_sks dog: 10 repeats, and a caption for pictures without one"
        )
        _translate_one(source, general)
        found.append(source)
    general.seen(*INHERITED, *SIZES)
    general.by_table([KeyRule("train_batch_size", "train.batch_size", whole_number)])
    return found


def _translate_one(source: Translation, general: Translation) -> None:
    source.set("path", "")
    source.seen("batch_size")
    source.by_table([KeyRule("image_dir", "path", as_text)])
    _captions(source)
    source.by_table(ROWS)
    if source.read("is_reg", boolean):
        source.take("is_reg", "regularization", True)
        weight = general.read("prior_loss_weight", number)
        if weight is not None:
            source.settings["prior_loss_weight"] = weight
            source.take("prior_loss_weight", "weight", weight)
            source.seen("prior_loss_weight")
    _masks(source, general)
    _size(source, multiple(general))
    varied = [key for key in ("flip_aug", "random_crop", "shuffle_caption") if boolean(source.settings.get(key, False))]
    if varied or source.get("tag_dropout"):
        key = (varied or ["caption_tag_dropout_rate"])[0]
        source.change(key, "variants", VARIANTS, "drawn once for each variant, and cached")
    source.leave_by_table(trainer_tables("kohya")["left_out_data"])
    source.leave_rest()


def _captions(source: Translation) -> None:
    """Translate captions: class_tokens replace missing ones, but a source here has either captions or one prompt."""
    words = source.read("class_tokens", as_text)
    if words is None:
        return
    if source.has("caption_extension") or source.get("folder_names") == "kohya":
        source.leave("class_tokens", "used for pictures without a caption. Caption them, or set prompt")
    else:
        source.change("class_tokens", "prompt", words, "for all pictures; remove it if they have captions")


def _masks(source: Translation, general: Translation) -> None:
    folder = source.read("conditioning_data_dir", as_text)
    if folder is None:
        return
    source.take("conditioning_data_dir", "mask", "files")
    source.take("conditioning_data_dir", "mask_path", folder)
    general.seen("masked_loss")


def _size(source: Translation, step: int) -> None:
    size = source.read("resolution", lambda value: value)
    sides = [number(side) for side in (size if isinstance(size, list) else [size])]
    width, height = sides[0], sides[-1]
    side = side_of_area(width, height, step)
    if math.isclose(side * side, width * height):
        source.take("resolution", "resolution", side)
    else:
        source.change("resolution", "resolution", side, f"the side of a square of that area, in steps of {step}")
    bucket = source.read("enable_bucket", boolean)
    source.take("enable_bucket", "aspect", "buckets" if bucket else "square")
    if source.read("bucket_no_upscale", boolean):
        source.change(
            "bucket_no_upscale",
            "max_upscale",
            1.0,
            "pictures that would be scaled up are refused; kohya's scripts give them smaller buckets",
        )


def is_dataset(settings: Mapping[str, object]) -> bool:
    """Whether a TOML file describes data sets."""
    return "datasets" in settings
