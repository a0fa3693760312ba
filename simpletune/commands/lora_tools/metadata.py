"""Build the header of an exported LoRA file: ``modelspec.*`` and ``ss_*`` fields, filled from its run."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageOps

from simpletune import __version__
from simpletune.adapters.files.detect_model import ARCHITECTURE_FIELDS, family_of_lora
from simpletune.adapters.files.header import ADAPTER_METADATA, EMBEDDED, OBJECTIVE
from simpletune.adapters.files.keys import DORA, LORA
from simpletune.config.schema import TrainConfig
from simpletune.models.lora_registry import Layers
from simpletune.models.shared.lora_layout import DORA_MARK, LoraNames
from simpletune.models.text_layers import split_text
from simpletune.runs.attempts import attempts_of
from simpletune.runs.folder import SAMPLES
from simpletune.runs.model_card import HINT, licence, public_name, shareable, usage_fields
from simpletune.system.options import Json

if TYPE_CHECKING:
    from simpletune.adapters.files.header import LoraHeader
    from simpletune.adapters.files.updates import Update, Updates

ORIGIN = ("simpletune_parent", "simpletune_on_top_of")  # of a run's result: see ``runs.checkpoint.metadata_of``
SAID = ("title", "author", "description", "tags")  # header fields that the command line may set
SIDE = 256  # pixels of a thumbnail; the model spec recommends 256x256
MOST = 32_000  # characters of a thumbnail in the header
QUALITIES = ((SIDE, 85), (SIDE, 70), (SIDE, 50), (SIDE, 30), (SIDE // 2, 50), (SIDE // 4, 50))
"""Sides and JPEG qualities to try, in this order."""
PREFIX = "data:image/jpeg;base64,"
DATE = "%Y-%m-%dT%H:%M:%SZ"


def header_of(
    updates: Updates, title: str, config: TrainConfig | None, steps: int | None, names: LoraNames | None
) -> dict[str, str]:
    """Return the header of a LoRA of the family with these names; None: not known, for updates of text encoders
    only."""
    common = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.implementation": "diffusers",
        "modelspec.title": title,
        "modelspec.date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "ss_training_comment": f"simpletune {__version__}",
    }
    common |= model_fields({layer: update.shape for layer, update in split_text(updates)[0].items()}, names)
    arguments = {}
    if kinds := {update.kind for update in updates.values()} - {LORA, DORA}:
        common["ss_network_module"] = "lycoris.kohya"
        arguments["algo"] = min(kinds).lower()
    spatial = [update for update in updates.values() if update.is_spatial]
    others = [update for update in updates.values() if not update.is_spatial]
    common["ss_network_dim"], common["ss_network_alpha"] = _dim_and_alpha(others or spatial)
    if spatial:
        arguments["conv_dim"], arguments["conv_alpha"] = _dim_and_alpha(spatial)
    if arguments:
        common["ss_network_args"] = json.dumps(arguments)
    if config is None:
        return common
    return common | dict(_of_run(config, steps))


def _dim_and_alpha(updates: Sequence[Update]) -> tuple[str, str]:
    """Return the common rank and alpha; sd-scripts' term for several."""
    found = {update.dim or 1 for update in updates}, {(update.dim or 1) * update.scale for update in updates}
    rank, alpha = (f"{min(values):g}" if len(values) == 1 else "Dynamic" for values in found)
    return rank, alpha


SPEC = "modelspec."
KEPT = ("author", "description", "license", "tags", "thumbnail", "trigger_phrase", "usage_hint", "date", "resolution")
"""Model spec fields that a converted file keeps."""


def shared_fields(run: Path | None, step: int | None, known: Mapping[str, str], said: Mapping[str, str]) -> Json:
    """Build the model spec fields that tell people what a file is: of its run, else those that it had; what the user
    said goes first. Keep which LoRAs its run began with and trained on top of."""
    fields = {SPEC + name: known[SPEC + name] for name in KEPT if run is None and SPEC + name in known}
    fields |= {name: known[name] for name in ORIGIN if name in known}
    if run is not None:
        found = {"date": trained_at(run), "thumbnail": thumbnail(run, step)}
        fields |= {SPEC + name: value for name, value in found.items() if value is not None}
    return fields | {SPEC + name: value for name, value in said.items()}


OF_TENSORS = re.compile(
    r"^(sshs_|ss_network_(module|dim|alpha|args)$|modelspec\.(hash|sai_model_spec|implementation|title|architecture))"
    rf"|^({'|'.join((ADAPTER_METADATA, EMBEDDED, 'format', *DORA_MARK))})$"
)
"""Fields that describe the tensors beside them, or that say how to read them: false in a file with others."""


def foreign_fields(known: Mapping[str, str], written: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the other fields of a file's header, which the file that is made from it keeps, and the names of those
    that it cannot keep because they describe tensors."""
    others = {name: value for name, value in known.items() if name not in written}
    return {name: value for name, value in others.items() if not OF_TENSORS.search(name)}, [
        name for name in others if OF_TENSORS.search(name) and name not in ("format", EMBEDDED)
    ]


def model_fields(denoiser: Layers, names: LoraNames | None) -> Mapping[str, str]:
    """Name the model in sd-scripts' terms, by the layers of the denoiser and their family's names. Some layers do not
    reveal which of the family's models it is."""
    if names is None:
        return {}
    sides = {layer: (shape[0], shape[1]) for layer, shape in denoiser.items()}
    model = family_of_lora({}, sides).model if denoiser else ""
    if model not in names.header or not denoiser:
        published = [each for each in names.header if each]
        model = published[0] if len(published) == 1 or not denoiser else ""
    return names.header[model]


def base_fields(header: LoraHeader) -> dict[str, str]:
    """Return what a file's header and keys reveal about its base; for updates of text encoders only, which do not
    reveal it themselves."""
    found = {name: header.metadata[name] for name in ARCHITECTURE_FIELDS if name in header.metadata}
    if any(name.startswith("lora_te_") for name in header.text):
        found.setdefault("ss_base_model_version", "sd_v1")
    return found if not header.modules else {}


def _of_run(config: TrainConfig, steps: int | None) -> Iterator[tuple[str, str]]:
    """Translate a run's configuration to sd-scripts' fields."""
    public = shareable(config)
    width, height = config.image_size()
    terms = licence(config)
    base = public_name(config.model.files.weights_from)
    train, adapter = config.train, config.adapter
    yield "modelspec.resolution", f"{width}x{height}"
    yield "modelspec.license", str(terms.get("license_name") or terms["license"])
    hints = []
    if (trigger := trigger_of(config)) is not None:
        yield "modelspec.trigger_phrase", trigger
        hints.append(f"Write {trigger!r} into the prompt.")
    if told := usage_fields(config):
        yield OBJECTIVE, told[OBJECTIVE]
        hints.append(told[HINT])
    if hints:
        yield HINT, " ".join(hints).rstrip(".")
    yield "modelspec.tags", ", ".join((adapter.method, config.model.words.pipeline.tag, "simpletune"))
    under = "".join(f" with {lora}" for lora in public.model.loras)
    yield "modelspec.description", f"LoRA for {base}{under}, trained with simpletune {__version__}"
    yield "ss_output_name", config.name
    yield "ss_sd_model_name", base
    yield "ss_network_dropout", f"{getattr(adapter, 'dropout', 0.0):g}"
    yield "ss_learning_rate", f"{config.optimizer.lr:g}"
    yield "ss_optimizer", config.optimizer.name
    yield "ss_lr_scheduler", config.schedule.name
    yield "ss_lr_warmup_steps", str(config.schedule.warmup_steps)
    yield "ss_batch_size_per_device", str(train.micro_batch)
    yield "ss_gradient_accumulation_steps", str(train.accumulation)
    yield "ss_seed", str(train.seed)
    yield "ss_resolution", f"({width}, {height})"
    yield "ss_mixed_precision", {"fp32": "no"}.get(config.precision.settled_compute, config.precision.settled_compute)
    yield "ss_gradient_checkpointing", str(config.memory.checkpointing != "none")
    if steps is not None:
        yield "ss_steps", str(steps)
        yield "ss_max_train_steps", str(steps)
    yield EMBEDDED, public.model_dump_json(by_alias=True)


def source_note(what: str, sources: Json) -> dict[str, str]:
    """Record in the header how a file was made from others; names them without their folders."""
    return {"simpletune_made_by": what, "simpletune_made_from": json.dumps(sources)}


def trained_at(run: Path) -> str | None:
    """Return when a run's last attempt ended, in UTC as ISO 8601; None if it is not recorded.

    Exports of one run have the same date, and so the same bytes.
    """
    attempts = attempts_of(run)
    if not attempts:
        return None
    return (attempts[-1].started + timedelta(seconds=round(attempts[-1].seconds))).strftime(DATE)


def thumbnail(run: Path, step: int | None) -> str | None:
    """Return a run's validation picture of a step, or of the last one generated, as a small JPEG in a data URI; None if
    there is none."""
    states = sorted((run / SAMPLES).glob("step-*")) if step is None else [run / SAMPLES / f"step-{step:06d}"]
    for state in reversed(states):
        for file in sorted(state.glob("prompt-*.png")):
            return small_jpeg(file)
    return None


def small_jpeg(file: Path) -> str | None:
    """Return a picture as a square JPEG in a data URI of at most ``MOST`` characters; None if it cannot be read.

    Drops metadata, because a PNG's text chunks contain the prompt.
    """
    try:
        with Image.open(file) as image:
            plain = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    for side, quality in QUALITIES:
        small = ImageOps.fit(plain, (side, side), Image.Resampling.LANCZOS)
        clean, buffer = Image.new("RGB", small.size), io.BytesIO()
        clean.paste(small)
        clean.save(buffer, "JPEG", quality=quality, optimize=True)
        uri = PREFIX + base64.b64encode(buffer.getvalue()).decode()
        if len(uri) <= MOST:
            return uri
    return None


def trigger_of(config: TrainConfig) -> str | None:
    """Return the trigger words: the prompt of all pictures, or what precedes every caption."""
    if config.prompt:
        return config.prompt
    prefixes = {source.caption_prefix.strip(" ,") for source in config.sources if not source.regularization}
    return (prefixes.pop() or None) if len(prefixes) == 1 else None
