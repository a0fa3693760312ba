"""Resolve names in a configuration to folders, and check what needs no torch."""

from __future__ import annotations

from pathlib import Path

from simpletune.config.schema import DEMO, ResolvedConfig, TrainConfig
from simpletune.data.demo import DATA, MODELS, resolve
from simpletune.data.sources.multi_source import field_of, source_problems, with_paths
from simpletune.system.options import ConfigError, Problem, UserError


def file_problems(config: TrainConfig, family_known: bool = True, needs_data: bool = True) -> list[Problem]:
    """List missing folders and, if the family is known, conflicts with the model's shapes, without torch; build and
    download nothing. Without ``needs_data`` the folders of pictures are not listed, which may take seconds."""
    found: list[Problem] = []
    paths: list[Path | None] = []
    for index, source in enumerate(config.sources):
        is_demo = source.path.startswith(DEMO)
        if is_demo and source.path not in DATA:
            remedy = f"Use {' or '.join(DATA)}"
            found.append(Problem(field_of(config.pictures, index, "path"), f"unknown demo {source.path}. {remedy}"))
        paths.append(None if is_demo or not needs_data else Path(source.path))
    if config.data is not None:
        found += source_problems(config.data, paths)
    if not family_known:
        return found
    unknown = [(part, name) for part, name in _demo_parts(config) if name not in MODELS]
    if unknown:
        known = " or ".join(MODELS)
        return found + [Problem(f"model.{part}", f"unknown demo {name}. Use {known}") for part, name in unknown]
    config = resolve_model_folder(config)
    model = list(config.model.files.problems())
    if model:
        return found + model
    try:
        shapes = config.model.architecture.shapes(fetch=False)
    except UserError as error:
        return [*found, Problem("model.pretrained", str(error))]
    except (KeyError, TypeError) as error:
        return [
            *found,
            Problem(
                "model.pretrained",
                f"the {config.model.denoiser}'s config.json lacks {error}. Name an {config.model.words.title} model",
            ),
        ]
    found += config.shape_rules(dict(shapes)) if shapes else []
    try:
        if config.model.files.is_schedule_known():  # without a download
            found += list(config.objective.problems(config.model.files.scheduler_config, config.model.flow))
    except UserError as error:
        found.append(Problem("model.pretrained", str(error)))
    return found


def require_model_rules(config: TrainConfig) -> None:
    """Check rules that need the model's shapes and schedule, which ``check`` may not know before the download.

    The model's folder is resolved. All problems are raised as one ``ConfigError``.
    """
    problems = list(config.shape_rules(config.model.architecture.known_shapes()))
    problems += config.objective.problems(config.model.files.scheduler_config, config.model.flow)
    if problems:
        raise ConfigError(problems)


def resolve_folders(config: TrainConfig) -> ResolvedConfig:
    """Replace ``demo:`` names by folders, which are created on first use, and download the model from the hub, all of
    it before any other work. Raises UserError if it fails or does not fit on the disk."""
    config = resolve_data_folder(resolve_model_folder(config))
    config.model.files.fetch()
    return ResolvedConfig(config)


def resolve_data_folder(config: TrainConfig) -> TrainConfig:
    """Replace the data's ``demo:`` names by their folders."""

    def resolved(path: str) -> str:
        return str(resolve(path, config.output.cache_folder)) if path.startswith(DEMO) else path

    return config if config.data is None else config.model_copy(update={"data": with_paths(config.data, resolved)})


def resolve_model_folder(config: TrainConfig) -> TrainConfig:
    """Replace the model's ``demo:`` names by folders; download nothing."""
    folders = {part: str(resolve(name, config.output.cache_folder)) for part, name in _demo_parts(config)}
    return config.model_copy(update={"model": config.model.model_copy(update=folders)}) if folders else config


def known_to_inpaint(config: TrainConfig) -> bool:
    """Return whether the model inpaints, as far as is known without a download and with the files that are there."""
    model = resolve_model_folder(config).model
    if any(model.files.problems()):
        return False
    try:
        return model.files.denoiser_config(fetch=False) is not None and model.inpaints
    except UserError:  # whoever reads its weights says what is wrong with them
        return False


def _demo_parts(config: TrainConfig) -> list[tuple[str, str]]:
    """List the fields of ``model`` that contain a ``demo:`` name."""
    model = config.model
    found = {"pretrained": model.pretrained, model.denoiser: getattr(model, model.denoiser), "vae": model.vae}
    found["text_encoders"] = model.text_encoders
    return [(part, name) for part, name in found.items() if name is not None and name.startswith(DEMO)]
