"""Translate OneTrainer's concepts to sources, and its samples to validation prompts."""

from __future__ import annotations

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
from simpletune.models.shared.buckets import STEP
from simpletune.system.options import Json

VARIANTS = 8
AUGMENTED = ("rotate", "brightness", "contrast", "saturation", "hue", "circular_mask", "mask_rotate")


def translate(concepts: list[Json], general: Translation) -> list[Translation]:
    """Translate each concept."""
    found: list[Translation] = []
    for index, concept in enumerate(concepts):
        section = f"concepts[{index}]."
        kind = str(concept.get("type", "STANDARD"))
        whole = Translation({"type": kind, **concept}, section=section)
        if concept.get("enabled") is False:
            whole.leave("enabled", "the concept was not used")
        elif kind == "VALIDATION" or concept.get("validation_concept"):
            whole.leave("type", "a concept for the validation loss. validation.split holds pictures out instead")
        else:
            source = Translation(concept, {"balancing": 1.0}, section, f"data.sources.{len(found)}.")
            _translate_one(source, general, kind)
            found.append(source)
            continue
        general.lines += whole.lines
    general.seen("aspect_ratio_bucketing", "masked_training")
    return found


def _translate_one(source: Translation, general: Translation, kind: str) -> None:
    source.set("path", "")
    source.by_table(
        [
            KeyRule("path", "path", as_text),
            KeyRule("loss_weight", "weight", number),
            KeyRule("image_variations", "variants", whole_number),
        ]
    )
    if kind == "PRIOR_PREDICTION":
        source.take("type", "regularization", True)
        general.set("prior", {"method": "base_prediction"})
    _repeats(source)
    _prompts(source)
    _image(source, general)
    _masks(source, general)
    source.seen("type")
    source.leave_by_table(trainer_tables("onetrainer")["left_out_data"])
    source.leave_rest()
    source.lines = [
        line for line in source.lines if line.became != "left out" or line.why not in ("", "it is used", "repeats")
    ]


def _repeats(source: Translation) -> None:
    count, strategy = source.read("balancing", number) or 1.0, source.read("balancing_strategy", as_text) or "REPEATS"
    if strategy == "SAMPLES":
        source.leave("balancing", "a number of samples per epoch; here every picture has its repeats")
    elif count >= 1 and count == int(count):
        source.take("balancing", "repeats", int(count))
    else:
        source.change("balancing", "repeats", max(1, round(count)), "whole numbers, at least 1")


def _prompts(source: Translation) -> None:
    own = Translation(
        source.settings.get("text") or {}, {"prompt_source": "sample"}, f"{source.section}text.", source.place
    )
    kind, path = own.read("prompt_source", as_text), own.read("prompt_path", as_text)
    if kind == "sample":
        own.take("prompt_source", "captions", "txt")
    elif kind == "filename":
        own.take("prompt_source", "captions", "filename")
    else:
        own.leave(
            "prompt_path" if path else "prompt_source",
            f"prompts drawn from the lines of a file ({path}). Set prompt, or put a text beside each picture",
        )
    if kind == "sample":
        own.take("prompt_source", "caption_lines", "several")
    if own.read("enable_tag_shuffling", boolean):
        own.take("enable_tag_shuffling", "shuffle_tags", True)
    if own.read("tag_dropout_enable", boolean):
        mode = own.read("tag_dropout_mode", as_text) or "FULL"
        why = {"RANDOM": "each tag is dropped by itself"}.get(
            mode, f"mode {mode}; here each tag is dropped independently"
        )
        own.change("tag_dropout_probability", "tag_dropout", own.read("tag_dropout_probability", number) or 0.0, why)
    if own.get("shuffle_tags") or own.get("tag_dropout"):
        own.by_table(
            [KeyRule("tag_delimiter", "tag_separator", as_text), KeyRule("keep_tags_count", "keep_tags", whole_number)]
        )
        if (source.get("variants") or 1) == 1:
            own.change("enable_tag_shuffling", "variants", VARIANTS, "drawn once for each variant")
    if boolean(own.settings.get("caps_randomize_enable", False)):
        own.leave("caps_randomize_enable", "upper and lower case stay unchanged")
    source.seen("text")
    source.lines += own.lines
    source.config |= own.config


def _image(source: Translation, general: Translation) -> None:
    own = Translation(source.settings.get("image") or {}, {}, f"{source.section}image.", source.place)
    for key, path, value in (("enable_crop_jitter", "crop", "random"), ("enable_random_flip", "flip", True)):
        if own.read(key, boolean):
            own.take(key, path, value)
    if (own.get("crop") or own.get("flip")) and (source.get("variants") or 1) == 1:
        own.change(
            "enable_crop_jitter" if own.get("crop") else "enable_random_flip",
            "variants",
            VARIANTS,
            "drawn once for each variant",
        )
    sizes = as_text(
        own.settings.get("resolution_override")
        if own.read("enable_resolution_override", boolean)
        else general.settings.get("resolution", "512")
    ).split(",")
    first = sizes[0].lower().split("x")
    side = side_of_area(number(first[0]), number(first[-1]), multiple(general))
    if len(sizes) > 1 or len(first) > 1 or side != number(first[0]):
        source.settings["resolution"] = ",".join(sizes)
        source.change(
            "resolution", "resolution", side, "the first size, as the side of a square of that area in whole steps"
        )
    else:
        source.settings["resolution"] = sizes[0]
        source.take("resolution", "resolution", side)
    if general.settings.get("aspect_ratio_bucketing") is False:
        source.settings["aspect_ratio_bucketing"] = False
        source.take("aspect_ratio_bucketing", "aspect", "square")
        source.seen("aspect_ratio_bucketing")
    for key, value in own.settings.items():
        if value is True and any(word in key for word in AUGMENTED):
            own.leave(key, "only crops and flips change pictures")
        elif value is True and key == "enable_fixed_flip":
            own.leave(key, "pictures are flipped at random or not")
    source.seen("image", "resolution")
    source.lines += own.lines
    source.config |= own.config


def _masks(source: Translation, general: Translation) -> None:
    if not general.read("masked_training", boolean):
        return
    weight = general.read("unmasked_weight", number)
    source.settings |= {"masked_training": True, "unmasked_weight": 0.1 if weight is None else weight}
    source.take("masked_training", "mask", "files")
    source.take("unmasked_weight", "unmasked_weight", source.settings["unmasked_weight"])
    source.seen("masked_training", "unmasked_weight")
    keep = general.read("masked_prior_preservation_weight", number)
    if keep and general.get("prior.outside_mask") is None:
        prior = general.get("prior") or {"method": "base_prediction"}
        general.config["prior"] = prior
        general.take("masked_prior_preservation_weight", "prior.outside_mask", keep)


def take_samples(samples: list[Json], general: Translation) -> None:
    """Translate samples: their prompts, and size, seed, steps and guidance of the first."""
    used = [row for row in samples if row.get("enabled", True) and str(row.get("prompt", "")).strip()]
    if not used:
        return
    general.settings["samples"] = f"{len(used)} prompts"
    general.take("samples", "validation.prompts", [str(row["prompt"]) for row in used])
    names = {
        "negative_prompt": "negative_prompt",
        "seed": "seed",
        "cfg_scale": "guidance",
        "diffusion_steps": "steps",
        "width": "width",
        "height": "height",
    }
    for name, path in names.items():
        values = [row[name] for row in used if row.get(name) not in (None, "")]
        if not values:
            continue
        first = values[0] if name == "negative_prompt" else number(values[0])
        value = whole_number(first) // STEP * STEP if path in ("width", "height") else first
        if any(other != values[0] for other in values) and path != "seed":
            general.change("samples", f"validation.{path}", value, f"{name} of the first sample, for all")
        else:
            general.take("samples", f"validation.{path}", value)
