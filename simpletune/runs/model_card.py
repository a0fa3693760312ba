"""Write the model card, README.md next to a result: what it is, its base, how it was trained and how to use it.

Cards, and everything else meant to be shared, name local files without their folders.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.adapters.files.header import OBJECTIVE
from simpletune.adapters.text.embedding_files import how_to_use
from simpletune.adapters.text.text_option import embedding_name
from simpletune.config.schema import TrainConfig
from simpletune.config.validation_schedule import ON_TRAINING, drift_words, loss_words
from simpletune.data.samples import images_in
from simpletune.data.sources.multi_source import with_paths
from simpletune.models.shared.family_files import ONLY_TRAINING
from simpletune.models.shared.words import Licence
from simpletune.runs.best_checkpoint import LAST
from simpletune.system.atomic import write_text
from simpletune.system.console import duration
from simpletune.system.hub import is_hub_name
from simpletune.system.options import Json, plural

if TYPE_CHECKING:
    from simpletune.stages.sample import ImageRequest

HINT = "modelspec.usage_hint"  # in headers
CARD, GRID = "README.md", "samples/grid.png"
INPUT_FILE, MASK_FILE = "input.png", "mask.png"  # which the reader has
MERGED = "merged"  # the base with the LoRAs that it was trained on top of
RESULT_LINE = re.compile(r'^RESULT = ".*$', re.MULTILINE)


def write_card(folder: Path, config: TrainConfig, summary: Json, manifest: Sequence[Json]) -> Path:
    """Write the model card of a run, whose folder has the result and the grid of pictures; returns its path."""
    file = folder / CARD
    write_text(file, model_card_text(folder, config, summary, manifest))
    return file


def model_card_text(folder: Path, config: TrainConfig, summary: Json, manifest: Sequence[Json]) -> str:
    """Build the text of a model card, of the configuration as the user gave it and the manifest of the run's plan."""
    example = example_of(config, manifest[0]["caption"])
    images = images_in(manifest)
    sections = [
        front_matter(config),
        f"# {config.name}",
        *_introduction(folder, config, example.prompt),
        "## How it was trained",
        "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in _rows(config, summary, images))]),
        "`config.json` contains every setting.",
        "## How to use it",
        *_use(config, example),
        "## Licence",
        _licence_text(config),
    ]
    return "\n\n".join(sections) + "\n"


def example_of(config: TrainConfig, caption: str) -> ImageRequest:
    """Return the picture that the card's instructions generate: the run's first validation picture, or of the first
    caption."""
    from simpletune.stages.sample import ImageRequest

    option, (width, height) = config.validation, config.image_size()
    prompt = caption if option.prompts is None else next(iter(option.prompts), config.prompt or caption)
    return ImageRequest(prompt, option.seed, option.negative_prompt, width, height, option.steps, option.guidance)


def front_matter(config: TrainConfig) -> str:
    """Build the YAML for the hub; ``base_model`` must be a hub name and is omitted for other bases."""
    from huggingface_hub import ModelCardData

    base = _hub_base(config)
    data = ModelCardData(
        base_model=base,
        base_model_relation=("finetune" if config.adapter.trains_base else "adapter") if base else None,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["text-to-image", "diffusers", config.model.words.pipeline.tag, config.adapter.method, "simpletune"],
        instance_prompt=config.prompt,
        ignore_metadata_errors=False,
        **licence(config),
    )
    return f"---\n{data.to_yaml()}\n---"


def licence(config: TrainConfig) -> Licence:
    """Build the licence fields; the base's licence also binds derived models."""
    base = _hub_base(config)
    if base is None:
        return {"license": "other"}
    known = config.model.words.licence(base)
    return {"license": "other", "license_link": f"https://huggingface.co/{base}"} if known is None else known


def shareable(config: TrainConfig) -> TrainConfig:
    """Remove local paths from a configuration: keep the last names of folders, and reset outputs to defaults."""
    model = {
        name: public_name(value)
        for name in ("pretrained", config.model.denoiser, "vae", "text_encoders")
        if (value := getattr(config.model, name)) is not None
    }
    marks = [(ONLY_TRAINING if lora in config.model.assistants else "", lora) for lora in config.model.loras]
    loras = [mark + public_name(lora.removeprefix(mark)) for mark, lora in marks]
    adapter = config.adapter
    if (start := getattr(adapter, "start", None)) is not None:
        adapter = adapter.model_copy(update={"start": public_name(start)})
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={**model, "loras": loras}),
            "adapter": adapter,
            "data": None if config.data is None else with_paths(config.data, last_name),
            "output": type(config.output)(),
            "validation": config.validation.model_copy(
                update={
                    name: [last_name(file) for file in files]
                    for name in ("images", "masks")
                    if (files := getattr(config.validation, name)) is not None
                }
            ),
        }
    )


def usage(config: TrainConfig) -> str | None:
    """Say what a user of the result has to set, because no file tells it; None: nothing."""
    return config.objective.usage(config.model.conventions(config.objective, config.resolution))


def usage_fields(config: TrainConfig) -> dict[str, str]:
    """Return the fields of a result's header that say ``usage``."""
    said = usage(config)
    return {} if said is None else {OBJECTIVE: config.objective.name, HINT: said}


def parent_words(parent: Json) -> str:
    """Describe a LoRA that a run began with or trained on top of, besides its name."""
    steps = "" if parent["steps"] is None else f"{plural(parent['steps'], 'step')}, "
    strength = "" if parent["scale"] == 1 else f"strength {parent['scale']:g}, "
    only = "; used only while training" if parent.get("only_training") else ""
    return f"{steps}{strength}SHA-256 {parent['sha256'][:16]}{only}"


def for_repository(card: str, repository: str) -> str:
    """Adapt the card's instructions to a repository on the hub."""
    return RESULT_LINE.sub(lambda line: f"RESULT = {json.dumps(repository)}", card)


def last_name(path: str) -> str:
    return os.path.basename(os.path.abspath(path))


def public_name(name: str) -> str:
    """Strip local folders from a model's name; hub and demo names are unchanged."""
    return name if is_hub_name(name) else last_name(name)


def _hub_base(config: TrainConfig) -> str | None:
    """Return the base's name on the hub, if it has one and the run starts from its weights."""
    name = config.model.files.weights_from
    return name if is_hub_name(name) and config.model.init == "pretrained" else None


def _introduction(folder: Path, config: TrainConfig, prompt: str) -> Iterator[str]:
    """Yield what the result is, of which base, and the prompt and pictures to begin with."""
    name = config.model.files.weights_from
    if config.model.init == "random":
        base = f"random weights with the architecture of {code(public_name(name))}"
    elif config.is_demo:
        base = f"{code(name)}, simpletune's tiny demo model that draws coloured shapes"
    elif is_hub_name(name):
        base = f"[{name}](https://huggingface.co/{name})"
    else:
        base = f"{code(public_name(name))}, a local copy (name it as `base_model` above if it is on the hub)"
    parts = [config.adapter.title] if config.adapter.trains else []
    parts += ["LoRA of the text encoders"] if config.text.lora is not None else []
    parts += [f"Embeddings of `{config.text.embeddings.token}`"] if config.text.embeddings is not None else []
    kind = "Fine-tuned transformer of" if config.adapter.trains_base else f"{' and '.join(parts)} for"
    yield f"{kind} {base}, trained with simpletune."
    yield f"Trigger prompt: {code(config.prompt)}" if config.prompt else f"Example prompt: {code(prompt)}"
    if (folder / GRID).exists():
        yield f"![Pictures of the base and the result from the same noise]({GRID})"


def _text(value: object) -> str:
    """Format a setting of the adapter for a cell; an entry of ``layers`` as its pattern and what it sets."""
    if isinstance(value, dict):
        return f"{value['pattern']} ({', '.join(f'{key} {own}' for key, own in value.items() if key != 'pattern')})"
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)


def _rows(config: TrainConfig, summary: Json, images: int) -> Iterator[tuple[str, str]]:
    """Yield the main settings and results."""
    train = config.train
    settings = config.adapter.model_dump(mode="json", exclude_none=True, exclude={"method", "start"})
    listed = [f"{key} {_text(value)}" for key, value in settings.items() if value != []]
    if (few := config.model.few_steps) is not None:
        yield "base", f"{few.title}, as its name or the configuration says: nothing in a file tells it"
    yield "method", escape_cell(", ".join([config.adapter.method, *listed]))
    if (parent := summary.get("parent")) is not None:
        yield "started from", f"{code(parent['name'])}, {parent_words(parent)}"
    for lora in summary.get("on_top_of", []):
        yield "on top of", f"{code(lora['name'])}, {parent_words(lora)}"
    if config.text.trains:
        yield "text side", escape_cell("; ".join(config.text.describe()))
    trained, total = summary["trainable_parameters"], summary["total_parameters"]
    yield "parameters", f"{trained:,} trained, {total:,} in the base"
    batch = f"batch {train.micro_batch}, gradient accumulation {train.accumulation}"
    early = f"; {summary['status']}" if "status" in summary else ""
    yield "steps", f"{summary['steps']:,} ({batch}){early}"
    schedule = f"{config.schedule.name}, {plural(config.schedule.warmup_steps, 'warm-up step')}"
    yield "learning rate", f"{config.optimizer.lr:g} ({config.optimizer.name}; {schedule})"
    yield "resolution", f"{config.resolution} px"
    if usage(config) is not None:
        yield "objective", f"{config.objective.name}: {config.objective.describe(None, '')}"
    held_out = f", and {summary['held_out_pictures']} held out" if summary.get("held_out_pictures") else ""
    if config.concept is None:
        places = ", ".join(dict.fromkeys(code(last_name(source.path)) for source in config.sources))
        yield "pictures", f"{images} from {escape_cell(places)}{held_out}"
    else:
        yield "pictures", "none: trained from prompts alone"
        for direction in config.concept.directions:
            yield "direction", escape_cell(direction.describe())
    yield "precision", f"{config.precision.weights} weights, {config.precision.settled_compute} compute"
    yield "seed", str(train.seed)
    if "seconds_total" in summary:
        several = f", in {summary['attempts']} attempts" if summary["attempts"] > 1 else ""
        yield "time", f"{duration(summary['seconds_total'])}{several}"
    peak, where = summary.get("peak_allocated_gib"), "on the GPU"
    if peak is None:
        peak, where = summary.get("peak_rss_gib"), "of the process (no GPU)"
    if peak is not None:
        yield "peak memory", f"{peak:.2f} GiB {where}"
    if losses := loss_words(summary):
        yield summary.get("eval_loss_is", ON_TRAINING), losses
    if drift := drift_words(summary):
        yield "drift from the base", drift
    best = summary.get("best")
    if best is not None and best["by"] != LAST and best["step"] != summary["steps"]:
        yield "best checkpoint", f"step {best['step']:,} by {best['by']}; this is step {summary['steps']:,}"
    if best is not None and best["by"] == LAST and (lowest := summary.get("lowest_held_out")) is not None:
        yield "best checkpoint", f"the last, step {best['step']:,}; held-out loss is lowest at step {lowest['step']:,}"


def _use(config: TrainConfig, example: ImageRequest) -> Iterator[str]:
    """Yield the instructions for diffusers and for the inference scripts."""
    if (said := usage(config)) is not None:
        yield said
    first = config.adapter.before_diffusers(config.model.lora[0].name)
    if first is not None:
        result = config.adapter.result(config.model.denoiser)
        yield (f"ComfyUI loads `{result}` from `models/loras`. " if config.adapter.in_comfyui else "") + first
    elif config.adapter.trains or config.text.lora is not None or _loaded_tokens(config):
        under = config.model.without_assistants().loras
        if under and not config.adapter.trains_base:
            loras, base = (
                (public_name(lora) for lora in under),
                _local_name(config, config.model.files.weights_from),
            )
            merge = shlex.join(["simpletune", "lora", "merge", *loras, "--base", base, "--out", MERGED])
            yield f"It was trained on top of other LoRAs. Merge them into the base first:\n\n```sh\n{merge}\n```"
        yield f"With diffusers:\n\n```python\n{snippet(config, example)}\n```"
    if (option := config.text.embeddings) is not None:
        name = embedding_name(config.name, option.token)
        uses = how_to_use(name, option.token, option.place, config.model.family)
        others = [f"- {use}" for use in uses if not use.startswith(("ComfyUI", "These"))]
        yield "\n".join([option.use(name), "", *others])
    parts = {name: getattr(config.model, name) for name in ("vae", "text_encoders")}
    replaced = [f"{name} {code(public_name(value))}" for name, value in parts.items() if value]
    if replaced:
        yield f"The run replaced parts of the base: {', '.join(replaced)}. Code for diffusers uses the base's own."
    if changes := config.model.files.changes_of("vae"):
        listed = ", ".join(f"{key} {value}" for key, value in changes.items())
        yield f"The autoencoder's latents are of {listed}, which `pipeline.vae` needs, too."
    base = _local_name(config, config.model.pretrained)
    script = "full_model" if config.adapter.trains_base else "lora"  # from the project's folder
    words = ["python", f"inference/{script}_inference.py", "--run", "path/to/this/folder", "--model", base]
    inputs = ["--image", INPUT_FILE, "--mask", MASK_FILE] if _paints(config) else []
    arguments = shlex.join(["--prompt", example.prompt, *inputs, "--seed", str(example.seed)])
    yield f"With simpletune:\n\n```sh\n{shlex.join(words)} \\\n    {arguments}\n```"


def _paints(config: TrainConfig) -> bool:
    """Return whether the model inpaints; without the base's files it counts as plain."""
    return config.model.pipeline == config.model.words.pipeline.inpainting


def _local_name(config: TrainConfig, name: str) -> str:
    """Return a model's name in commands, where the reader has to put a local one's own place."""
    return name if is_hub_name(name) or config.is_demo else f"path/to/{public_name(name)}"


def _loaded_tokens(config: TrainConfig) -> list[str]:
    """Return the embedding files that diffusers loads, which reads those of one text encoder."""
    option = config.text.embeddings
    if option is None or option.place == "output" or len(config.model.text.trainable) != 1:
        return []
    return [embedding_name(config.name, option.token)]


def snippet(config: TrainConfig, example: ImageRequest) -> str:
    """Write Python code that generates the example with diffusers."""
    model, precision = config.model, config.precision
    whole = (
        precision.encoder_dtype() if precision.settled_compute == "fp16" else precision.compute_dtype()
    )  # fp16: see there
    dtype = f"dtype={whole}"
    own = (
        None
        if config.adapter.trains_base
        else MERGED
        if model.without_assistants().loras
        else getattr(model, model.denoiser)
    )
    part, kind, pipeline = model.denoiser, model.architecture.diffusers_class, model.pipeline
    extra = [f"{part}={part}"] if own or config.adapter.trains_base else []
    conventions = model.conventions(config.objective, math.sqrt(example.width * example.height))
    scheduler = config.objective.diffusers_scheduler(conventions)
    classes = ", ".join([*([scheduler[0]] if scheduler else []), *([kind] if extra else []), pipeline])
    extra += [f"{name}={value}" for name, value in model.text.pipeline_arguments().items()]
    extra += [f"revision={model.revision!r}"] if model.revision and is_hub_name(model.pretrained) else []
    lines = ["import torch", f"from diffusers import {classes}"]
    lines += ["from diffusers.utils import load_image", ""] if _paints(config) else [""]
    lines += [f"BASE = {_source(model.pretrained)}", *([f"{part.upper()} = {_source(own)}"] if own else [])]
    lines += ['RESULT = "."  # the folder of this file, or the name of its repository on the hub', ""]
    result = config.adapter.result(model.denoiser)
    if config.adapter.trains_base:
        lines += [f'{part} = {kind}.from_pretrained(RESULT, subfolder="{result}", {dtype})']
    elif own:
        inside = f', subfolder="{part}"' if is_hub_name(own) else ""
        lines += [f"{part} = {kind}.from_pretrained({part.upper()}{inside}, {dtype})"]
    lines += [f"pipeline = {pipeline}.from_pretrained({', '.join(['BASE', *extra, dtype])})"]
    if scheduler:
        changes = {**model.files.changes_of("scheduler"), **scheduler[1]}
        options = "".join(f", {name}={value!r}" for name, value in changes.items())
        lines += [f"pipeline.scheduler = {scheduler[0]}.from_config(pipeline.scheduler.config{options})"]
    lines += [f'pipeline.load_textual_inversion(RESULT, weight_name="{name}")' for name in _loaded_tokens(config)]
    if not config.adapter.trains_base and (config.adapter.trains or config.text.lora):
        lines += [f'pipeline.load_lora_weights(RESULT, weight_name="{result}")']
    away = example.negative_prompt
    arguments = {
        "prompt": example.prompt,
        **({"negative_prompt": away} if away is not None and model.words.pipeline.negative_prompt else {}),
        "width": example.width,
        "height": example.height,
        "num_inference_steps": example.steps,
        model.words.pipeline.guidance: example.guidance + model.words.pipeline.guidance_offset,
        **model.text.call_arguments(),
    }
    lines += ['pipeline.to("cuda" if torch.cuda.is_available() else "cpu")', "picture = pipeline("]
    lines += [f"    {name}={value!r}," for name, value in arguments.items()]
    if _paints(config):
        lines += [f"    image=load_image({json.dumps(INPUT_FILE)}),  # the picture to paint into, of that shape"]
        lines += [
            f"    mask_image=load_image({json.dumps(MASK_FILE)}),  # white where it is painted",
            "    strength=1.0,",
        ]
    lines += [f'    generator=torch.Generator("cpu").manual_seed({example.seed}),', ").images[0]"]
    return "\n".join([*lines, 'picture.save("picture.png")'])


def _source(name: str) -> str:
    """Write a base as a Python string, with a comment on what to insert for a local one."""
    if is_hub_name(name):
        return json.dumps(name)
    return f"{json.dumps(f'path/to/{public_name(name)}')}  # the base's folder in diffusers' layout"


def _licence_text(config: TrainConfig) -> str:
    fields = licence(config)
    if "license_name" in fields:
        return (
            f"The base's licence ([{fields['license_name']}]({fields['license_link']})) also binds derived models. "
            "Read it before you use or share this one."
        )
    if fields["license"] != "other":
        return f"The base's licence ({fields['license']}) also binds derived models. Read it before you use this one."
    return "The base's licence also binds derived models. Name it in the front matter before you share this one."


def code(text: str) -> str:
    """Format text as inline code in Markdown; the text may contain backticks."""
    flat = " ".join(text.split())
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", flat)), default=0))
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{ticks}{pad}{flat}{pad}{ticks}"


def escape_cell(text: str) -> str:
    return text.replace("|", "\\|")
