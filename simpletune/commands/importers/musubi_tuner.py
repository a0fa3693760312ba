"""Translate musubi-tuner's configuration for FLUX.2 klein base 4B, Z-Image and Qwen-Image: most of its options are
those of kohya's scripts, by whose tables they are read. Its other models are refused (``importing.py``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from simpletune.commands.importers import kohya
from simpletune.commands.importers.common_options import leave_refiners_out, take_alpha
from simpletune.commands.importers.translation import (
    KeyOutcome,
    KeyRule,
    Translation,
    as_text,
    boolean,
    number,
    pairs,
    refuse_references,
    row_of,
    trainer_tables,
    whole_number,
)
from simpletune.models.flux2.flux2_files import KLEIN
from simpletune.models.qwen_image.qwen_image_files import NEWEST
from simpletune.models.zimage.zimage_files import BASE
from simpletune.system.options import Json

TITLE, NAME = "musubi-tuner", "musubi_tuner"
flatten = kohya.flatten
SAMPLING: Mapping[str, tuple[str, object]] = {  # of timestep_sampling: objective.sigma and objective.shift
    "flux2_shift": ("logit_normal", "auto"),
    "flux_shift": ("logit_normal", "auto"),
    "qwen_shift": ("logit_normal", "auto"),
    "sigmoid": ("logit_normal", 1.0),
    "uniform": ("uniform", 1.0),
}


def is_supported(settings: Json) -> bool:
    """Return whether a configuration or a command is musubi-tuner's for klein base 4B, Z-Image or
    Qwen-Image."""
    flat = flatten(settings)
    script, network = str(flat.get("script", "")), flat.get("network_module")
    if _is_qwen_image(flat):
        return not flat.get("edit") and not flat.get("edit_plus") and flat.get("model_version") in (None, "original")
    if script.startswith("zimage_train_network") or network == "networks.lora_zimage":
        return True
    of_flux_2 = script.startswith("flux_2_train") or "dit" in flat or network == "networks.lora_flux_2"
    return of_flux_2 and flat.get("model_version") == "klein-base-4b"


def _is_qwen_image(flat: Json) -> bool:
    return str(flat.get("script", "")).startswith("qwen_image_train_network") or (
        flat.get("network_module") == "networks.lora_qwen_image"
    )


def translate(settings: Json, folder: Path, data: Path | None) -> tuple[Translation, list[Translation]]:
    """Translate options and data."""
    general, sources = kohya.translate(settings, folder, data, variant=kohya.Variant(_model, _data_sets))
    for each in (general, *sources):
        each.lines = [replace(line, key=re.sub(r"\bimage_dir$", "image_directory", line.key)) for line in each.lines]
    scale, offset = general.get("validation.guidance"), general.family.words.pipeline.guidance_offset
    if offset and isinstance(scale, int | float):
        own, why = (scale - offset if scale > 1 else 1.0), f"its scale is {-offset:g} less than ordinary guidance"
        general.set("validation.guidance", own)
        general.lines = [
            replace(line, became="changed", new=own, why=why) if line.path == "validation.guidance" else line
            for line in general.lines
        ]
    return general, sources


def _model(found: Translation) -> str:
    """Translate what differs from kohya's scripts: model, network, precision and noise levels."""
    version = found.read("model_version", as_text)
    qwen_image = _is_qwen_image(found.settings)
    klein = version is not None and not qwen_image
    base = NEWEST if qwen_image else KLEIN if klein else BASE
    if version is not None:
        found.take("model_version", "model.family", "qwen_image" if qwen_image else "klein")
    else:
        found.set("model.family", "qwen_image" if qwen_image else "zimage")
    found.set("model.pretrained", base)
    found.by_table([KeyRule("dit", "model.transformer", as_text)])
    found.unused(f"those of {base}", "vae", "text_encoder")
    rank, alpha = found.read("network_dim", whole_number), found.read("network_alpha", number)
    found.take("network_module", "adapter.method", "lora")
    if klein:
        found.take("network_module", "adapter.targets", "all_linear", "all linear layers of the blocks")
    else:
        found.take("network_module", "adapter.targets", "attention_mlp", "the blocks' layers but for modulations")
        if not qwen_image:
            leave_refiners_out(found, "network_module", TITLE)
    found.take("network_dim", "adapter.rank", rank)
    take_alpha(found, "network_alpha", alpha, rank)
    found.by_table([KeyRule("network_dropout", "adapter.dropout", number)])
    for name, value in (found.read("network_args", pairs) or {}).items():
        found.leave(found.part("network_args", name, value), "set adapter.layers or adapter.targets")
    if found.read("fp8_base", boolean):
        found.take("fp8_base", "precision.weights", "int8", "int8 weights take as many bytes, with a smaller error")
        found.unused("see fp8_base", "fp8_scaled")
    else:
        found.set("precision.weights", "bf16")
        found.unused("fp8_base is off", "fp8_scaled")
    compute = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}.get(str(found.read("mixed_precision", as_text)), "auto")
    found.take("mixed_precision", "precision.compute", compute)
    kind, shift = found.read("timestep_sampling", as_text) or "sigma", found.read("discrete_flow_shift", number)
    if kind == "shift":
        found.take("timestep_sampling", "objective.sigma", "logit_normal")
        found.set("objective.shift", 1.0 if shift is None else shift)
    elif kind in SAMPLING:
        sigma, own = SAMPLING[kind]
        found.take("timestep_sampling", "objective.sigma", sigma)
        found.take("timestep_sampling", "objective.shift", own, "by the size of the pictures" if own == "auto" else "")
    else:
        found.leave("timestep_sampling", f"simpletune has {', '.join([*SAMPLING, 'shift'])} of them")
    if shift is not None and kind == "shift":
        found.take("discrete_flow_shift", "objective.shift", shift)
    found.unused("timestep_sampling decides", "discrete_flow_shift", "weighting_scheme")
    for key in list(found.settings):
        if (row := row_of(key, trainer_tables(NAME)["no_effect"])) is not None:
            found.unused(trainer_tables(NAME)["no_effect"][row], key)
    return "lora"


def _data_sets(data: Json, general: Translation) -> Json:
    """Return data sets as those of kohya's scripts, whose pictures lie in subsets."""
    found: list[Json] = []
    for index, each in enumerate(data["datasets"]):
        own: Json = {"subsets": [{}]}
        for key, value in each.items():
            name = f"datasets[{index}].{key}"
            if key.startswith("control_"):
                refuse_references(general, name, value)
            elif key == "cache_directory":
                why = "prompts and latents are cached in output.cache"
                general.lines.append(KeyOutcome("left out", name, value, why=why, same=True))
            else:
                own["image_dir" if key == "image_directory" else key] = value
        found.append(own)
    return {**data, "datasets": found}
