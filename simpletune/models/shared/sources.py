"""Map each part of the model to the option that provides it, locate it, and report what is missing, without torch.

A single file takes precedence over ``model.text_encoders`` for the parts that it contains; the rest (always the
tokenizers) come from ``model.text_encoders``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.models.shared.autoencoder import autoencoder_config
from simpletune.models.shared.model_config import ModelConfig, read_config
from simpletune.models.shared.parts import Part
from simpletune.models.shared.single_file import open_file
from simpletune.system.hub import HubPart, Repository, files_folder, is_hub_name, part_folder
from simpletune.system.options import Problem, UserError

if TYPE_CHECKING:
    from simpletune.models.shared.family_facts import FamilyFacts

INDEX = "model_index.json"
WITHOUT_WEIGHTS = ("tokenizer", "scheduler")
PIPELINE = "a folder in diffusers' layout, or a Hub name (owner/name)"


def is_single_file(name: str) -> bool:
    """Whether a name is the path of a single weight file."""
    return name.endswith((".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")) and not Path(name).is_dir()


def provider(model: FamilyFacts, part: str) -> tuple[str, str | None]:
    """The option that provides a part, and its value; the value is None if only a bundled configuration can serve.

    Raises:
        UserError: a single file cannot be read.
    """
    single = is_single_file(model.pretrained)
    if part in (model.denoiser, "vae") and getattr(model, part) is not None:
        return part, getattr(model, part)
    if part.startswith(("tokenizer", "text_encoder")) and model.text_encoders is not None:
        if not (single and open_file(Path(model.pretrained), model.layout).has(part)):
            return "text_encoders", model.text_encoders
    if part == "scheduler":
        return _scheduler_provider(model)
    if single and part.startswith(WITHOUT_WEIGHTS):
        return "text_encoders", None
    return "pretrained", model.pretrained


def _scheduler_provider(model: FamilyFacts) -> tuple[str, str | None]:
    """As for ``provider``. The scheduler says what the denoiser predicts, so it is that of whoever provides this: the
    marks of its file, or its pipeline's. Without, that of ``pretrained``; of a file without marks, that of the pipeline
    with its tokenizers."""
    field, value = provider(model, model.denoiser)
    if value is not None and field != "pretrained" and not is_hub_name(value) and not _has_scheduler(model, value):
        field, value = "pretrained", model.pretrained
    if value is None or not is_single_file(value) or _has_scheduler(model, value):
        return field, value
    text = model.text_encoders
    known = text is not None and (model.scheduler_tells if is_hub_name(text) else _has_scheduler(model, text))
    return "text_encoders", text if known else None


def _has_scheduler(model: FamilyFacts, source: str) -> bool:
    """Whether a file has marks that tell its scheduler, or a folder is of a pipeline with one, or its denoiser's."""
    if is_single_file(source):
        return Path(source).is_file() and bool(open_file(Path(source), model.layout).scheduler_settings)
    return any(_scheduler_folder(model, source).glob("*config.json"))


def _scheduler_folder(model: FamilyFacts, source: str) -> Path:
    """The folder of the scheduler of a pipeline's folder, or beside a denoiser's."""
    beside = Path(source).name == model.denoiser and (Path(source) / "config.json").exists()
    return (Path(source).parent if beside else Path(source)) / "scheduler"


def locate_part(model: FamilyFacts, part: str) -> Part:
    """See ``Family.part``."""
    field, value = provider(model, part)
    if part == "scheduler" and (value is None or is_single_file(value)):
        told = {} if value is None else open_file(Path(value), model.layout).scheduler_settings
        return Part(part, None, bundled={**model.bundled_configs()[model.file_version()][part], **told})
    if value is None:
        raise UserError(f"model.pretrained: {_lacks(model, model.pretrained, part)}")
    if is_single_file(value):
        if not open_file(Path(value), model.layout).has(part):
            raise UserError(f"model.{field}: {_lacks(model, value, part)}")
        folder, bundled = _config_beside_file(model, part)
        return Part(part, folder, Path(value), model.layout, bundled)
    if is_hub_name(value):
        return Part(part, part_folder(_hub_part(model, part, field, value)))
    if field == part and (Path(value) / "config.json").exists():
        return Part(part, Path(value))
    folder = _scheduler_folder(model, value) if part == "scheduler" else Path(value) / part
    if not folder.is_dir():
        raise UserError(f"model.{field}: {Path(value)} has no {part}/ folder. Give {PIPELINE}")
    return Part(part, folder)


def _config_beside_file(model: FamilyFacts, part: str) -> tuple[Path | None, ModelConfig | None]:
    """The configuration of a part that a single file stores without one: its folder in ``model.text_encoders``, if
    there is one, and the one that ships."""
    if part == model.denoiser or not is_single_file(model.pretrained):
        return None, None
    bundled = model.bundled_configs()[model.file_version()].get(part)
    folder = Path(model.text_encoders or "/nowhere") / part
    return (folder if bundled is not None and any(folder.glob("*config.json")) else None), bundled


def pipeline_index(model: FamilyFacts) -> ModelConfig:
    """The pipeline's ``model_index.json`` of ``pretrained``; empty for one without, or whose configurations ship.
    UserError: it is damaged."""
    name = model.pretrained
    if is_single_file(name) or name in model.hub_names:
        return {}
    folder = files_folder(name, (INDEX,), model.revision) if is_hub_name(name) else Path(name)
    return read_config(folder / INDEX, "pipeline") if folder is not None and (folder / INDEX).is_file() else {}


def schedule_source(model: FamilyFacts) -> str:
    """See ``Family.schedule_source``."""
    field, value = provider(model, "scheduler")
    if value is None:
        return "assumed, since the file does not tell"
    if is_single_file(value) and (file := open_file(Path(value), model.layout)).scheduler_settings:
        return "the file's marks" if any(mark in file.header for mark in model.layout.marks) else "the file's shapes"
    return "the model's scheduler config" if field == "pretrained" else f"the scheduler config in model.{field}"


def _lacks(model: FamilyFacts, file: str, *parts: str) -> str:
    """The message for a single file without these parts."""
    remedy = (
        "Set model.vae to a folder or Hub name that has one"
        if parts == ("vae",)
        else "Set model.text_encoders to a folder in diffusers' layout or to a Hub name "
        f"(such as {model.text_example}; only missing parts are downloaded)"
    )
    titles = {encoder.model: encoder.title for encoder in model.text.encoders} | {"vae": "autoencoder (VAE)"}
    return f"{file} contains no {', '.join(titles.get(part, part) for part in parts)}. {remedy}"


def _hub_part(model: FamilyFacts, part: str, field: str, value: str) -> HubPart:
    weights = not part.startswith(WITHOUT_WEIGHTS) and not (part == model.denoiser and model.init == "random")
    repository = Repository(value, model.revision if field == "pretrained" else None)

    def check(folder: Path) -> None:
        model.require_supported(read_config(folder / "config.json", part), value)

    return HubPart(repository, part, weights, check if part == model.denoiser else None)


def hub_parts(model: FamilyFacts) -> list[HubPart]:
    """All parts that come from the Hub, so that their total size can be checked before the download."""
    provided = [(part, *provider(model, part)) for part in model.part_names()]
    return [_hub_part(model, part, f, value) for part, f, value in provided if value is not None and is_hub_name(value)]


def problems(model: FamilyFacts, channels: Callable[[], int | None]) -> Iterator[Problem]:
    """Report invalid paths, files of another family, and parts that no option provides; ``channels`` returns those of
    the latents that the denoiser reads, or None if they are unknown."""
    unusable = list(unusable_names(model))
    yield from unusable
    if any(problem.path == "model.pretrained" for problem in unusable):
        return
    named = {problem.path for problem in unusable}
    parts = [part for part in model.part_names() if part != "scheduler" or f"model.{model.denoiser}" not in named]
    provided = [(part, *provider(model, part)) for part in parts]
    for field, value in dict.fromkeys((field, value) for _, field, value in provided):
        if value is not None and f"model.{field}" not in named and Path(value).is_dir():
            if (
                not any((Path(value) / part).is_dir() for part in model.part_names())
                and not (Path(value) / "config.json").exists()
            ):
                yield Problem(f"model.{field}", f"{value} contains no part of a model. Give {PIPELINE}")
                named.add(f"model.{field}")
    lacking = []  # parts of the text side that the single file lacks, and no other option provides
    for part, field, value in provided:
        if value is None or is_hub_name(value) or f"model.{field}" in named:
            continue
        if part.startswith("text_encoder") and is_single_file(value):
            if not open_file(Path(value), model.layout).has(part):
                lacking.append(part)
                continue
        try:
            located = locate_part(model, part)
            if located.file is not None:
                located.single_file().check(part)
            elif part == "vae":
                autoencoder_config(located, model.latents, channels())
            elif part != model.denoiser and not part.startswith("tokenizer"):  # the denoiser's is read elsewhere
                located.config()
        except UserError as error:
            yield Problem(f"model.{field}", re.sub(r"^model\.\w+: ", "", str(error)))
    if any(part.startswith("tokenizer") and value is None for part, _, value in provided):
        lacking.append("tokenizers")
    if lacking:
        yield Problem("model.pretrained", _lacks(model, model.pretrained, *lacking))


def unusable_names(model: FamilyFacts) -> Iterator[Problem]:
    """Report options that name neither a folder nor a usable file nor a Hub repository."""
    for field in ("pretrained", model.denoiser, "vae", "text_encoders"):
        value = getattr(model, field)
        if value is None or is_hub_name(value) or Path(value).is_dir():
            continue
        if is_single_file(value) and field in ("pretrained", model.denoiser):
            try:
                open_file(Path(value), model.layout)
            except FileNotFoundError:
                yield Problem(f"model.{field}", f"{value} does not exist. Check the path")
            except (UserError, OSError) as error:
                yield Problem(f"model.{field}", str(error))
        else:
            yield Problem(f"model.{field}", f"{value} is neither a folder nor a Hub name (owner/name). Check the path")
