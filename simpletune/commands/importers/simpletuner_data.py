"""Translate SimpleTuner's multidatabackend.json: its image data sets become sources."""

from __future__ import annotations

from typing import Any

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
CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds", "distillation_cache")


def translate(data: list[Json], general: Translation) -> list[Translation]:
    """Translate each data set of pictures."""
    masks = {entry.get("id"): entry for entry in data if entry.get("dataset_type") == "conditioning"}
    found: list[Translation] = []
    for index, entry in enumerate(data):
        section = f"{entry.get('id', index)}."
        kind = str(entry.get("dataset_type", "image"))
        if kind in CACHES or kind == "conditioning" or boolean(entry.get("disabled", False)):
            _leave(general, section, entry, kind)
            continue
        inherited = {
            key: general.settings.get(key, general.defaults.get(key))
            for key in ("resolution", "resolution_type", "caption_dropout_probability")
        }
        source = Translation(entry, inherited, section, f"data.sources.{len(found)}.")
        _translate_one(source, masks, multiple(general))
        found.append(source)
    return found


def _leave(general: Translation, section: str, entry: Json, kind: str) -> None:
    """Leave out a data set that does not contain pictures to train on."""
    whole = Translation({"dataset_type": kind, **entry}, section=section)
    if boolean(entry.get("disabled", False)):
        whole.leave("disabled", "the data set was not used")
    elif kind == "conditioning":
        whole.leave("dataset_type", "the masks of another data set")
    else:
        if entry.get("cache_dir") and general.get("output.cache") is None:
            whole.change("cache_dir", "output.cache", entry["cache_dir"], "one cache for everything")
            general.set("output.cache", entry["cache_dir"])
        whole.leave("dataset_type", "a cache: prompts and latents are cached in output.cache")
    general.lines.extend(whole.lines)


def _translate_one(source: Translation, masks: dict[Any, Json], step: int) -> None:
    source.set("path", "")
    _pictures(source)
    source.by_table(
        [
            KeyRule("caption_dropout_probability", "caption_dropout", number),
            KeyRule("is_regularisation_data", "regularization", boolean),
            KeyRule("is_regularization_data", "regularization", boolean),
        ]
    )
    _captions(source)
    _size(source, step)
    repeats = source.read("repeats", whole_number)
    if repeats is not None:
        source.change("repeats", "repeats", repeats + 1, "0 means once there, 1 here")
    named = source.settings.get("conditioning_data")
    mask = masks.get(named[0] if isinstance(named, list) else named) if named else None
    if mask is not None and mask.get("conditioning_type", "mask") in ("mask", "segmentation"):
        source.take("conditioning_data", "mask", "files")
        source.set("mask_path", str(mask.get("instance_data_dir", "")))
        source.seen("conditioning_data")
    elif named:
        source.leave("conditioning_data", "not masks, or not in this file: simpletune trains no conditioning")
    source.leave_by_table(trainer_tables("simpletuner")["left_out_data"])
    source.leave_rest()


def _pictures(source: Translation) -> None:
    kind = source.read("type", as_text) or "local"
    path = source.read("instance_data_dir", as_text)
    if kind == "huggingface":
        source.take("type", "source", "table")
        source.by_table(
            [
                KeyRule("dataset_name", "path", as_text),
                KeyRule("image_column", "image_column", as_text),
                KeyRule("caption_column", "caption_column", as_text),
                KeyRule("split", "split", as_text),
            ]
        )
    elif path is not None:
        source.take("instance_data_dir", "path", path)
    if kind not in ("local", "huggingface"):
        source.leave(
            "type", f"{kind}: simpletune reads local folders, parquet and Hugging Face data sets. Set its path"
        )


def _captions(source: Translation) -> None:
    strategy, prompt = source.read("caption_strategy", as_text), source.read("instance_prompt", as_text)
    if boolean(source.settings.get("only_instance_prompt", False)):
        strategy = "instanceprompt"
    source.seen("only_instance_prompt", "disable_multiline_split", "prepend_instance_prompt")
    if strategy == "instanceprompt" and prompt:
        source.take("instance_prompt", "prompt", prompt)
    elif strategy == "textfile":
        source.take("caption_strategy", "captions", "txt")
        if not boolean(source.settings.get("disable_multiline_split", False)):
            source.take("caption_strategy", "caption_lines", "several")
    elif strategy == "filename":
        source.take("caption_strategy", "captions", "filename")
    elif strategy is not None and source.get("source") != "table":
        source.leave("caption_strategy", f"{strategy}: put captions beside the pictures or into metadata.jsonl")
    if prompt and strategy != "instanceprompt" and boolean(source.settings.get("prepend_instance_prompt", False)):
        source.take("instance_prompt", "caption_prefix", prompt)
    elif prompt and strategy != "instanceprompt":
        source.leave("instance_prompt", "the captions are used")


def _size(source: Translation, step: int) -> None:
    size, kind = source.read("resolution", number) or 1024, source.read("resolution_type", as_text) or "pixel_area"
    if kind == "area":
        side = side_of_area(1000 * size**0.5, 1000 * size**0.5, step)
        source.change("resolution", "resolution", side, "megapixels there; the side of a square of that area here")
    else:
        side = side_of_area(size, size, step)
        why = "the shorter edge there; the side of a square of the pictures' area here" if kind == "pixel" else ""
        why = why or (f"a multiple of {step}" if side != size else "")
        if why:
            source.change("resolution", "resolution", side, why)
        else:
            source.take("resolution", "resolution", side)
    crop, aspect = source.read("crop", boolean), source.read("crop_aspect", as_text) or "square"
    style = source.read("crop_style", as_text)
    if crop and aspect == "square":
        source.take("crop_aspect", "aspect", "square")
    elif crop and aspect not in ("preserve", "closest"):
        source.leave("crop_aspect", f"{aspect}: pictures go to buckets near their own aspect ratios")
    if crop and style in ("center", "centre", "random"):
        source.take("crop_style", "crop", "random" if style == "random" else "center")
        if style == "random":
            source.change("crop_style", "variants", VARIANTS, "drawn once for each variant, and cached")
    elif crop and style is not None:
        source.leave("crop_style", f"{style}: simpletune crops at the center or at random")
