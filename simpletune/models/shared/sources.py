"""Map each part of the model to the option that provides it, locate it, and report what is missing, without torch.

A single file takes precedence over ``model.text_encoders`` for the parts that it contains; the rest (always the
tokenizers) come from ``model.text_encoders``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import Part
from simpletune.models.shared.single_file import open_file
from simpletune.system.hub import HubPart, Repository, is_hub_name, part_folder
from simpletune.system.options import Problem, UserError

if TYPE_CHECKING:
    from simpletune.models.shared.family_facts import FamilyFacts

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
    if single and part.startswith(WITHOUT_WEIGHTS):
        fetched = model.scheduler_tells and model.text_encoders is not None and is_hub_name(model.text_encoders)
        return "text_encoders", model.text_encoders if fetched else None
    return "pretrained", model.pretrained


def locate_part(model: FamilyFacts, part: str) -> Part:
    """Locate a part, downloading it from the Hub if necessary.

    Raises:
        UserError: it is missing, or cannot be downloaded.
    """
    field, value = provider(model, part)
    if value is None:
        return _without_file(model, part)
    if is_single_file(value):
        if not open_file(Path(value), model.layout).has(part):
            raise UserError(f"model.{field}: {_without_part(model, value, part)}")
        return Part(part, _config_folder(model, part), Path(value), model.layout, _bundled(model, part))
    if is_hub_name(value):
        return Part(part, part_folder(_hub_part(model, part, field, value)))
    if field == part and (Path(value) / "config.json").exists():
        return Part(part, Path(value))
    folder = Path(value) / part
    if not folder.is_dir():
        raise UserError(f"model.{field}: {_without_folder(value, part)}")
    return Part(part, folder)


def _without_file(model: FamilyFacts, part: str) -> Part:
    """A part without weights for a single file: the scheduler is bundled, tokenizers are missing."""
    if part != "scheduler":
        raise UserError(f"model.pretrained: {_without_text_parts(model, [part])}")
    return Part(part, _config_folder(model, part), bundled=_bundled(model, part))


def _bundled(model: FamilyFacts, part: str) -> ModelConfig | None:
    """The shipped configuration of a part that a single file stores without one; None if there is none."""
    if part == model.denoiser or not is_single_file(model.pretrained):
        return None
    return model.bundled_configs()[model.file_version()].get(part)


def _config_folder(model: FamilyFacts, part: str) -> Path | None:
    """The folder of a part's configuration in ``model.text_encoders``; None to use the bundled one."""
    folder = Path(model.text_encoders or "/nowhere") / part
    known = _bundled(model, part) is not None and any(folder.glob("*config.json"))
    return folder if known else None


def _remedy(model: FamilyFacts) -> str:
    return (
        "Set model.text_encoders to a folder in diffusers' layout or to a Hub name "
        f"(such as {model.text_example}; only missing parts are downloaded)"
    )


def _without_part(model: FamilyFacts, file: str, part: str) -> str:
    """The message for a single file without a part."""
    remedy = "Set model.vae to a folder or Hub name that has one" if part == "vae" else _remedy(model)
    return f"{file} contains no {model.part_titles.get(part, part)}. {remedy}"


def _without_text_parts(model: FamilyFacts, missing: list[str]) -> str:
    """The message for a single file without text encoders or tokenizers."""
    return f"{model.pretrained} contains no {', '.join(missing)}. {_remedy(model)}"


def _without_folder(folder: str, part: str) -> str:
    """The message for a pipeline's folder without a part."""
    return f"{folder} has no {part}/ folder. Give {PIPELINE}"


def _hub_part(model: FamilyFacts, part: str, field: str, value: str) -> HubPart:
    weights = not part.startswith(WITHOUT_WEIGHTS) and not (part == model.denoiser and model.init == "random")
    return HubPart(Repository(value, model.revision if field == "pretrained" else None), part, weights)


def hub_parts(model: FamilyFacts) -> list[HubPart]:
    """All parts that come from the Hub, so that their total size can be checked before the download."""
    provided = [(part, *provider(model, part)) for part in model.part_names()]
    return [_hub_part(model, part, f, value) for part, f, value in provided if value is not None and is_hub_name(value)]


def problems(model: FamilyFacts) -> Iterator[Problem]:
    """Report invalid paths, files of another family, and parts that no option provides."""
    unusable = list(_unusable_names(model))
    yield from unusable
    if any(problem.path == "model.pretrained" for problem in unusable):
        return
    named = {problem.path for problem in unusable}
    provided = [(part, *provider(model, part)) for part in model.part_names()]
    for field, value in dict.fromkeys((field, value) for _, field, value in provided):
        if value is not None and f"model.{field}" not in named and _is_bare(value, model):
            yield Problem(f"model.{field}", f"{value} contains no part of a model. Give {PIPELINE}")
            named.add(f"model.{field}")
    for part, field, value in provided:
        if value is not None and not is_hub_name(value) and f"model.{field}" not in named:
            yield from _problems_of_part(model, field, value, part)
    if lacking := list(_lacking_text_parts(model, provided)):
        yield Problem("model.pretrained", _without_text_parts(model, lacking))


def _is_bare(folder: str, model: FamilyFacts) -> bool:
    """Whether a folder exists but contains no part of a model."""
    if not Path(folder).is_dir():
        return False
    parts = any((Path(folder) / part).is_dir() for part in model.part_names())
    return not parts and not (Path(folder) / "config.json").exists()


def _lacking_text_parts(model: FamilyFacts, provided: list[tuple[str, str, str | None]]) -> Iterator[str]:
    """The text encoders and tokenizers that the single file lacks and no other option provides."""
    for part, _, value in provided:
        if part.startswith("text_encoder") and value is not None and is_single_file(value):
            if not open_file(Path(value), model.layout).has(part):
                yield model.part_titles[part]
    if any(part.startswith("tokenizer") and value is None for part, _, value in provided):
        yield "tokenizers"


def _problems_of_part(model: FamilyFacts, field: str, value: str, part: str) -> Iterator[Problem]:
    """Check that a local folder or file contains a readable part."""
    if not is_single_file(value):
        yield from _problems_of_folder(model, field, Path(value), part)
        return
    file = open_file(Path(value), model.layout)
    try:
        if file.has(part):
            file.check(part)
        elif not part.startswith("text_encoder"):
            yield Problem(f"model.{field}", _without_part(model, value, part))
    except UserError as error:
        yield Problem(f"model.{field}", str(error))


def _problems_of_folder(model: FamilyFacts, field: str, folder: Path, part: str) -> Iterator[Problem]:
    """Check that a local folder contains a part. Skips the denoiser's configuration, which is read elsewhere."""
    own = field == part and (folder / "config.json").exists()
    if not own and not (folder / part).is_dir():
        yield Problem(f"model.{field}", _without_folder(str(folder), part))
    elif part != model.denoiser and not part.startswith("tokenizer"):
        try:
            Part(part, folder if own else folder / part).config()
        except UserError as error:
            yield Problem(f"model.{field}", str(error))


def _unusable_names(model: FamilyFacts) -> Iterator[Problem]:
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
